"""What attention needs to know of one step, and the interface of its backends."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from minisgl.config import UsageError

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


PROMPT_REQUESTS = 8
"""Requests of a captured prefill; one of them at least is the dummy one, which takes what is left
of the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What a backend is made for: one rank's heads on one device."""

    device: torch.device
    dtype: torch.dtype
    num_qo_heads: int
    """Query heads of this rank; a multiple of `num_kv_heads`."""
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens in one page of the KV pool: one that `choose_page_size` gave."""
    max_running: int
    """Most requests in one step; a captured batch is filled up to this at most."""
    max_seq_len: int
    """Columns of the page table: no request is longer."""
    capability: tuple[int, int] | None = None
    """Compute capability of a CUDA device; None on others."""

    @property
    def max_batch(self) -> int:
        """Most requests of a step, those that fill a captured prefill up among them."""
        return max(self.max_running, PROMPT_REQUESTS)

    @property
    def max_pages(self) -> int:
        """Pages of the longest request: columns of a block table."""
        return -(-self.max_seq_len // self.page_size)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model asks of a kernel."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    group: int = 1
    """Query heads for each KV head."""
    whole: bool = True
    """One rank computes all of it, and no layer has experts."""


@dataclass(slots=True)
class ForwardBatch:
    """One step as the model sees it: B requests with T new tokens in all.

    Request i computes the positions `cached_lens[i]` to `device_lens[i]`; its new tokens stand
    together, and requests stand in order. Decode is the special case of one new token each.
    Index tensors are int64 on a CPU and int32 on CUDA. In a captured graph every tensor is a view
    of a buffer that the engine fills before each replay.
    """

    input_ids: torch.Tensor
    """[T] on the device."""
    positions: torch.Tensor
    """[T] on the device: each token's place in its sequence."""
    out_loc: torch.Tensor
    """[T] on the device: the KV slot that each new token is written to."""
    rows: torch.Tensor
    """[B] on the device: each request's row of the page table."""
    page_table: torch.Tensor
    """[rows, max_seq_len] int32 on the device: the KV slot of each position. A page's slots stand
    together, so that every `page_size`-th column names a page."""
    cached_lens: npt.NDArray[np.int32]
    """[B] on the host: tokens with keys and values before this step."""
    device_lens: npt.NDArray[np.int32]
    """[B] on the host: tokens with keys and values after this step."""
    last_indices: torch.Tensor
    """[B] on the device: index into the T tokens of each request's last one."""
    is_decode: bool
    """Every request has exactly one new token."""
    device_lens_dev: torch.Tensor | None = None
    """[B] int32 on the device: `device_lens` again. None on a CPU."""
    cu_seqlens_q: torch.Tensor | None = None
    """[B + 1] int32 on the device: where each request's new tokens start, and T. None on a CPU."""
    metadata: Any = None
    """What the backend made for its `forward`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is done to queries and keys before attention."""

    table: torch.Tensor
    """[positions, head_dim] float32: cosines of each pair of dimensions, then sines."""
    q_weight: torch.Tensor | None = None
    """[head_dim]; None: heads are not normalised."""
    k_weight: torch.Tensor | None = None
    eps: float = 0.0


HALVES = (torch.bfloat16, torch.float16)
"""Types that kernels of tensor cores compute with."""


class AttentionBackend(ABC):
    """Paged causal attention of one kind of kernel.

    `forward` is called once a layer, after the layer's new keys and values were stored. An eager
    step calls `prepare_metadata` first. A step in a CUDA graph goes like this:

        init_capture(max_bs)                 once
        for each size of a batch, largest first, on buffers that stay where they are:
            replay_metadata(batch)           and a forward of the model, to warm up; then
            capture: capture_metadata(batch), forward of the model
        for each step: fill the buffers, replay_metadata(batch), replay the graph

    So work on the host belongs into `replay_metadata`, work on the device that follows from the
    batch's tensors into `capture_metadata`, where it becomes part of the graph. Rows that fill a
    captured batch up have length 1, on the dummy page. A captured prefill always has T tokens of
    PROMPT_REQUESTS requests; tokens that fill it up belong to a request on the dummy page, and
    requests may have no new token. All of it is queued on the current stream.
    """

    page_sizes: ClassVar[tuple[int, ...]] = ()
    """Page sizes that it can read, the default one too; empty: any."""
    default_page_size: ClassVar[int] = 1
    captures: ClassVar[bool] = False
    """Its decode can be part of a CUDA graph."""
    captures_prefill: ClassVar[bool] = False
    """So can its prefill of few tokens, with the number of requests and of tokens fixed: requests
    may have no new token, and all lengths are on the device."""
    fuses: int = 0
    """Most tokens of a decode step that `forward_qkv` is faster for than what it stands for."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (*HALVES, torch.float32)

    def __init__(self, ctx: AttentionContext) -> None:
        self.ctx = ctx

    @classmethod  # noqa: B027
    def check(cls, capability: tuple[int, int] | None, *, prefill: bool, decode: bool) -> None:
        """Raise `UsageError` where this device cannot do what is asked. `capability` is that of a
        CUDA device; None: another device."""

    def measure_device(self) -> None:  # noqa: B027
        """Measure, before the first step, what decides how the device shares out work. On CUDA,
        and not on the default stream."""

    @abstractmethod
    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Fill `batch.metadata` for an eager step."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, layer: int, pool: "KVPool", batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention of the new tokens over all tokens of their requests.

        q is [T, local_heads, head_dim]; so is the result. Keys and values come from `pool`.
        """

    def forward_qkv(
        self, qkv: torch.Tensor, turn: Turn, layer: int, pool: "KVPool", batch: ForwardBatch
    ) -> torch.Tensor:
        """`forward` of a decode step, and what comes before it: qkv [T, (heads + 2 kv_heads) dim]
        is turned, and keys and values go to `pool`. For up to `fuses` tokens."""
        raise NotImplementedError

    def init_capture(self, max_bs: int) -> None:  # noqa: B027
        """Make the buffers of decode graphs of up to `max_bs` requests."""

    def capture_metadata(self, batch: ForwardBatch) -> None:
        """Fill `batch.metadata` inside the capture of a graph for this batch size."""
        raise UsageError("this attention backend has no CUDA graphs; use --cuda-graph-max-bs 0")

    def replay_metadata(self, batch: ForwardBatch) -> None:  # noqa: B027
        """Do the host's part before a replay. `batch` has the lengths on the host, those of the
        rows that fill it up included; its buffers are filled."""
