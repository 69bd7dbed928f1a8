"""Few tokens times a weight matrix, with what stands before or behind it in a decoder layer.

In a decode step of a small batch the weights are read once and hardly multiplied: what counts is to
read them at full speed and to leave no gap between kernels. Each output depends on its token alone,
to the bit: the sum over k has one order, whatever the number of tokens.
"""

import functools
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

from minisgl.config import UsageError
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family, cuda_type

SkinnyLinear = Callable[..., torch.Tensor]

TOKENS_ENV = "MINISGL_SKINNY_TOKENS"
"""Most tokens that layers give to this kernel; 0: none."""
DEFAULT_TOKENS = 32
MAX_TOKENS = 64
K_STEP = 32
_BLOCKS = {(1, 4): 5, (1, 8): 2, (2, 4): 4, (2, 8): 2}
"""By 8 rows of W and warps of a block: blocks of up to 8 tokens that a multiprocessor holds."""
_STORE, _ADD, _SILU = range(3)


def _macros(dtype: torch.dtype, norm: bool, mode: int) -> dict[str, str | int]:
    if dtype.itemsize != 2:
        raise KernelUnavailable(f"skinny_linear has no kernel for {dtype}")
    return {"ELEMENT": cuda_type(dtype), "NORM": int(norm), "MODE": mode}


_family = Family("skinny_linear", "skinny_linear", _macros, joined=True)


def max_tokens() -> int:
    """The value of MINISGL_SKINNY_TOKENS, 32 by default and 64 at most."""
    text = os.environ.get(TOKENS_ENV, str(DEFAULT_TOKENS))
    if not text.isascii() or not text.isdigit():
        raise UsageError(
            f"{TOKENS_ENV} must be a whole number from 0 to {MAX_TOKENS}, not {text!r}"
        )
    return min(int(text), MAX_TOKENS)


def skinny_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, *, norm: torch.Tensor | None = None, eps: float = 0.0,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, silu: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same as `skinny_linear`, in float32 torch operations for any device."""
    wide = x.float()
    if norm is not None:
        wide = F.rms_norm(wide, norm.shape, norm.float(), eps)
    value = F.linear(wide, weight.float(), None if bias is None else bias.float())
    if silu:
        gate, up = value.chunk(2, dim=-1)
        value = F.silu(gate) * up
    if residual is not None:
        return residual.copy_(residual.float() + value)
    value = value.to(x.dtype)
    return value if out is None else out.copy_(value)


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, *, norm: torch.Tensor | None = None, eps: float = 0.0,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, silu: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`x @ weight.T + bias` for x [M, K] of 1 to 64 tokens and weight [N, K]: [M, N].

    `norm` [K]: x is normalised by its root mean square first. `residual` [M, N]: the product is
    added to it, in place, and it is returned. `silu`: weight holds gate and up, and the result is
    silu(gate) * up [M, N / 2]. Contiguous bfloat16 or float16; K is a multiple of 32. The result
    goes to `out`, if it is given. Raises `KernelUnavailable`.
    """
    tokens, k = x.shape
    rows = weight.shape[0]
    if k % K_STEP or tokens > MAX_TOKENS:
        raise KernelUnavailable(f"skinny_linear has no kernel for {tokens} rows of {k}")
    mode = _SILU if silu else _ADD if residual is not None else _STORE
    if residual is not None:
        out = residual
    elif out is None:
        out = x.new_empty((tokens, rows // 2 if silu else rows))
    kernel = _family[x.dtype, norm is not None, mode]
    wide, warps = shape_of_blocks(rows)
    kernel(out, x, weight, norm, bias, eps, wide, warps)
    return out


@functools.cache
def shape_of_blocks(rows: int) -> tuple[int, int]:
    """(Whether a block has 16 rows of W rather than 8, its warps): so that the last wave of blocks
    is as full as can be. Not by the number of tokens, as the order of sums follows from it."""
    processors = 132
    if torch.cuda.is_available():
        processors = torch.cuda.get_device_properties().multi_processor_count

    def filled(shape: tuple[int, int]) -> tuple[float, int]:
        blocks, slots = -(-rows // (8 * shape[0])), _BLOCKS[shape] * processors
        return round(blocks / (-(-blocks // slots) * slots), 2), shape[0] * shape[1]

    wide, warps = max(_BLOCKS, key=filled)
    return wide - 1, warps


def skinny_linear_function() -> SkinnyLinear | None:
    """`skinny_linear`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return skinny_linear if _family.usable() else None
