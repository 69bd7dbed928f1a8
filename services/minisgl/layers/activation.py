"""Activations."""

import contextlib

import torch
import torch.nn.functional as F

from minisgl_kernels.activation import silu_and_mul_function
from minisgl_kernels.build import KernelUnavailable


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, where x [..., 2 * width] holds gate and up in a row: [..., width]."""
    if x.is_cuda and x.dim() == 2 and (kernel := silu_and_mul_function()) is not None:
        with contextlib.suppress(KernelUnavailable):  # of this type or width
            return kernel(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
