"""The experts of an MoE layer as two grouped products and a sum, without a word to the host.

    align      which rows belong to which expert, in whole blocks
    gate_up    [T * top_k, width] = silu(x @ gate.T) * (x @ up.T), for each row by its expert
    down       [T * top_k, hidden] = inner @ down.T, times the router's weight
    combine    [T, hidden], the sum of each token's rows

With few rows the products read weights and nothing else counts: small blocks, and enough of them
for all multiprocessors; with very few each row is a block, and nothing is aligned. With many they
are bound by arithmetic: large blocks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl_kernels.moe_align import align, max_blocks, overlaps, wait_for_previous


@dataclass(frozen=True, slots=True)
class Blocks:
    """The tiles of one product: [m, n] outputs from k inputs at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


FEW = (Blocks(16, 32, 128, 4, 4), Blocks(16, 128, 128, 4, 3))
SMALL = (Blocks(16, 64, 64, 4, 5), Blocks(16, 128, 64, 4, 4))
MEDIUM = (Blocks(64, 64, 64, 4, 4), Blocks(64, 128, 64, 4, 4))
LARGE = (Blocks(128, 128, 64, 8, 3), Blocks(128, 256, 64, 8, 3))
FEW_ROWS = 32
SIZES = (FEW, SMALL, MEDIUM, LARGE)
"""Of `gate_up`, whose blocks are n columns of each of the two, and of `down`."""


def sizes_for(dtype: torch.dtype) -> tuple[tuple[Blocks, Blocks], ...]:
    """Those that fit into shared memory, smallest first."""
    return SIZES if dtype.itemsize == 2 else SIZES[:-1]


def choose_blocks(rows: int, experts: int, dtype: torch.dtype) -> tuple[Blocks, Blocks]:
    """By the rows that an expert has on the average."""
    if rows <= FEW_ROWS:
        return FEW
    if rows <= 24 * experts:
        return SMALL
    return MEDIUM if rows <= 128 * experts else sizes_for(dtype)[-1]


def run_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    blocks: tuple[Blocks, Blocks] | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts: [T, hidden].

    x is [T, hidden], gate_up [experts, 2 * width, hidden], down [experts, hidden, width], weights
    [T, top_k] float32, ids [T, top_k] int32, all contiguous. `blocks` overrides the choice by size;
    both have the same m. The reference is `run_experts` of minisgl/moe/experts.py.
    """
    (tokens, hidden), (experts, _, width), top_k = x.shape, down.shape, ids.shape[1]
    rows = tokens * top_k
    wide, back = blocks or choose_blocks(rows, experts, x.dtype)
    alone = rows <= FEW_ROWS and wide.m == FEW[0].m
    # With a row in each block the experts of the blocks are the ids as they come.
    places, of_blocks, used = (ids, ids, ids) if alone else align(ids, experts, wide.m)
    most = rows if alone else max_blocks(rows, experts, wide.m)
    inner = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    parts = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    # TF32 would lose what a float32 model is for.
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    pdl = overlaps()
    _gate_up[(triton.cdiv(width, wide.n), most)](
        x, gate_up, inner, places, of_blocks, used, rows,
        HIDDEN=hidden, WIDTH=width, TOP_K=top_k, ALONE=alone, M=wide.m, N=wide.n, K=wide.k,
        PRECISION=precision, PDL=pdl, num_warps=wide.warps, num_stages=wide.stages, launch_pdl=pdl,
    )  # fmt: skip
    _down[(triton.cdiv(hidden, back.n), most)](
        inner, down, parts, weights, places, of_blocks, used, rows,
        HIDDEN=hidden, WIDTH=width, ALONE=alone, M=back.m, N=back.n, K=back.k,
        PRECISION=precision, PDL=pdl, num_warps=back.warps, num_stages=back.stages, launch_pdl=pdl,
    )  # fmt: skip
    columns = min(1024, triton.next_power_of_2(hidden))
    _combine[(triton.cdiv(hidden, columns), tokens)](
        parts, out, HIDDEN=hidden, TOP_K=top_k, N=columns, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


@triton.jit
def _rows(places, block, n, ALONE: tl.constexpr, M: tl.constexpr):
    """The rows of a block; `n` where it has none."""
    lane = tl.arange(0, M)
    if ALONE:
        row = tl.where(lane == 0, block, n)
    else:
        row = tl.load(places + block * M + lane)
    return row.to(tl.int64)


@triton.jit(do_not_specialize=["n"])
def _gate_up(
    x, w, out, places, of_blocks, used, n,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ALONE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    block = tl.program_id(1)
    if not ALONE:  # noqa: SIM102 (Triton knows this at compile time, and nothing of the other)
        if block * M >= tl.load(used):
            return
    expert = tl.load(of_blocks + block).to(tl.int64)
    row = _rows(places, block, n, ALONE, M)
    live = row < n
    column = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    # Columns beyond the last read the last one: a mask on them would cost more than it saves.
    inside = tl.minimum(column, WIDTH - 1)
    x_at = x + (row // TOP_K)[:, None] * HIDDEN + k[None, :]
    gate_at = w + expert * (2 * WIDTH * HIDDEN) + inside[None, :] * HIDDEN + k[:, None]
    up_at = gate_at + WIDTH * HIDDEN
    gate = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    for start in range(0, HIDDEN, K):
        if HIDDEN % K == 0:
            a = tl.load(x_at, mask=live[:, None], other=0.0)
            g = tl.load(gate_at)
            u = tl.load(up_at)
        else:
            rest = k < HIDDEN - start
            a = tl.load(x_at, mask=live[:, None] & rest[None, :], other=0.0)
            g = tl.load(gate_at, mask=rest[:, None], other=0.0)
            u = tl.load(up_at, mask=rest[:, None], other=0.0)
        gate = tl.dot(a, g, gate, input_precision=PRECISION)
        up = tl.dot(a, u, up, input_precision=PRECISION)
        x_at += K
        gate_at += K
        up_at += K
    inner = gate * tl.sigmoid(gate) * up
    out_at = out + row[:, None] * WIDTH + column[None, :]
    tl.store(out_at, inner.to(out.dtype.element_ty), mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["n"])
def _down(
    inner, w, out, weights, places, of_blocks, used, n,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ALONE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    block = tl.program_id(1)
    if not ALONE:  # noqa: SIM102 (Triton knows this at compile time, and nothing of the other)
        if block * M >= tl.load(used):
            return
    expert = tl.load(of_blocks + block).to(tl.int64)
    row = _rows(places, block, n, ALONE, M)
    live = row < n
    column = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    inside = tl.minimum(column, HIDDEN - 1)
    a_at = inner + row[:, None] * WIDTH + k[None, :]
    b_at = w + expert * (HIDDEN * WIDTH) + inside[None, :] * WIDTH + k[:, None]
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, WIDTH, K):
        if WIDTH % K == 0:
            a = tl.load(a_at, mask=live[:, None], other=0.0)
            b = tl.load(b_at)
        else:
            rest = k < WIDTH - start
            a = tl.load(a_at, mask=live[:, None] & rest[None, :], other=0.0)
            b = tl.load(b_at, mask=rest[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_at += K
        b_at += K
    total *= tl.load(weights + row, mask=live, other=0.0)[:, None]
    out_at = out + row[:, None] * HIDDEN + column[None, :]
    mask = live[:, None] & (column < HIDDEN)[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine(
    parts, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr
):
    wait_for_previous(PDL)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for i in tl.static_range(TOP_K):
        at = parts + (token * TOP_K + i) * HIDDEN + column
        total += tl.load(at, mask=column < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=column < HIDDEN)
