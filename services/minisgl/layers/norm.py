"""Root mean square normalisation."""

import contextlib

import torch
import torch.nn.functional as F

from minisgl.layers.base import META, BaseOP
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.norm import add_rms_norm_function, rms_norm_function


class RMSNorm(BaseOP):
    """`x / rms(x) * weight` over the last dimension, which is `size` wide."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        self._size, self.eps = (size,), eps
        self.weight = torch.empty(size, dtype=dtype, device=META)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [..., size]; so is the result."""
        if x.is_cuda and x.dim() == 2 and (kernel := rms_norm_function()) is not None:
            with contextlib.suppress(KernelUnavailable):  # of this type or width
                return kernel(x, self.weight, self.eps)
        return F.rms_norm(x, self._size, self.weight, self.eps)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, size] to the residual, in place, and normalise the sum: (normal, residual)."""
        if residual is None:
            return self.forward(x), x
        if x.is_cuda and (kernel := add_rms_norm_function()) is not None:
            with contextlib.suppress(KernelUnavailable):
                return kernel(x, residual, self.weight, self.eps), residual
        return self.forward(residual.add_(x)), residual
