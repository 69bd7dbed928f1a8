"""Times of ways to cut a product among blocks, and of a layer's products after each other.

    python -m tests.gpu.wide_linear_speed [0.6b] [14b] [FILE.json]

Microseconds of one product, in a graph of many with weights of their own, so that those come from
memory. What is best here should be among `likely_blocks`.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minisgl.bench.device import time_on_device
from minisgl_kernels.activation import silu_and_mul
from minisgl_kernels.cuda_build import prepare
from minisgl_kernels.norm import rms_norm
from minisgl_kernels.wide_linear import (
    SHARED_BYTES,
    Blocks,
    Normed,
    _family,
    likely_blocks,
    signature,
    wide_add,
    wide_linear,
)


class Product(NamedTuple):
    """One of a layer's: its weights, and what comes behind it (0 nothing, 1 a residual, 2 gate)."""

    rows: int
    k: int
    mode: int


MODELS = {
    "0.6b": (Product(4096, 1024, 0), Product(1024, 2048, 1), Product(6144, 1024, 2),
             Product(1024, 3072, 1)),
    "14b": (Product(7168, 5120, 0), Product(5120, 5120, 1), Product(34816, 5120, 2),
            Product(5120, 17408, 1)),
}  # fmt: skip
TOKENS = (16, 32, 64, 96, 128, 176, 256)
SECONDS = 0.003


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").mul_(0.03).bfloat16()


def time_one(call: Callable[..., object], x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """Microseconds."""
    return 1e6 * time_on_device(call, [(x, weight) for weight in weights], SECONDS)


def wide(
    mode: int, cut: Blocks | None, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> object:
    if mode == 1:
        return wide_add(residual, x, weight, residual[0], blocks=cut)
    return wide_linear(x, weight, silu=mode == 2, blocks=cut)


def library(
    mode: int, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """With what a layer computes beside it: a norm or the gate."""
    if mode == 1:
        return rms_norm(residual.addmm_(x, weight.t()), residual[0], 1e-6)
    out = F.linear(x, weight)
    return silu_and_mul(out) if mode == 2 else out


def sweep(model: str, results: dict[str, dict[str, float]]) -> None:
    """A line for each product and number of tokens: its likely cuts, and the library."""
    prepare(
        {
            (_family, signature(n, cut, product.mode))
            for product in MODELS[model] for n in TOKENS
            for cut in likely_blocks(n, *product)
        }
    )  # fmt: skip
    for product in MODELS[model]:
        rows, k, mode = product
        weights = [made(rows, k) for _ in range(max(3, 150_000_000 // (rows * k * 2)))]
        for tokens in TOKENS:
            x, residual = made(tokens, k), made(tokens, rows)
            times = {
                cut: time_one(partial(wide, mode, cut, residual), x, weights)
                for cut in likely_blocks(tokens, rows, k, mode)
            }
            shown = " ".join(
                f"{times[cut]:.2f}{cut[:4]}{'' if cut.shared == SHARED_BYTES else 'h'}"
                for cut in sorted(times, key=times.__getitem__)
            )
            library_time = time_one(partial(library, mode, residual), x, weights)
            print(f"{rows}x{k} {tokens}: {shown} | library {library_time:.2f}", flush=True)
            found = {" ".join(map(str, cut)): time for cut, time in times.items()}
            results[f"{rows} {k} {mode} {tokens}"] = {"library": library_time, **found}


def best_of(results: dict[str, dict[str, float]], product: Product, tokens: int) -> Blocks:
    """The cut that was the fastest."""
    times = results[" ".join(map(str, (*product, tokens)))]
    name = min(times.keys() - {"library"}, key=times.__getitem__)
    return Blocks(*map(int, name.split()))


def layer(model: str, results: dict[str, dict[str, float]]) -> None:
    """All products of a layer, with norms and gate: the library's, and ours, each by its best
    cut."""
    _, o, _, _ = MODELS[model]
    count = max(3, 400_000_000 // (2 * sum(p.rows * p.k for p in MODELS[model])))
    layers = [tuple(made(p.rows, p.k) for p in MODELS[model]) for _ in range(count)]
    norm = made(o.rows)
    for tokens in TOKENS:
        h, heads = made(tokens, o.rows), made(tokens, o.k)
        cuts = [best_of(results, product, tokens) for product in MODELS[model]]
        ready: list[Normed | None] = [None]

        def ours(*weights: torch.Tensor) -> None:
            before = ready[0]  # noqa: B023
            x: torch.Tensor | Normed = rms_norm(h, norm, 1e-6) if before is None else before  # noqa: B023
            wide_linear(x, weights[0], eps=1e-6, blocks=cuts[0])  # noqa: B023
            x = wide_add(h, heads, weights[1], norm, blocks=cuts[1])  # noqa: B023
            x = wide_linear(x, weights[2], eps=1e-6, silu=True, blocks=cuts[2])  # noqa: B023
            ready[0] = wide_add(h, x, weights[3], norm, blocks=cuts[3])  # noqa: B023

        def theirs(*weights: torch.Tensor) -> None:
            F.linear(rms_norm(h, norm, 1e-6), weights[0])  # noqa: B023
            h.addmm_(heads, weights[1].t())  # noqa: B023
            x = silu_and_mul(F.linear(rms_norm(h, norm, 1e-6), weights[2]))  # noqa: B023
            h.addmm_(x, weights[3].t())  # noqa: B023

        found = []
        for way in (ours, theirs):
            h.copy_(made(tokens, o.rows))
            found.append(1e6 * time_on_device(way, layers, 0.01))
        print(
            f"layer of {model}, {tokens} tokens: {found[0]:.1f} us, library {found[1]:.1f}",
            flush=True,
        )


def main(arguments: list[str]) -> None:
    torch.manual_seed(0)
    files = [Path(name) for name in arguments if name.endswith(".json")]
    models = [name for name in arguments if name in MODELS] or list(MODELS)
    results: dict[str, dict[str, float]] = {}
    for model in models:
        sweep(model, results)
        layer(model, results)
        for file in files:
            file.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
