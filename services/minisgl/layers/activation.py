"""Activations."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, where x [..., 2 * width] holds gate and up in a row: [..., width]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
