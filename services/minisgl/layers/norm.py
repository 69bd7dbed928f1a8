"""Root mean square normalisation."""

import torch
import torch.nn.functional as F

from minisgl.layers.base import META, BaseOP


class RMSNorm(BaseOP):
    """`x / rms(x) * weight` over the last dimension, which is `size` wide."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        self._size, self._eps = (size,), eps
        self.weight = torch.empty(size, dtype=dtype, device=META)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [..., size]; so is the result."""
        return F.rms_norm(x, self._size, self.weight, self._eps)

    def forward_add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, size] to the residual, in place, and normalise the sum: (normal, residual)."""
        residual = x if residual is None else residual.add_(x)
        return self.forward(residual), residual
