"""FlashInfer: its paged decode and prefill kernels of the fa2 family, for any page size.

Decode plans by the module's own function and not by the wrapper's `plan`: that one takes the
maximum of the lengths element by element, half a millisecond at 256 requests, and copies arrays
from memory that is not pinned, for which the host waits until the stream is empty.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from minisgl.attention.base import HALVES, AttentionBackend, AttentionContext, ForwardBatch
from minisgl.attention.staging import PinnedRing
from minisgl.config import UsageError
from minisgl.kvcache.pool import KVPool
from minisgl_kernels.block_table import block_table_function

FLOAT_WORKSPACE_BYTES = 256 * 2**20
INT_WORKSPACE_BYTES = 8 * 2**20
TENSOR_CORE_PAGE_SIZE = 16
"""From this page size on its tensor-core kernel reads faster, even for 2 queries a KV head."""
TENSOR_CORE_GROUP = 4


@dataclass(slots=True)
class _Step:
    wrapper: Any
    """Planned for the batch: its `run` computes a layer."""


class FlashInferBackend(AttentionBackend):
    """`fi`: prefill by BatchPrefillWithPagedKVCacheWrapper, decode by BatchDecode's."""

    default_page_size = 64
    captures = captures_prefill = True
    dtypes = HALVES

    @classmethod
    def check(cls, capability: tuple[int, int] | None, *, prefill: bool, decode: bool) -> None:
        if capability is None or capability < (8, 0):
            raise UsageError("--attention-backend fi needs a GPU of compute capability 8.0 or more")

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        try:
            from flashinfer import (
                BatchDecodeWithPagedKVCacheWrapper,
                BatchPrefillWithPagedKVCacheWrapper,
            )
        except ImportError as error:
            raise UsageError(
                f"--attention-backend fi needs FlashInfer ({error}): pip install 'minisglang[cuda]'"
            ) from None
        self._make_decode = BatchDecodeWithPagedKVCacheWrapper
        self._make_prefill = BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=ctx.device)
        group = ctx.num_qo_heads // ctx.num_kv_heads
        self._tensor_cores = ctx.page_size >= TENSOR_CORE_PAGE_SIZE or group >= TENSOR_CORE_GROUP
        self._block_table = block_table_function()
        # [indptr of B + 1 | last page lengths of B]: one copy a step fills both
        self._small = _ints(2 * ctx.max_batch + 1, ctx.device)
        # one more than pages: see block_table_reference
        self._indices = _ints(ctx.max_batch * ctx.max_pages + 1, ctx.device)
        self._int_workspace = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=ctx.device)
        self._plan_ring = PinnedRing(INT_WORKSPACE_BYTES)
        self._ring = PinnedRing(4 * (4 * ctx.max_batch + 2))
        self._qo_indptr = torch.arange(ctx.max_batch + 1, dtype=torch.int32)
        self._qo_indptr_dev = self._qo_indptr.to(ctx.device)
        self._prefill = self._prefill_wrapper()
        self._eager = self._decode_wrapper(0)
        self._graphs: dict[tuple[bool, int], Any] = {}
        """By whether it is decode, and by its requests or else by its tokens."""

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        if batch.is_decode:
            self._plan_decode(self._eager, batch)
            batch.metadata = _Step(self._eager)
        else:
            self._plan_prefill(self._prefill, batch)
            batch.metadata = _Step(self._prefill)
        self._fill_indices(batch)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        batch.metadata.wrapper.run(q, (pool.k_pages(layer), pool.v_pages(layer)), out=out)
        return out

    def capture_metadata(self, batch: ForwardBatch) -> None:
        self._fill_indices(batch)
        batch.metadata = _Step(self._graphs[_graph_of(batch)])

    def replay_metadata(self, batch: ForwardBatch) -> None:
        graph, requests = _graph_of(batch), len(batch.device_lens)
        if graph not in self._graphs:
            make = self._decode_wrapper if batch.is_decode else self._prefill_wrapper
            self._graphs[graph] = make(requests)
        if batch.is_decode:
            self._plan_decode(self._graphs[graph], batch)
        else:
            self._plan_prefill(self._graphs[graph], batch)

    def _fill_indices(self, batch: ForwardBatch) -> None:
        self._block_table(
            self._indices, batch.page_table, batch.rows, batch.device_lens_dev,
            self.ctx.page_size, self._small,
        )  # fmt: skip

    def _prefill_wrapper(self, graph_requests: int = 0) -> Any:
        """For the graph of one number of tokens, or, with 0, for eager steps of any size."""
        options: dict[str, Any] = {}
        if graph_requests:
            end = graph_requests + 1
            options = {
                "use_cuda_graph": True,
                "qo_indptr_buf": _ints(end, self.ctx.device),
                "paged_kv_indptr_buf": self._small[:end],
                "paged_kv_indices_buf": self._indices,
                "paged_kv_last_page_len_buf": self._small[end : end + graph_requests],
            }
        wrapper = self._make_prefill(self._workspace, "NHD", backend="fa2", **options)
        wrapper._int_workspace_buffer = self._int_workspace
        return wrapper

    def _decode_wrapper(self, graph_size: int) -> Any:
        """For the graph of one batch size, or, with 0, for eager steps of any size."""
        ctx = self.ctx
        wrapper = self._make_decode(
            self._workspace, "NHD", use_cuda_graph=graph_size > 0,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=self._small[: graph_size + 1],
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._small[graph_size + 1 : 2 * graph_size + 1],
        )  # fmt: skip
        # steps follow one another, so that all wrappers can have the same
        wrapper._int_workspace_buffer = self._int_workspace
        # The wrapper's own plan, once: it loads the kernels and keeps what does not change.
        ones = torch.ones(max(graph_size, 1), dtype=torch.int32)
        wrapper.plan(
            self._qo_indptr[: len(ones) + 1], self._indices[:0], ones, ctx.num_qo_heads,
            ctx.num_kv_heads, ctx.head_dim, ctx.page_size, q_data_type=ctx.dtype,
            kv_data_type=ctx.dtype,
        )  # fmt: skip
        wrapper._paged_kv_indices_buf = self._indices
        torch.cuda.current_stream().synchronize()  # its own staging is not used again
        return wrapper

    def _plan_decode(self, wrapper: Any, batch: ForwardBatch) -> None:
        ctx, size = self.ctx, len(batch.device_lens)
        staged = self._stage(batch.device_lens)
        indptr = staged[: size + 1]
        graph = wrapper.is_cuda_graph_enabled
        if not graph:
            wrapper._paged_kv_indptr_buf = self._small[: size + 1]
            wrapper._paged_kv_last_page_len_buf = self._small[size + 1 : 2 * size + 1]
            wrapper._qo_indptr_buf = self._qo_indptr_dev[: size + 1]
        work = (self._workspace, self._int_workspace, self._plan_ring.take())
        heads = (ctx.num_qo_heads, ctx.num_kv_heads, ctx.page_size, graph)
        if self._tensor_cores:
            wrapper._plan_info = wrapper._cached_module.plan(
                *work, self._qo_indptr[: size + 1], indptr, staged[2 * size + 1 : 3 * size + 1],
                size, size, *heads, ctx.head_dim, ctx.head_dim, False, -1, -1, False, 0,
            )  # fmt: skip
            wrapper._max_kv_len = int(batch.device_lens.max())
        else:
            empty = torch.empty(0, dtype=ctx.dtype)
            wrapper._plan_info = wrapper._cached_module.plan(
                *work, indptr, size, *heads, -1, 0.0, ctx.head_dim, ctx.head_dim, empty, empty
            )
        self._plan_ring.sent()

    def _plan_prefill(self, wrapper: Any, batch: ForwardBatch) -> None:
        ctx, size = self.ctx, len(batch.device_lens)
        staged = self._stage(batch.device_lens)
        starts = staged[3 * size + 1 : 4 * size + 2]
        np.cumsum(batch.device_lens - batch.cached_lens, out=starts.numpy()[1:])
        starts[0] = 0
        wrapper._pin_memory_int_workspace_buffer = self._plan_ring.take()
        # a graph has the page indices in place: none is to be copied
        indices = self._indices[:0] if wrapper.is_cuda_graph_enabled else self._indices
        wrapper.plan(
            starts, staged[: size + 1], indices, staged[size + 1 : 2 * size + 1],
            ctx.num_qo_heads, ctx.num_kv_heads, ctx.head_dim, ctx.page_size, causal=True,
            q_data_type=ctx.dtype, kv_data_type=ctx.dtype,
            seq_lens=staged[2 * size + 1 : 3 * size + 1],
        )  # fmt: skip
        self._plan_ring.sent()
        self._ring.sent()  # plan has copied from there once more

    def _stage(self, lens: np.ndarray) -> torch.Tensor:
        """Pinned int32: starts of the requests' pages [B + 1], tokens in the last pages [B], and
        lengths [B]. The first two are on their way to `_small`."""
        size, page = len(lens), self.ctx.page_size
        staged = self._ring.take().view(torch.int32)
        array = staged.numpy()
        pages = (lens + (page - 1)) // page
        array[0] = 0
        np.cumsum(pages, out=array[1 : size + 1])
        array[size + 1 : 2 * size + 1] = lens - (pages - 1) * page
        array[2 * size + 1 : 3 * size + 1] = lens
        self._small[: 2 * size + 1].copy_(staged[: 2 * size + 1], non_blocking=True)
        self._ring.sent()
        return staged


def _graph_of(batch: ForwardBatch) -> tuple[bool, int]:
    return batch.is_decode, len(batch.device_lens if batch.is_decode else batch.positions)


def _ints(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
