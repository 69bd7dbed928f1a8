"""The gate of a gated MLP."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from minisgl_kernels.cuda_build import Family, cuda_type

SiluAndMul = Callable[[torch.Tensor], torch.Tensor]

_family = Family(
    "silu_and_mul",
    "silu_and_mul",
    lambda width, dtype: {"ELEMENT": cuda_type(dtype), "WIDTH_OF_ROW": width},
    joined=True,
)


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """The same as `silu_and_mul`, in float32 torch operations for any device."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` [T, w] of contiguous x [T, 2 w], which holds gate and up in a row.

    Raises `KernelUnavailable`.
    """
    width = x.shape[1] // 2
    out = x.new_empty((x.shape[0], width))
    _family[width, x.dtype](out, x)
    return out


def silu_and_mul_function() -> SiluAndMul | None:
    """`silu_and_mul`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return silu_and_mul if _family.usable() else None
