"""Some tokens times a weight matrix, on Hopper: for decode batches of up to 256 requests.

A product's blocks share the K dimension in clusters, so that all multiprocessors have work, and the
weights are on their way before the kernel before has ended. A norm costs nothing: the product
before leaves its result behind twice, once multiplied by the norm's weight, with the sums of
squares that the next one divides by. Nor do rotary embedding and KV store behind a QKV product.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minisgl.config import UsageError
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family, Variant
from minisgl_kernels.norm import rms_norm
from minisgl_kernels.qk_rope_store import qk_rope_store_reference
from minisgl_kernels.skinny_linear import skinny_linear_reference

TOKENS_ENV = "MINISGL_WIDE_TOKENS"
"""Most tokens that layers give to this kernel; 0: none."""
MAX_TOKENS = 256
TILE = 16
K_STEP = 64
ROWS = 64
"""Of a warpgroup."""
SHARED_BYTES = 232_448
"""That a block may have on Hopper, all told."""
HALF_BYTES = SHARED_BYTES // 2 - 1024
"""So that a multiprocessor holds two."""
SMS = 132
_STORE, _ADD, _SILU, _TURN = range(4)
MODES = (_STORE, _ADD, _SILU, _ADD)
"""Of a layer's products: QKV, O, gate and up, down."""
_TAIL = 256 * 4 + 2 * 16 * 8 + 1024
"""Bytes of shared memory beside tiles and sums: scales, barriers, and what alignment may take."""
_TURN_TAIL = 256 * 4
"""And so many more for the slots of the tokens' keys and values."""
_TURN_TOKENS = 128
"""Most tokens of a block whose angles its registers hold."""
LARGE = 1 << 24
"""Weights from which on a product lasts by its bytes, and not by its start and its end."""


@dataclass(frozen=True, slots=True)
class Normed:
    """What a norm would give, but for each row's factor."""

    x: torch.Tensor
    """[M, K], multiplied by the norm's weight."""
    squares: torch.Tensor
    """[M, parts] float32: they add up to the sum of the squares of a row, before the weight."""


class Blocks(NamedTuple):
    """How a product is cut."""

    groups: int
    """Of 64 rows of W, in a block."""
    split: int = 1
    """Blocks that share the K dimension."""
    tiles: int = 1
    """Parts of the tokens."""
    ways: int = 1
    """Warpgroups that take turns with the same rows."""
    shared: int = SHARED_BYTES
    """Bytes of a block's shared memory."""


class Turned(NamedTuple):
    """What comes between a QKV product and attention, as in `qk_rope_store`."""

    q_weight: torch.Tensor | None
    """[d]; None: heads are not normalised."""
    k_weight: torch.Tensor | None
    eps: float
    cos_sin: torch.Tensor
    """[positions, d] float32."""
    positions: torch.Tensor
    """[M] int32, as `out_loc`."""
    out_loc: torch.Tensor
    k_slots: torch.Tensor
    """[slots, kv_heads, d]."""
    v_slots: torch.Tensor
    heads: int
    kv_heads: int


WideLinear = Callable[..., torch.Tensor]
WideAdd = Callable[..., Normed]
WideTurn = Callable[..., torch.Tensor]


def _macros(tokens: int, groups: int, ways: int, split: int, mode: int) -> dict[str, str | int]:
    return {"TOKENS": tokens, "GROUPS": groups, "WAYS": ways, "SPLIT": split, "MODE": mode}


_family = Family("wide_linear", "wide_linear", _macros, joined=True)


def max_tokens() -> int:
    """The value of MINISGL_WIDE_TOKENS, 256 by default and at most."""
    text = os.environ.get(TOKENS_ENV, str(MAX_TOKENS))
    if not text.isascii() or not text.isdigit():
        raise UsageError(
            f"{TOKENS_ENV} must be a whole number from 0 to {MAX_TOKENS}, not {text!r}"
        )
    return min(int(text), MAX_TOKENS)


def computes(rows: int, k: int, mode: int = _STORE) -> bool:
    """Whether there is a kernel for weights [rows, k]."""
    return k % K_STEP == 0 and rows % (16 if mode == _SILU else 8) == 0


def wide_linear_reference(
    x: torch.Tensor | Normed, weight: torch.Tensor, *, norm: torch.Tensor | None = None,
    eps: float = 0.0, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    silu: bool = False, blocks: Blocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same as `wide_linear`, in float32 torch operations for any device."""
    if isinstance(x, Normed):
        mean = x.squares.sum(dim=1, keepdim=True) / x.x.shape[1]
        wide = x.x.float() * torch.rsqrt(mean + eps)
        out = skinny_linear_reference(wide, weight, bias=bias, residual=residual, silu=silu)
        return out.to(x.x.dtype)
    return skinny_linear_reference(
        x, weight, norm=norm, eps=eps, bias=bias, residual=residual, silu=silu
    )


def wide_add_reference(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, following: torch.Tensor,
    *, bias: torch.Tensor | None = None, blocks: Blocks | None = None,
) -> Normed:  # fmt: skip
    """The same as `wide_add`, in float32 torch operations for any device."""
    h = skinny_linear_reference(x, weight, bias=bias, residual=residual).float()
    scaled = (h * following.float()).to(residual.dtype)
    return Normed(scaled, h.square().sum(dim=1, keepdim=True))


def wide_turn_reference(
    x: torch.Tensor | Normed, weight: torch.Tensor, turned: Turned, *, eps: float = 0.0,
    bias: torch.Tensor | None = None, blocks: Blocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same as `wide_turn`, in float32 torch operations for any device."""
    qkv = wide_linear_reference(x, weight, eps=eps, bias=bias)
    return qk_rope_store_reference(qkv, *turned)


def wide_linear(
    x: torch.Tensor | Normed, weight: torch.Tensor, *, norm: torch.Tensor | None = None,
    eps: float = 0.0, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    silu: bool = False, blocks: Blocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """`x @ weight.T + bias` for x [M, K] of 1 to 256 tokens and weight [N, K]: [M, N].

    `norm` [K]: x is normalised first, which is a kernel of its own unless x is `Normed` by this
    norm already. `residual` [M, N]: the product is added to it, in place, and it is returned.
    `silu`: weight holds gate and up, and the result is silu(gate) * up [M, N / 2]. Contiguous
    bfloat16; K is a multiple of 64 and the result's width one of 8. Raises `KernelUnavailable`.
    """
    if isinstance(x, Normed):
        return _call(x.x, weight, x.squares, eps, bias, residual, silu, None, blocks)[0]
    if norm is not None:
        x = rms_norm(x, norm, eps)
    return _call(x, weight, None, 0.0, bias, residual, silu, None, blocks)[0]


def wide_add(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, following: torch.Tensor, *,
    bias: torch.Tensor | None = None, blocks: Blocks | None = None,
) -> Normed:  # fmt: skip
    """`wide_linear` with a residual, and the result made ready for the norm of weight `following`
    [N]."""
    _, ready = _call(x, weight, None, 0.0, bias, residual, False, following, blocks)
    assert ready is not None
    return ready


def wide_turn(
    x: torch.Tensor | Normed, weight: torch.Tensor, turned: Turned, *, eps: float = 0.0,
    bias: torch.Tensor | None = None, blocks: Blocks,
) -> torch.Tensor:  # fmt: skip
    """Queries [M, heads, d] of a QKV product, normalised and rotated; keys and values go to their
    slots. For blocks that `turns`."""
    dim = turned.cos_sin.shape[1]
    out = turned.k_slots.new_empty((turned.positions.shape[0], turned.heads, dim))
    scaled, squares = (x.x, x.squares) if isinstance(x, Normed) else (x, None)
    tokens, k = scaled.shape
    if scaled.dtype != torch.bfloat16 or not turns(tokens, weight.shape[0], k, dim, blocks):
        raise KernelUnavailable(f"wide_turn has no kernel for {tokens} rows of {k} {scaled.dtype}")
    _family[signature(tokens, blocks, _TURN)](
        out, scaled, weight, bias, squares, eps, None, None, None, blocks.shared,
        turned.positions, turned.out_loc, turned.cos_sin, turned.q_weight, turned.k_weight,
        turned.eps, turned.k_slots, turned.v_slots, turned.heads, turned.kv_heads,
    )  # fmt: skip
    return out


@functools.cache
def turns(tokens: int, rows: int, k: int, dim: int, cut: Blocks) -> bool:
    """Whether `wide_turn` has a kernel for such blocks: each has the rows of one head of `dim`."""
    tokens = -(-tokens // TILE) * TILE  # as the kernel is chosen; the last part may be empty
    return (
        ROWS * cut.groups == dim and rows % dim == 0 and computes(rows, k)
        and tokens <= MAX_TOKENS and width_of(tokens, cut) <= _TURN_TOKENS
        and cut._replace(shared=SHARED_BYTES) in possible_blocks(rows, k, tokens, _TURN)
    )  # fmt: skip


def turning_blocks(tokens: int, rows: int, k: int, dim: int) -> list[Blocks]:
    """Some cuts that `turns`, one of which should be the fastest."""
    tokens = -(-tokens // TILE) * TILE
    cuts = [
        cut for cut in possible_blocks(rows, k, tokens, _TURN) if turns(tokens, rows, k, dim, cut)
    ]
    cuts = [cut for cut in cuts if cut.ways == 1 and cut.split <= 2]
    cuts.sort(key=lambda cut: abs(math.log2(blocks_of(rows, cut) / 72)))
    return cuts[:3]


def _call(
    x: torch.Tensor, weight: torch.Tensor, squares: torch.Tensor | None, eps: float,
    bias: torch.Tensor | None, residual: torch.Tensor | None, silu: bool,
    following: torch.Tensor | None, blocks: Blocks | None,
) -> tuple[torch.Tensor, Normed | None]:  # fmt: skip
    tokens, k = x.shape
    rows = weight.shape[0]
    mode = _SILU if silu else _ADD if residual is not None else _STORE
    if tokens > MAX_TOKENS or x.dtype != torch.bfloat16 or not computes(rows, k, mode):
        raise KernelUnavailable(f"wide_linear has no kernel for {tokens} rows of {k} {x.dtype}")
    cut = blocks or shape_of_blocks(rows, k, -(-tokens // TILE) * TILE, mode)
    out = x.new_empty((tokens, rows // 2 if silu else rows)) if residual is None else residual
    ready = None
    if following is not None:
        parts = -(-rows // (ROWS * cut.groups))
        ready = Normed(torch.empty_like(out), out.new_empty((tokens, parts), dtype=torch.float32))
    kernel = _family[signature(tokens, cut, mode)]
    kernel(
        out, x, weight, bias, squares, eps, following, ready and ready.x, ready and ready.squares,
        cut.shared,
    )  # fmt: skip
    return out, ready


def width_of(tokens: int, cut: Blocks) -> int:
    """Tokens that a block has room for; the same for all that round up to one multiple of 16."""
    tokens = -(-tokens // TILE) * TILE
    return -(-tokens // (cut.tiles * 8)) * 8


@functools.cache
def shape_of_blocks(rows: int, k: int, tokens: int, mode: int) -> Blocks:
    """A cut that is fast for weights [rows, k] and up to so many tokens."""
    return likely_blocks(tokens, rows, k, mode)[0]


def likely_blocks(tokens: int, rows: int, k: int, mode: int) -> list[Blocks]:
    """Some cuts, one of which should be the fastest; the likeliest first.

    With about 64 blocks the next product's, with their weights, stand on the other multiprocessors
    already. Twice as many, each with half of the shared memory, leave it room on the same ones.
    Many tokens go in parts to blocks of more rows: fewer bytes come from the L2 cache. Where the
    weights alone take longer than all that, multiprocessors must have even shares of them.
    """
    tokens = -(-tokens // TILE) * TILE
    if rows * k >= LARGE:
        cuts = [cut for cut in possible_blocks(rows, k, tokens, mode) if cut.ways == 1]
        cuts.sort(key=lambda cut: _microseconds(tokens, rows, k, cut))
        pairs = [
            cut._replace(shared=HALF_BYTES)
            for cut in cuts
            if SMS < blocks_of(rows, cut) <= 2 * SMS
            and 3 * 2 * K_STEP * (ROWS * cut.groups + width_of(tokens, cut)) < HALF_BYTES - _TAIL
        ]
        return cuts[:5] + pairs[:2]
    full, most, half, least = [(1, 1), (2, 1), (2, 2)], 2, [(1, 3)], 1
    if tokens <= 32:
        full, most, half = [(1, 1), (2, 1), (3, 1)], 4, [(1, 2), (1, 3)]
    elif tokens > 96:
        full, most, half, least = [(2, 2), (2, 3), (3, 2)], 4, [(1, 2), (1, 3)], 2
    found = []
    for shared, wanted, some, count in (
        (SHARED_BYTES, 56, full, most), (HALF_BYTES, 150, half, least),
    ):  # fmt: skip
        cuts = [
            cut
            for cut in possible_blocks(rows, k, tokens, mode)
            if (cut.groups, cut.tiles) in some and cut.ways == 1
        ]
        cuts.sort(key=lambda cut: abs(math.log2(blocks_of(rows, cut) / wanted)))
        found += [cut._replace(shared=shared) for cut in cuts[:count]]
    single = [cut for cut in found if cut.groups == 1 and cut.tiles == 1]
    if tokens <= 96 and single and 2 * single[0].split <= k // K_STEP:
        found.append(single[0]._replace(ways=2))
    return found or possible_blocks(rows, k, tokens, mode)[:1]


def _microseconds(tokens: int, rows: int, k: int, cut: Blocks) -> float:
    """About how long a product takes on an H200 whose weights come from memory: what each
    multiprocessor copies and multiplies, by what was measured there, and a start for each turn of
    blocks."""
    width, height, deep = width_of(tokens, cut), ROWS * cut.groups, -(-k // cut.split)
    copied = 2 * (width + height) * deep / 71_000
    multiplied = 2 * width * height * deep / (750e6 / SMS)
    taken = -(-blocks_of(rows, cut) // SMS) * (max(copied, multiplied) + 3)
    return max(taken, 2 * rows * k / 4.1e6) + taken / 20


def blocks_of(rows: int, cut: Blocks) -> int:
    """How many blocks a product of weights [rows, k] has."""
    return -(-rows // (ROWS * cut.groups)) * cut.split * cut.tiles


def signature(tokens: int, cut: Blocks, mode: int) -> tuple[int, ...]:
    """What decides which kernel computes a product so."""
    return width_of(tokens, cut), cut.groups, cut.ways, cut.split, mode


def variant(tokens: int, cut: Blocks, mode: int, *, turned: bool = False) -> Variant:
    """That kernel, to be compiled."""
    return _family, signature(tokens, cut, _TURN if turned else mode)


def possible_blocks(rows: int, k: int, tokens: int, mode: int) -> list[Blocks]:
    """All cuts that a block's registers and shared memory, and a cluster, hold."""
    found = []
    for groups, ways, split, tiles in itertools.product(
        (1, 2, 3), (1, 2), (1, 2, 4, 8), range(1, 5)
    ):
        cut = Blocks(groups, split, tiles, ways)
        width, height = width_of(tokens, cut), ROWS * groups
        if split * ways > k // K_STEP or (tiles - 1) * width >= tokens:
            continue
        if groups == 3 and mode in (_ADD, _TURN):  # squares are summed within a warp
            continue
        if width > {1: 256, 2: 256, 3: 192, 4: 128}.get(groups * ways, 0):  # registers
            continue
        tail = _TAIL + (_TURN_TAIL if mode == _TURN else 0)
        stages, sums = (ways + 1) * (height + width) * 2 * K_STEP, ways * width * (height + 4) * 4
        if max(stages, sums) + tail <= SHARED_BYTES:
            found.append(cut)
    return found


@functools.cache
def _usable() -> bool:
    return _family.usable() and torch.cuda.get_device_capability()[0] == 9


def wide_linear_function() -> WideLinear | None:
    """`wide_linear`, or None, with one warning, where CUDA kernels cannot be compiled, and where
    the GPU is no Hopper."""
    return wide_linear if _usable() else None
