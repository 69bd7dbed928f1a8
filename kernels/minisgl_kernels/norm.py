"""Root mean square norm, alone or with the addition to the residual before it."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family, cuda_type

RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
AddRmsNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

MAX_THREADS = 1024
MAX_ITEMS = 4
"""Accesses of a thread, which it keeps in registers."""


def _macros(hidden: int, dtype: torch.dtype) -> dict[str, str | int]:
    width = math.gcd(hidden, 16 // dtype.itemsize)
    accesses = hidden // width
    items = -(-accesses // MAX_THREADS)
    if items > MAX_ITEMS:
        raise KernelUnavailable(f"rms_norm has no kernel for rows of {hidden} {dtype}")
    threads = -(-accesses // items // 32) * 32
    return {
        "ELEMENT": cuda_type(dtype), "HIDDEN": hidden, "WIDTH": width, "ITEMS": items,
        "THREADS": threads,
    }  # fmt: skip


_plain = Family("norm", "rms_norm", _macros, joined=True)
_adding = Family("norm", "add_rms_norm", _macros, joined=True)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as `rms_norm`, in torch operations for any device."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The same as `add_rms_norm`, in torch operations for any device."""
    return rms_norm_reference(residual.add_(x), weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) * weight` for rows of x [T, H], in float32 and rounded once.

    x and weight [H] are contiguous and of one type. Raises `KernelUnavailable`.
    """
    out = torch.empty_like(x)
    _plain[x.shape[1], x.dtype](out, x, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x [T, H] to the residual [T, H], in place, and normalise the rounded sum.

    Raises `KernelUnavailable`.
    """
    out = torch.empty_like(x)
    _adding[x.shape[1], x.dtype](out, x, residual, weight, eps)
    return out


def rms_norm_function() -> RmsNorm | None:
    """`rms_norm`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return rms_norm if _plain.usable() else None


def add_rms_norm_function() -> AddRmsNorm | None:
    """`add_rms_norm`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return add_rms_norm if _adding.usable() else None
