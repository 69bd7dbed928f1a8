"""FlashAttention 3 from sgl-kernel: prefill and decode on Hopper."""

from dataclasses import dataclass
from typing import Any

import torch

from minisgl.attention.base import HALVES, AttentionBackend, AttentionContext, ForwardBatch
from minisgl.config import UsageError
from minisgl.kvcache.pool import KVPool
from minisgl_kernels.block_table import block_table_function


@dataclass(slots=True)
class _Step:
    pages: torch.Tensor
    """[B, max_pages] int32."""
    lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_new: int
    """Most new tokens of one request."""
    schedule: torch.Tensor | None
    """How decode shares out the work, computed once a step and not once a layer."""


class FlashAttentionBackend(AttentionBackend):
    """`fa`: one function for both, with block tables. Pages of 128 reach it by TMA in prefill."""

    default_page_size = 128
    captures = captures_prefill = True
    dtypes = HALVES

    @classmethod
    def check(cls, capability: tuple[int, int] | None, *, prefill: bool, decode: bool) -> None:
        if capability is None or capability[0] != 9:
            raise UsageError(
                "--attention-backend fa is FlashAttention 3, for compute capability 9.0 (Hopper) "
                "alone; use fi"
            )

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        try:
            from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata
        except ImportError as error:
            raise UsageError(
                f"--attention-backend fa needs sgl-kernel ({error}): pip install 'minisglang[cuda]'"
            ) from None
        self._attend: Any = flash_attn_with_kvcache
        self._schedule: Any = get_scheduler_metadata
        self._block_table = block_table_function()
        shape = (ctx.max_batch, ctx.max_pages)
        self._pages = torch.zeros(shape, dtype=torch.int32, device=ctx.device)
        self._starts = torch.arange(ctx.max_batch + 1, dtype=torch.int32, device=ctx.device)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        new = 1 if batch.is_decode else int((batch.device_lens - batch.cached_lens).max())
        self._prepare(batch, new)

    def capture_metadata(self, batch: ForwardBatch) -> None:
        # Of prompts any number of the graph's tokens may be one request's.
        self._prepare(batch, 1 if batch.is_decode else len(batch.input_ids))

    def _prepare(self, batch: ForwardBatch, new: int) -> None:
        ctx, size, lens = self.ctx, len(batch.device_lens), batch.device_lens_dev
        pages = self._pages[:size]
        self._block_table(pages, batch.page_table, batch.rows, lens, ctx.page_size)
        starts = self._starts[: size + 1] if batch.is_decode else batch.cu_seqlens_q
        schedule = None
        if batch.is_decode:
            schedule = self._schedule(
                size, new, ctx.max_pages * ctx.page_size, ctx.num_qo_heads, ctx.num_kv_heads,
                ctx.head_dim, lens, qkv_dtype=ctx.dtype, cu_seqlens_q=starts,
                page_size=ctx.page_size, causal=True,
            )  # fmt: skip
        batch.metadata = _Step(pages, lens, starts, new, schedule)  # type: ignore[arg-type]

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        step: _Step = batch.metadata
        out: torch.Tensor = self._attend(
            q, pool.k_pages(layer), pool.v_pages(layer), page_table=step.pages,
            cache_seqlens=step.lens, cu_seqlens_q=step.cu_seqlens_q, max_seqlen_q=step.max_new,
            causal=True, scheduler_metadata=step.schedule,
        )  # fmt: skip
        return out
