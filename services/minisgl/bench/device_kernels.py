"""The CUDA kernels of `minisgl bench kernels`, on shapes of Qwen3-0.6B and Qwen3-14B."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minisgl.bench.device import DeviceCase
from minisgl.engine.draw import DrawBatch, draw_reference
from minisgl.engine.filters import bounds
from minisgl_kernels import (
    activation,
    decode_inputs,
    embedding,
    filter_bounds,
    kv_store,
    norm,
    qk_rope_store,
    sample,
    skinny_linear,
    tuned_linear,
    wide_linear,
)
from minisgl_kernels.cuda_build import collected, prepare

DTYPE = torch.bfloat16
TOKENS = (1, 32, 256, 8192)
HIDDEN = (1024, 5120)
WIDTHS = (3072, 17408)
HEADS = ((16, 8), (40, 8))
HEAD_DIM = 128
VOCAB = 151936
LINEARS = (
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (VOCAB, 1024),
    (7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408),
)  # fmt: skip
"""Outputs and inputs: QKV, O, gate and up, down, and the smaller model's LM head."""
SLOTS = 16384
EPS = 1e-6


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def _integers(below: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(below, (count,), dtype=dtype, device="cuda")


def _slots(count: int) -> torch.Tensor:
    """Each slot once: two writers of one would be a race."""
    return torch.randperm(SLOTS, device="cuda")[:count].int()


def embedding_cases() -> Iterator[DeviceCase]:
    """Rows of the table: each is read once and written once."""

    def make(tokens: int, table: torch.Tensor) -> tuple[Any, ...]:
        return _integers(VOCAB, tokens), table, 0, VOCAB

    for hidden in HIDDEN:
        table = _randn(VOCAB, hidden)
        for tokens in TOKENS:
            yield DeviceCase(
                f"{tokens}x{hidden}", tokens * (4 + 2 * 2 * hidden), partial(make, tokens, table),
                embedding.embedding_function(), embedding.embedding_reference,
            )  # fmt: skip


def store_cases() -> Iterator[DeviceCase]:
    """Keys and values of 8 heads, which are views of one QKV product."""
    heads = HEADS[0][1]
    slots = _randn(2, SLOTS, heads, HEAD_DIM)
    row = heads * HEAD_DIM

    def make(tokens: int) -> tuple[Any, ...]:
        qkv = _randn(tokens, 4 * row).view(tokens, -1, HEAD_DIM)
        k, v = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
        return k, v, slots[0], slots[1], _slots(tokens)

    for tokens in TOKENS:
        yield DeviceCase(
            f"{tokens}x{row}", tokens * (4 + 2 * 2 * 2 * row), partial(make, tokens),
            kv_store.store_kv_function(), kv_store.store_kv_reference,
        )  # fmt: skip


def norm_cases() -> Iterator[DeviceCase]:
    """Add and norm: x and residual are read, residual and result written."""

    def make(tokens: int, hidden: int) -> tuple[Any, ...]:
        return _randn(tokens, hidden), _randn(tokens, hidden), _randn(hidden), EPS

    for hidden in HIDDEN:
        for tokens in TOKENS:
            yield DeviceCase(
                f"{tokens}x{hidden}", 2 * hidden * (4 * tokens + 1), partial(make, tokens, hidden),
                norm.add_rms_norm_function(), norm.add_rms_norm_reference,
            )  # fmt: skip


def qk_cases() -> Iterator[DeviceCase]:
    """Norm, rope and store: the QKV product is read, and as much is written."""
    table = torch.rand(4096, HEAD_DIM, device="cuda")
    slots = _randn(2, SLOTS, HEADS[0][1], HEAD_DIM)

    def make(tokens: int, hq: int, hkv: int) -> tuple[Any, ...]:
        return (
            _randn(tokens, (hq + 2 * hkv) * HEAD_DIM), _randn(HEAD_DIM), _randn(HEAD_DIM), EPS,
            table, _integers(4096, tokens), _slots(tokens), slots[0], slots[1], hq, hkv,
        )  # fmt: skip

    for hq, hkv in HEADS:
        for tokens in TOKENS:
            row = (hq + 2 * hkv) * HEAD_DIM
            yield DeviceCase(
                f"{tokens}x{hq}+2x{hkv}", tokens * (8 + 2 * 2 * row + 4 * HEAD_DIM),
                partial(make, tokens, hq, hkv), qk_rope_store.qk_rope_store_function(),
                qk_rope_store.qk_rope_store_reference,
            )  # fmt: skip


def gate_cases() -> Iterator[DeviceCase]:
    """Gate and up are read, their product written."""

    def make(tokens: int, width: int) -> tuple[Any, ...]:
        return (_randn(tokens, 2 * width),)

    for width in WIDTHS:
        for tokens in TOKENS:
            yield DeviceCase(
                f"{tokens}x{width}", tokens * 3 * 2 * width, partial(make, tokens, width),
                activation.silu_and_mul_function(), activation.silu_and_mul_reference,
            )  # fmt: skip


def linear_cases(
    function: Callable[[], Callable[..., object] | None], counts: tuple[int, ...]
) -> Iterator[DeviceCase]:
    """Products of few tokens: the weights are read once. Beside them torch's product."""

    def make(tokens: int, rows: int, k: int) -> tuple[Any, ...]:
        return _randn(tokens, k), _randn(rows, k)

    with collected() as variants:
        for (rows, k), tokens in itertools.product(LINEARS, counts):
            x, weight = (torch.empty(n, k, dtype=DTYPE, device="meta") for n in (tokens, rows))
            kernel = function()
            if kernel is not None and kernel is not tuned_linear.tuned_linear:
                kernel(x, weight)
    prepare(variants)
    with tuned_linear.measuring():
        for rows, k in LINEARS:
            for tokens in counts:
                yield DeviceCase(
                    f"{tokens}x{k} {rows}", 2 * (rows * k + tokens * (rows + k)),
                    partial(make, tokens, rows, k), function(), F.linear,
                )  # fmt: skip


def decode_input_cases() -> Iterator[DeviceCase]:
    """A few bytes a request: it counts as a launch, not for its bandwidth."""
    table = torch.zeros(257, 4096, dtype=torch.int32, device="cuda")

    def make(batch: int) -> tuple[Any, ...]:
        found = torch.empty(3, batch, dtype=torch.int32, device="cuda")
        return _integers(257, batch), _integers(4095, batch) + 1, table, table, *found

    for batch in (1, 256):
        yield DeviceCase(
            f"{batch}", batch * 4 * 7, partial(make, batch),
            decode_inputs.decode_inputs_function(), decode_inputs.decode_inputs_reference,
        )  # fmt: skip


def sample_cases() -> Iterator[DeviceCase]:
    """A draw for each row of bfloat16 logits, which are read once."""

    def make(batch: int, kind: str) -> tuple[Any, ...]:
        greedy = torch.full((batch,), kind == "greedy", device="cuda")
        temperature = torch.full((batch,), 0.6, device="cuda")
        return (
            _randn(batch, VOCAB), temperature, _integers(1 << 40, batch, torch.int64),
            _integers(1024, batch, torch.int64), greedy,
        )  # fmt: skip

    def reference(
        logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor,
        positions: torch.Tensor, greedy: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        logits = logits.float()
        largest = logits.argmax(dim=1)
        batch = DrawBatch(None, temperature, seeds, positions, None, None, None)
        return torch.where(greedy, largest, draw_reference(logits, largest, batch))

    for kind in ("draw", "greedy"):
        for batch in (1, 8, 32, 256):
            yield DeviceCase(
                f"{kind} {batch}", batch * (2 * VOCAB + 29), partial(make, batch, kind),
                sample.sample_function(), reference, capturable=False,
            )  # fmt: skip


def filter_cases() -> Iterator[DeviceCase]:
    """top_k 20 and top_p 0.95, or top_p alone, of bfloat16 logits, which are read once."""

    def make(batch: int, top_k: int) -> tuple[Any, ...]:
        k = torch.full((batch,), top_k, device="cuda") if top_k else None
        p = torch.full((batch,), 0.95, dtype=torch.float64, device="cuda")
        return _randn(batch, VOCAB) * 3, torch.full((batch,), 0.6, device="cuda"), k, p, None

    def reference(
        logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None,
        top_p: torch.Tensor | None, min_p: torch.Tensor | None,
    ) -> object:  # fmt: skip
        logits = logits.float()
        y = (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]
        return bounds(y, top_k, top_p, min_p)

    for top_k in (20, 0):
        for batch in (1, 32, 256):
            yield DeviceCase(
                f"{'k, p' if top_k else 'p'} {batch}", batch * (2 * VOCAB + 32),
                partial(make, batch, top_k), filter_bounds.filter_bounds_function(), reference,
                capturable=False,
            )  # fmt: skip


DEVICE_KERNELS: dict[str, Callable[[], Iterator[DeviceCase]]] = {
    "embedding": embedding_cases,
    "store-kv": store_cases,
    "add-rms-norm": norm_cases,
    "qk-rope-store": qk_cases,
    "silu-and-mul": gate_cases,
    "decode-inputs": decode_input_cases,
    "skinny-linear": partial(
        linear_cases, skinny_linear.skinny_linear_function, (1, 8, 16, 32, 64)
    ),
    "wide-linear": partial(
        linear_cases, wide_linear.wide_linear_function, (1, 8, 16, 32, 64, 128, 170, 256)
    ),
    "tuned-linear": partial(linear_cases, tuned_linear.tuned_linear_function, (32, 128, 256)),
    "sample": sample_cases,
    "filter-bounds": filter_cases,
}
"""By name, as in `kernels.KERNELS`."""
