"""Attention of decode steps, over the slots that the page table names; any page size.

The work is planned on the device once a step, from the lengths alone, and so is part of a CUDA
graph; each layer then makes one launch. csrc/decode_attention.cu says how the work is shared out.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family, cuda_type

TILE = 16
"""Tokens that a warp computes at a time; chunks are counted in these."""
WARPS_PER_SM = 8
"""Of all blocks together: each warp keeps about 24 KiB of copies in shared memory."""
BALANCE = 28
"""How many parts of a request take as long to combine as one tile to compute, times queries."""
_WARPS = 4
_BOX_WARPS = WARPS_PER_SM
"""Of a block whose tiles come in boxes: all of a multiprocessor."""
MANY_TILES = 8
"""With so many tiles in each, chunks have shares by what their multiprocessors can read."""
_FLAGS = ("-maxrregcount=208",)
"""Leaves room on an SM for the end of the kernel before, of whose time ours makes use."""
_STAGES = {64: 6, 128: 3}
_MAX_GROUP = 8
_MAX_CHUNKS = 2**15
_MAX_BATCH = 10_000

Int32s = npt.NDArray[np.int32]


def _macros(
    dtype: torch.dtype, head_dim: int, group: int, boxes: bool = False, fused: int = 0
) -> dict[str, str | int]:
    if dtype not in (torch.bfloat16, torch.float16):
        raise KernelUnavailable(f"decode attention has no kernel for {dtype}")
    if head_dim not in _STAGES:
        raise KernelUnavailable(f"decode attention has no kernel for heads of {head_dim}")
    if not 1 <= group <= _MAX_GROUP:
        raise KernelUnavailable(f"decode attention has no kernel for {group} queries a KV head")
    return {
        "T": cuda_type(dtype), "HEAD_DIM": head_dim, "GROUP": group, "STAGES": _STAGES[head_dim],
        "WARPS": _BOX_WARPS if boxes else _WARPS, "BOXES": int(boxes), "FUSED": fused,
    }  # fmt: skip


_plan = Family("decode_attention", "plan_decode_attention", _macros, _FLAGS)
_attention = Family("decode_attention", "decode_attention", _macros, _FLAGS)


class DecodeAttention:
    """Decode attention for one shape of heads, with the buffers that a step's plan lives in.

    One step after the other may use it, on one stream: `plan`, then `attention` once a layer.
    """

    def __init__(
        self, *, max_batch: int, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device, page_size: int = 1,
        sm_count: int | None = None, boxes: bool | None = None, balance: int = BALANCE,
    ) -> None:  # fmt: skip
        """Compiles the kernel. Raises `KernelUnavailable` for a shape that it does not know.

        `page_size`: so many slots, from a multiple of it on, hold neighbouring tokens of a request.
        `boxes`: whether tiles are copied by the tensor memory accelerator, which needs pages of a
        multiple of 16; None: on Hopper, if they are.
        """
        group = num_qo_heads // num_kv_heads
        if boxes is None:
            boxes = page_size % TILE == 0 and torch.cuda.get_device_capability(device)[0] == 9
        signature = (dtype, head_dim, group, boxes)
        _macros(*signature)
        if max_batch > _MAX_BATCH:
            raise KernelUnavailable(f"decode attention takes up to {_MAX_BATCH} requests")
        if sm_count is None:
            sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        chunks = max_chunks(sm_count, num_kv_heads)
        self._plan, self._attention = _plan[signature], _attention[signature]
        self._signature, self._kv_heads = signature, num_kv_heads
        self._scale, self._balance = head_dim**-0.5, balance
        self.chunks = torch.zeros((chunks, 8), dtype=torch.int32, device=device)
        """Index of the first request, first tile, end, 0, and that request's entry below."""
        self.requests = torch.zeros((max_batch + 1, 4), dtype=torch.int32, device=device)
        """First tile, tokens, row, first chunk << 16 | last chunk."""
        self._arrived = torch.zeros((max_batch, num_kv_heads), dtype=torch.int32, device=device)
        self._boxes, self.max_batch = boxes, max_batch
        blocks = -(-chunks * num_kv_heads // _BOX_WARPS)
        self._claims = torch.zeros((2, blocks), dtype=torch.int32, device=device)
        self._turn, self._even = 0, False
        self._shares: torch.Tensor | None = None
        parts = (chunks, 2, num_kv_heads, group)
        self._partial = torch.empty((*parts, head_dim), dtype=torch.float32, device=device)
        self._stats = torch.empty((*parts, 2), dtype=torch.float32, device=device)

    @property
    def places(self) -> int:
        """Multiprocessors that `share_out` tells apart; 0: none, as their blocks have no places."""
        return self._claims.shape[1] if self._boxes else 0

    def share_out(self, speeds: npt.NDArray[np.float64] | None) -> None:
        """From the next plan on cut many tiles by what each multiprocessor can read: `speeds`
        [places], in any unit. None: evenly, as at first."""
        shares = None if speeds is None else shares_of(speeds, len(self.chunks), self._kv_heads)
        self._shares = None if shares is None else torch.from_numpy(shares).to(self.chunks.device)

    def plan(self, lens: torch.Tensor, rows: torch.Tensor, *, even: bool = False) -> None:
        """Share out the work of requests with `lens` [B] tokens in `rows` [B] of the page table,
        both int32 on the device. Lengths are 1 or more. `even`: for few requests, or because
        `attention_of_qkv` follows: blocks may run anywhere, and lanes copy the tiles, which begins
        sooner than boxes do."""
        shares = None if even else self._shares
        self._plan(self.chunks, self.requests, lens, rows, self._balance, shares, self._claims)
        self._turn, self._even = 0, even

    def attention(
        self, q: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor,
        page_table: torch.Tensor, times: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of q [B, num_qo_heads, head_dim], contiguous, as it was planned.

        k_slots and v_slots are [slots, num_kv_heads, head_dim], contiguous; page_table
        [rows, columns] int32 holds the slot of each token. `times` [places * warps, 2] int64, of
        each place's warps the start and the end in nanoseconds, if it has `places` and the plan was
        not to be even.
        """
        out = torch.empty_like(q)
        given = (
            q, out, k_slots, v_slots, page_table, self.chunks, self.requests, self._partial,
            self._stats, self._arrived, self._scale,
        )  # fmt: skip
        if self._boxes and not self._even:
            self._attention(*given, self._claims, self._turn, times)
            self._turn = 1 - self._turn
        else:
            _attention[*self._signature[:3], False](*given)
        return out

    def attention_of_qkv(
        self, qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None,
        eps: float, cos_sin: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor,
        page_table: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """`qk_rope_store` and `attention` in one launch: [B, num_qo_heads, head_dim].

        qkv is [B, (num_qo_heads + 2 num_kv_heads) head_dim], and the others are as there. A new
        token stands where its request's row of the page table says, behind all others.
        """
        dim = cos_sin.shape[1]
        out = qkv.new_empty((len(qkv), qkv.shape[1] // dim - 2 * self._kv_heads, dim))
        kernel = _attention[*self._signature[:3], False, 1 if q_weight is None else 2]
        kernel(
            qkv, out, k_slots, v_slots, page_table, self.chunks, self.requests, self._partial,
            self._stats, self._arrived, self._scale, q_weight, k_weight, eps, cos_sin,
        )  # fmt: skip
        return out


def supports(dtype: torch.dtype, head_dim: int, group: int) -> bool:
    """Whether there is a kernel for `group` query heads a KV head of this dim and type."""
    try:
        _macros(dtype, head_dim, group)
    except KernelUnavailable:
        return False
    return True


def decode_attention_function() -> Callable[..., DecodeAttention] | None:
    """`DecodeAttention`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return DecodeAttention if _attention.usable() else None


def max_chunks(sm_count: int, num_kv_heads: int) -> int:
    """Chunks that keep all warps of the device busy, one for each KV head."""
    return min(max(1, sm_count * WARPS_PER_SM // num_kv_heads), _MAX_CHUNKS - 1)


def shares_of(speeds: npt.NDArray[np.float64], chunks: int, kv_heads: int) -> Int32s:
    """Sums of the shares of all chunks before each one, and of all: [chunks + 1].

    A chunk is as fast as the slowest of the places [P] whose warps compute its heads.
    """
    workers = np.arange(chunks * kv_heads).reshape(chunks, kv_heads)
    slowest = speeds[workers // _BOX_WARPS].min(axis=1)
    sums = np.concatenate([[0.0], np.cumsum(slowest)])
    return np.round(sums * (2**20 / sums[-1])).astype(np.int32)


def plan_reference(
    lens: Int32s, rows: Int32s, chunks: int, *, group: int, balance: int = BALANCE,
    shares: Int32s | None = None,
) -> tuple[Int32s, Int32s]:  # fmt: skip
    """What `DecodeAttention.plan` leaves in `chunks` [chunks, 8] and `requests` [B + 1, 4]."""
    tiles = -(-lens.astype(np.int64) // TILE)
    ends = np.cumsum(tiles)
    first, total = ends - tiles, int(ends[-1])
    least = 1
    while balance * least**2 < tiles.max() * group:
        least += 1
    count = min(chunks, -(-total // least))
    cuts = np.arange(count + 1) * total // count
    if shares is not None and count == chunks and total >= MANY_TILES * count:
        cuts = total * shares.astype(np.int64) // shares[-1]
    low = np.searchsorted(cuts, first, side="right") - 1
    high = np.searchsorted(cuts, ends - 1, side="right") - 1
    requests = np.zeros((len(lens) + 1, 4), np.int64)
    requests[:-1] = np.stack([first, lens, rows, low << 16 | high], axis=1)
    requests[-1, 0] = total
    index = np.searchsorted(first, cuts[:-1], side="right") - 1
    plan = np.zeros((chunks, 8), np.int64)
    plan[:count, :3] = np.stack([index, cuts[:-1], cuts[1:]], axis=1)
    plan[:count, 4:] = requests[index]
    return plan.astype(np.int32), requests.astype(np.int32)


def decode_attention_reference(
    q: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor, page_table: torch.Tensor,
    lens: list[int], rows: list[int],
) -> torch.Tensor:  # fmt: skip
    """The same attention in float32, request by request, in torch operations for any device."""
    group = q.shape[1] // k_slots.shape[1]
    out = torch.empty_like(q, dtype=torch.float32)
    for i, (length, row) in enumerate(zip(lens, rows, strict=True)):
        slots = page_table[row, :length].long()
        k = k_slots[slots].float().repeat_interleave(group, dim=1)
        v = v_slots[slots].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,lhd->hl", q[i].float(), k) * q.shape[2] ** -0.5
        out[i] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
    return out
