"""Rows of a vocabulary-parallel embedding table, by one warp a token."""

from collections.abc import Callable

import torch

from minisgl_kernels.cuda_build import Family

Embedding = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]

_family = Family("embedding", "embedding", lambda row_bytes: {"ROW_BYTES": row_bytes}, joined=True)


def embedding_reference(
    ids: torch.Tensor, weight: torch.Tensor, start: int, count: int
) -> torch.Tensor:
    """The same as `embedding`, in torch operations for any device."""
    local = ids.long() - start
    other = (local < 0) | (local >= count)
    out = weight[local.masked_fill(other, 0)]
    return out.masked_fill_(other.unsqueeze(1), 0)


def embedding(ids: torch.Tensor, weight: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """Rows [T, H] of weight [>= count, H] for ids [T] int32 or int64; row 0 is that of id `start`.

    Zeros for ids outside of start to start + count. Raises `KernelUnavailable`.
    """
    tokens, hidden = ids.shape[0], weight.shape[1]
    out = weight.new_empty((tokens, hidden))
    _family[hidden * weight.itemsize,](out, ids, weight, start, count)
    return out


def embedding_function() -> Embedding | None:
    """`embedding`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return embedding if _family.usable() else None
