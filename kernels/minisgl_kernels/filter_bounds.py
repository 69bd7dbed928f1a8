"""The bounds of top_k, top_p and min_p on a GPU: one launch, no sort, no wait of the host.

The definition is `bounds` of minisgl/engine/filters.py. Probabilities are summed in fixed point,
in units of 2^-40 of the largest: where a row's sum comes that close to its top_p, the bound may be
the next token's.
"""

from collections.abc import Callable

import torch

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family
from minisgl_kernels.sample import cluster_macros

FilterBounds = Callable[..., tuple[torch.Tensor, torch.Tensor]]

THREADS = 512
MAX_SHARED_BYTES = 227 * 1024
"""Of a block of compute capability 9."""
_STATIC_BYTES = 24 * 1024
_KEY_BYTES = 4
"""Of a token in shared memory, whatever the type of its logit."""
_CLUSTER = 8


def _macros(dtype: torch.dtype, vocab_size: int) -> dict[str, str | int]:
    macros = cluster_macros(dtype)
    if (vocab_size / _CLUSTER + 8) * _KEY_BYTES > MAX_SHARED_BYTES - _STATIC_BYTES:
        raise KernelUnavailable(f"filters have no kernel for {vocab_size} tokens of {dtype}")
    return macros | {"THREADS": THREADS}


_family = Family("filter_bounds", "filter_bounds", _macros, joined=True)


def filter_bounds(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor | None,
    top_p: torch.Tensor | None, min_p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(least y [B] float32, last id [B] int64) for each row of `logits` [B, V]: see `sample`.

    Rows may be apart. `temperature` [B] is float32; `top_k` [B] int64, at least 1 and V or more for
    no limit; `top_p` and `min_p` [B] float64, with 1 and 0 for no limit; None: no row has it. A row
    with a NaN or +inf gets bounds without meaning. Raises `KernelUnavailable`.
    """
    least = logits.new_empty(logits.shape[0], dtype=torch.float32)
    last = logits.new_empty(logits.shape[0], dtype=torch.int64)
    _family[logits.dtype, logits.shape[1]](least, last, logits, temperature, top_k, top_p, min_p)
    return least, last


def filter_bounds_function() -> FilterBounds | None:
    """`filter_bounds`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return filter_bounds if _family.usable() else None
