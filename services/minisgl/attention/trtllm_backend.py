"""TensorRT-LLM's decode and prefill kernels, as FlashInfer has them.

On compute capability 10 both run. On 9 and 12 decode is XQA, which is compiled when it is first
used (about 40 seconds), and prefill is refused: its kernels exist as machine code for 10 alone.
"""

from typing import Any

import torch

from minisgl.attention.base import HALVES, AttentionBackend, AttentionContext, ForwardBatch
from minisgl.config import UsageError
from minisgl.kvcache.pool import KVPool
from minisgl_kernels.block_table import block_table_function

WORKSPACE_BYTES = 256 * 2**20


class TrtllmBackend(AttentionBackend):
    """`trtllm`. Pages of 16, 32 or 64 tokens."""

    page_sizes = (16, 32, 64)
    default_page_size = 64
    captures = True
    dtypes = HALVES

    @classmethod
    def check(cls, capability: tuple[int, int] | None, *, prefill: bool, decode: bool) -> None:
        if capability is None or capability < (9, 0):
            raise UsageError(
                "--attention-backend trtllm needs a GPU of compute capability 9.0 or more"
            )
        if prefill and capability[0] != 10:
            raise UsageError(
                f"--attention-backend trtllm computes no prefill on compute capability "
                f"{capability[0]}.{capability[1]} (its kernels are for 10.x); name another backend "
                f"for it, such as {'fa' if capability[0] == 9 else 'fi'},trtllm"
            )

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        try:
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache
            from flashinfer.prefill import trtllm_batch_context_with_kv_cache
        except ImportError as error:
            raise UsageError(
                f"--attention-backend trtllm needs FlashInfer ({error}): "
                "pip install 'minisglang[cuda]'"
            ) from None
        self._decode: Any = trtllm_batch_decode_with_kv_cache
        self._context: Any = trtllm_batch_context_with_kv_cache
        self._block_table = block_table_function()
        self._scale = ctx.head_dim**-0.5
        # its counters must be zero at first, and it leaves them so
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=ctx.device)
        shape = (ctx.max_batch, ctx.max_pages)
        self._pages = torch.zeros(shape, dtype=torch.int32, device=ctx.device)
        self._starts = torch.zeros(ctx.max_batch + 1, dtype=torch.int32, device=ctx.device)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self.capture_metadata(batch)
        if not batch.is_decode:
            size = len(batch.device_lens)
            lens = batch.device_lens_dev
            torch.cumsum(lens, 0, out=self._starts[1 : size + 1])  # type: ignore[arg-type]

    def capture_metadata(self, batch: ForwardBatch) -> None:
        pages = self._pages[: len(batch.device_lens)]
        self._block_table(
            pages, batch.page_table, batch.rows, batch.device_lens_dev, self.ctx.page_size
        )
        batch.metadata = pages

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        cache = (pool.k_pages(layer), pool.v_pages(layer))
        out = torch.empty_like(q)
        if batch.is_decode:
            self._decode(
                q, cache, self._workspace, batch.metadata, batch.device_lens_dev,
                self.ctx.max_seq_len, bmm1_scale=self._scale, bmm2_scale=1.0, out=out,
                kv_layout="NHD",
            )  # fmt: skip
        else:
            self._context(
                q, cache, self._workspace, batch.metadata, batch.device_lens_dev,
                int((batch.device_lens - batch.cached_lens).max()), int(batch.device_lens.max()),
                self._scale, 1.0, len(batch.device_lens), batch.cu_seqlens_q,
                self._starts[: len(batch.device_lens) + 1], out=out, kv_layout="NHD",
            )  # fmt: skip
        return out
