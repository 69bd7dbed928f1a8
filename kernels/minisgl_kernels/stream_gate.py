"""Gate and up of an MLP so large that its bytes decide how long it takes, on Hopper.

One block for each multiprocessor, with even shares of the weights, whatever the number of tiles.
`wide_linear` calls it for blocks whose split is `STREAMED`.
"""

from dataclasses import dataclass

import torch

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family

STREAMED = 0
"""In the place of the number of blocks that share the K dimension of a tile: any may."""
MAX_TOKENS = 256
_TILE = 16
_MANY_TOKENS = 192
"""Up to here the registers of three warpgroups hold their sums."""
_ROWS = 64
"""Of a warpgroup."""


def _macros(tokens: int, groups: int) -> dict[str, str | int]:
    return {"TOKENS": tokens, "GROUPS": groups}


_family = Family("stream_gate", "stream_gate", _macros)


def groups_of(tokens: int) -> int:
    """Warpgroups of a block; a tile has 64 rows of weights for each."""
    return 3 if tokens <= _MANY_TOKENS else 2


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What blocks hand to each other. Calls on one stream follow each other and can share it."""

    partials: torch.Tensor
    done: torch.Tensor


_scratch: dict[tuple[torch.device, int], _Scratch] = {}


def _make_scratch(device: torch.device, blocks: int) -> _Scratch:
    most = max(groups_of(n) * _ROWS * n for n in (_MANY_TOKENS, MAX_TOKENS))
    return _Scratch(
        torch.empty((blocks, most), dtype=torch.float32, device=device),
        torch.zeros(blocks, dtype=torch.int32, device=device),
    )


def _scratch_of(device: torch.device) -> _Scratch:
    """That of the current stream; made at the first call, which is before any capture."""
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _scratch:
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        _scratch[key] = _make_scratch(device, blocks)
    return _scratch[key]


def stream_gate(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None = None, eps: float = 0.0
) -> torch.Tensor:
    """silu(gate) * up [M, N / 2] of x [M, K] and weight [N, K], which holds gate, then up.

    `squares` [M, parts] float32: sums of squares of each row, whose inverse root mean square
    multiplies it. Contiguous bfloat16, 1 to 256 rows, K a multiple of 64 and N of 16. Raises
    `KernelUnavailable`.
    """
    (tokens, k), rows = x.shape, weight.shape[0]
    if tokens > MAX_TOKENS or x.dtype != torch.bfloat16 or k % 64 or rows % 16:
        raise KernelUnavailable(f"stream_gate has no kernel for {tokens} rows of {k} {x.dtype}")
    width = -(-tokens // _TILE) * _TILE
    scratch, out = _scratch_of(x.device), x.new_empty((tokens, rows // 2))
    _family[width, groups_of(tokens)](out, x, weight, squares, eps, scratch.partials, scratch.done)
    return out
