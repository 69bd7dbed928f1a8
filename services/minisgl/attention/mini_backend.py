"""The project's own decode kernel (minisgl_kernels.decode_attention). It reads slots: any page size
suits it, and there is no work for the host."""

import torch

from minisgl.attention.base import (
    HALVES,
    AttentionBackend,
    AttentionContext,
    ForwardBatch,
    Turn,
)
from minisgl.config import UsageError
from minisgl.kvcache.pool import KVPool
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.decode_attention import decode_attention_function
from minisgl_kernels.decode_shares import multiprocessor_speeds

FUSED_TOKENS = 32
"""Beyond it a launch costs less than what each warp computes again, measured on an H200."""


class MiniBackend(AttentionBackend):
    """`mini`: decode alone."""

    default_page_size = 64
    captures = True
    fuses = FUSED_TOKENS
    dtypes = HALVES

    @classmethod
    def check(cls, capability: tuple[int, int] | None, *, prefill: bool, decode: bool) -> None:
        if capability is None or capability < (8, 0):
            raise UsageError(
                "--attention-backend mini needs a GPU of compute capability 8.0 or more"
            )
        if prefill:
            raise UsageError(
                "--attention-backend mini computes decode alone; name another backend for prefill, "
                f"such as {'fa' if capability[0] == 9 else 'fi'},mini"
            )

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        make = decode_attention_function()
        if make is None:
            raise UsageError(
                "--attention-backend mini cannot be compiled here, as a warning says; use fi"
            )
        try:
            self._kernel = make(
                max_batch=ctx.max_running, num_qo_heads=ctx.num_qo_heads,
                num_kv_heads=ctx.num_kv_heads, head_dim=ctx.head_dim, dtype=ctx.dtype,
                device=ctx.device, page_size=ctx.page_size,
            )  # fmt: skip
        except KernelUnavailable as error:
            raise UsageError(f"--attention-backend mini: {error}; use fi") from None

    def measure_device(self) -> None:
        ctx = self.ctx
        self._kernel.share_out(
            multiprocessor_speeds(
                self._kernel, num_qo_heads=ctx.num_qo_heads, num_kv_heads=ctx.num_kv_heads,
                head_dim=ctx.head_dim, dtype=ctx.dtype, device=ctx.device,
            )
        )  # fmt: skip

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        even = len(batch.rows) <= FUSED_TOKENS
        self._kernel.plan(batch.device_lens_dev, batch.rows, even=even)  # type: ignore[arg-type]

    def capture_metadata(self, batch: ForwardBatch) -> None:
        self.prepare_metadata(batch)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        return self._kernel.attention(
            q.contiguous(), pool.k(layer), pool.v(layer), batch.page_table
        )

    def forward_qkv(
        self, qkv: torch.Tensor, turn: Turn, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        return self._kernel.attention_of_qkv(
            qkv, turn.q_weight, turn.k_weight, turn.eps, turn.table, pool.k(layer), pool.v(layer),
            batch.page_table,
        )  # fmt: skip
