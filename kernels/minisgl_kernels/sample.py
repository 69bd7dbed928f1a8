"""The next tokens from logits on a GPU, without a sort and in one pass over the vocabulary.

The reference is `draw_reference` of minisgl/engine/draw.py: the tokens are the same, to the bit.
"""

from collections.abc import Callable

import torch

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family, cuda_type

Sample = Callable[..., torch.Tensor]

THREADS = 256
"""Of a block; a row has a cluster of eight."""
_MIN_CAPABILITY = (9, 0)


def cluster_macros(dtype: torch.dtype) -> dict[str, str | int]:
    """Of a kernel by which a cluster takes a row. Raises `KernelUnavailable`: no clusters."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _MIN_CAPABILITY:
        raise KernelUnavailable("sampling needs clusters of thread blocks (compute capability 9)")
    return {"ELEMENT": cuda_type(dtype)}


def _macros(dtype: torch.dtype) -> dict[str, str | int]:
    return cluster_macros(dtype) | {"THREADS": THREADS}


_family = Family("sample", "sample", _macros, ("-fmad=false",))


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
    greedy: torch.Tensor, least: torch.Tensor | None = None, last: torch.Tensor | None = None,
    token_pool: torch.Tensor | None = None, output_index: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """One token [B] int32 for each row of `logits` [B, V] in bfloat16, float16 or float32.

    Rows may be apart. Per row: `temperature` float32, `seeds` int64, `positions` int32 or int64,
    `greedy` uint8 or bool (takes the largest logit, as a row with NaN or +inf does), and the bounds
    of the filters, `least` float32 and `last` int64 (minisgl/engine/filters.py). The token also
    goes to place output_index[b] of the flat `token_pool` int32. Raises `KernelUnavailable`.
    """
    tokens = logits.new_empty(logits.shape[0], dtype=torch.int32) if out is None else out
    _family[logits.dtype,](
        tokens, logits, temperature, seeds, positions, greedy, least, last, token_pool, output_index
    )
    return tokens


def sample_function() -> Sample | None:
    """`sample`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return sample if _family.usable() else None
