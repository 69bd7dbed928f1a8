"""Which rows each block of a grouped expert product computes, on the device and in fixed sizes.

Every product block has rows of one expert only, so each expert's rows are filled up to whole
blocks. Nothing comes back to the host: a CUDA graph can hold it.
"""

import functools

import torch
import triton
import triton.language as tl

from minisgl.config import env_switch
from minisgl_kernels.nvcc import DISABLE_PDL_ENV

CHUNKS = (256, 4096)
"""Ids that a program reads at once, where there are few and where there are many."""


@functools.cache
def overlaps() -> bool:
    """Whether kernels start before the last one has ended, and then wait for it (from SM90 on)."""
    if env_switch(DISABLE_PDL_ENV) or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """First of all in a kernel: the next one may start, and what came before is complete."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def max_blocks(rows: int, experts: int, block: int) -> int:
    """Most blocks that `rows` rows need, however they are spread over the experts."""
    return min(rows, (rows + experts * (block - 1)) // block)


def align_reference(
    ids: torch.Tensor, experts: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same as `align`, in torch; what `align` leaves undefined is -1."""
    flat = ids.reshape(-1)
    blocks = max_blocks(flat.numel(), experts, block)
    rows = torch.full((blocks * block,), -1, dtype=torch.int32)
    block_experts = torch.full((blocks,), -1, dtype=torch.int32)
    used = 0
    for expert in range(experts):
        mine = (flat == expert).nonzero().flatten()
        count = -(-mine.numel() // block) * block
        rows[used : used + count] = flat.numel()
        rows[used : used + mine.numel()] = mine
        block_experts[used // block : (used + count) // block] = expert
        used += count
    return rows, block_experts, torch.tensor([used], dtype=torch.int32)


def align(
    ids: torch.Tensor, experts: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the places of ids [T, top_k] int32, contiguous, by the expert that they name.

    Returns rows [blocks * block] int32, flat places in `ids` by expert and then in order, where
    T * top_k fills up a block; the expert of each block [blocks] int32; and how many rows are used
    [1] int32: what comes after them is undefined. One program for each expert.
    """
    n = ids.numel()
    blocks = max_blocks(n, experts, block)
    rows = torch.empty(blocks * block, dtype=torch.int32, device=ids.device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    used = torch.empty(1, dtype=torch.int32, device=ids.device)
    chunk = CHUNKS[n > CHUNKS[0]]
    _align[(experts,)](
        ids, rows, block_experts, used, n,
        BINS=triton.next_power_of_2(experts), BLOCK=block, CHUNK=chunk,
        PDL=overlaps(), num_warps=chunk // 256, launch_pdl=overlaps(),
    )  # fmt: skip
    return rows, block_experts, used


@triton.jit(do_not_specialize=["n"])
def _align(
    ids, rows, block_experts, used, n,
    BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    # Every program counts all experts: that is quicker than to wait for others' counts.
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        found = tl.load(ids + at, mask=at < n, other=0)
        counts += tl.histogram(found, BINS, mask=at < n)
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    begin = tl.sum(tl.where(bins < expert, padded, 0))
    end = begin + tl.sum(tl.where(bins == expert, padded, 0))
    place = begin
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        mine = (tl.load(ids + at, mask=at < n, other=-1) == expert).to(tl.int32)
        tl.store(rows + place + tl.cumsum(mine, 0) - 1, at, mask=mine != 0)
        place += tl.sum(mine)
    filling = place + tl.arange(0, BLOCK)
    tl.store(rows + filling, n, mask=filling < end)
    for block in range(begin // BLOCK, end // BLOCK):
        tl.store(block_experts + block, expert)
    if expert == 0:
        tl.store(used, tl.sum(padded))
