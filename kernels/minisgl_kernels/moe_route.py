"""Softmax over a router's scores and choice of the top experts, one program a token."""

import torch
import triton
import triton.language as tl

from minisgl_kernels.moe_align import overlaps, wait_for_previous


def route(scores: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts from scores [T, experts], contiguous: weights [T, top_k] float32, ids int32.

    The reference is `route` of minisgl/moe/experts.py. Of equal scores the first one wins.
    """
    tokens, experts = scores.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=scores.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=scores.device)
    _route[(tokens,)](
        scores, weights, ids, EXPERTS=experts, BINS=triton.next_power_of_2(experts), TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k), NORMALISE=normalise, PDL=overlaps(),
        num_warps=1, launch_pdl=overlaps(),
    )  # fmt: skip
    return weights, ids


@triton.jit
def _route(
    scores, weights, ids,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr,
    NORMALISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BINS), tl.arange(0, PLACES)
    left = tl.load(scores + token * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf"))
    left = left.to(tl.float32)
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    chosen = tl.zeros([PLACES], tl.float32)
    named = tl.zeros([PLACES], tl.int32)
    kept = 0.0
    for i in tl.static_range(TOP_K):
        # With NaN among the scores the place may be any; it must still be an expert's.
        best = tl.minimum(tl.argmax(left, 0), EXPERTS - 1)
        share = tl.exp(tl.max(left, 0) - highest)
        chosen = tl.where(place == i, share, chosen)
        named = tl.where(place == i, best, named)
        left = tl.where(expert == best, float("-inf"), left)
        kept += share
    scale = kept if NORMALISE else total
    tl.store(weights + token * TOP_K + place, chosen / scale, mask=place < TOP_K)
    tl.store(ids + token * TOP_K + place, named, mask=place < TOP_K)
