"""The computation of a mixture of experts, apart from who holds which weights."""

import torch
import torch.nn.functional as F

from minisgl.layers.activation import silu_and_mul


def route(scores: torch.Tensor, top_k: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts from scores [T, experts]: weights [T, top_k] float32, ids [T, top_k] int64.

    The weights are softmax probabilities, where `normalise` divided by their sum.
    """
    weights, ids = scores.softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids


def run_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts, with this rank's share of their width.

    x is [T, hidden], gate_up [experts, 2 * width, hidden], down [experts, hidden, width], weights
    and ids [T, top_k]; the result [T, hidden] is to be summed over the ranks. Tokens are sorted by
    expert, so that each expert is one product over its rows.
    """
    top_k = ids.shape[1]
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    tokens = order // top_k
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
    scale = weights.reshape(-1)[order].to(x.dtype).unsqueeze(1)
    out = torch.zeros_like(x)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        mine = slice(start, start + count)
        inner = silu_and_mul(F.linear(x[tokens[mine]], gate_up[expert]))
        out.index_add_(0, tokens[mine], F.linear(inner, down[expert]).mul_(scale[mine]))
        start += count
    return out
