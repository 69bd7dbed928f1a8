"""Few tokens times a weight matrix, fused with what is beside it."""

from typing import Any

import pytest
import torch

from minisgl_kernels import skinny_linear as module
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.skinny_linear import skinny_linear, skinny_linear_reference

SIZES = [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 1024), (40, 32), (7168, 5120),
         (2560, 9728), (263 * 2, 96)]  # fmt: skip
LARGE = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (7168, 5120),
         (5120, 5120), (34816, 5120), (5120, 17408), (151936, 5120)]  # fmt: skip
DEVICE = "cuda"


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def distance(out: torch.Tensor, exact: torch.Tensor) -> float:
    assert torch.isfinite(out).all()
    return float((out.double() - exact.double()).norm() / exact.double().norm())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("rows", "k"), SIZES)
def test_every_variant_is_its_reference(rows: int, k: int, tokens: int) -> None:
    x, weight = made(tokens, k), made(rows, k, scale=k**-0.5)
    norm, residual, bias = made(k), made(tokens, rows), made(rows)
    variants: list[dict[str, Any]] = [
        {}, {"norm": norm, "eps": 1e-6}, {"residual": residual}, {"bias": bias},
        {"norm": norm, "eps": 1e-3, "silu": True},
    ]  # fmt: skip
    for options in variants:
        mine, theirs = dict(options), dict(options)
        if "residual" in options:
            mine["residual"], theirs["residual"] = residual.clone(), residual.float()
        out = skinny_linear(x, weight, **mine)
        exact = skinny_linear_reference(x.float(), weight.float(), **theirs)
        assert out.shape == exact.shape
        assert distance(out, exact) < 6e-3, options


def test_float16_has_a_kernel_too() -> None:
    x, weight = made(5, 256, dtype=torch.float16), made(64, 256, dtype=torch.float16, scale=0.06)
    assert distance(skinny_linear(x, weight), x.double() @ weight.double().T) < 1e-3


def test_a_token_gives_the_same_bits_in_any_batch() -> None:
    x, weight, norm = made(64, 3072), made(4096, 3072, scale=0.02), made(3072)
    whole = skinny_linear(x, weight, norm=norm, eps=1e-6)
    for tokens in (1, 5, 8, 16, 31, 50):
        assert torch.equal(skinny_linear(x[:tokens], weight, norm=norm, eps=1e-6), whole[:tokens])


def test_what_it_cannot_do_is_said() -> None:
    with pytest.raises(KernelUnavailable, match="65 rows"):
        skinny_linear(made(65, 64), made(8, 64))
    with pytest.raises(KernelUnavailable, match="rows of 48"):
        skinny_linear(made(1, 48), made(8, 48))


def test_a_graph_of_it_computes_new_inputs() -> None:
    x, weight, out = made(3, 512), made(96, 512, scale=0.05), made(3, 96)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        skinny_linear(x, weight, out=out)
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            skinny_linear(x, weight, out=out)
        x.copy_(made(3, 512))
        graph.replay()
        stream.synchronize()
    assert distance(out, x.double() @ weight.double().T) < 4e-3


def test_speed_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim: a table of microseconds and TB/s of weights, beside torch's product."""
    from triton.testing import do_bench_cudagraph

    lines = []
    for rows, k in LARGE:
        # rotate among copies, or small ones are read from the cache
        copies = [made(rows, k) for _ in range(max(1, 200_000_000 // (rows * k * 2)))]
        for tokens in (1, 8, 32):
            x = made(tokens, k)
            ours = do_bench_cudagraph(lambda: [skinny_linear(x, w) for w in copies], rep=5)  # noqa: B023
            ways = {}
            for way in ((0, 4), (0, 8), (1, 4), (1, 8)):
                monkeypatch.setattr(module, "shape_of_blocks", lambda *a, way=way: way)
                ways[way] = do_bench_cudagraph(lambda: [skinny_linear(x, w) for w in copies], rep=5)  # noqa: B023
            monkeypatch.undo()
            theirs = do_bench_cudagraph(lambda: [x @ w.T for w in copies], rep=5)  # noqa: B023
            us, them = (1e3 * t / len(copies) for t in (ours, theirs))
            rate = rows * k * 2 / us / 1e6
            each = " ".join(f"{1e3 * t / len(copies):.2f}" for t in ways.values())
            lines.append(f"{rows:>7} x {k:<6} {tokens:>3} tokens {us:8.2f} us {rate:5.2f} TB/s, "
                         f"torch {them:8.2f} us, by rows and warps {each}")  # fmt: skip
    with capsys.disabled():
        print("\n" + "\n".join(lines))
