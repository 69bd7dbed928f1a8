"""The project's own decode kernel (minisgl_kernels.decode_attention). It reads slots: any page size
suits it, and there is no work for the host."""

import os

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
from minisgl_kernels.decode_attention import DecodeAttention, decode_attention_function

LEFT = 32
"""Multiprocessors that the attention of half a batch leaves to what runs beside it."""

FUSED_TOKENS = 32
"""Beyond it the launch that is spared is hidden."""


class MiniBackend(AttentionBackend):
    """`mini`: decode alone."""

    default_page_size = 64
    captures = True
    splits = True
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
        self._make = make
        try:
            self._whole = self._kernel()
        except KernelUnavailable as error:
            raise UsageError(f"--attention-backend mini: {error}; use fi") from None
        self._halves: list[DecodeAttention] = []
        self.fuses = int(os.environ.get("MINISGL_FUSED_TOKENS", FUSED_TOKENS))

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        _plan(batch, self._whole)

    def capture_metadata(self, batch: ForwardBatch) -> None:
        if batch.halves is None:
            self.prepare_metadata(batch)
            return
        if not self._halves:  # at the first warm-up, before anything is captured
            left = int(os.environ.get("MINISGL_HALVES_LEFT", LEFT))
            self._halves = [self._kernel(left) for _ in range(2)]
        for half, kernel in zip(batch.halves.batches, self._halves, strict=True):
            _plan(half, kernel)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        kernel: DecodeAttention = batch.metadata
        return kernel.attention(q.contiguous(), pool.k(layer), pool.v(layer), batch.page_table)

    def forward_qkv(
        self, qkv: torch.Tensor, turn: Turn, layer: int, pool: KVPool, batch: ForwardBatch,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        kernel: DecodeAttention = batch.metadata
        return kernel.attention_of_qkv(
            qkv, turn.q_weight, turn.k_weight, turn.eps, turn.table, pool.k(layer), pool.v(layer),
            batch.page_table, ahead,
        )  # fmt: skip

    def _kernel(self, left: int = 0) -> DecodeAttention:
        ctx = self.ctx
        return self._make(
            max_batch=ctx.max_running, num_qo_heads=ctx.num_qo_heads,
            num_kv_heads=ctx.num_kv_heads, head_dim=ctx.head_dim, dtype=ctx.dtype,
            device=ctx.device, left=left,
        )  # fmt: skip


def _plan(batch: ForwardBatch, kernel: DecodeAttention) -> None:
    assert batch.device_lens_dev is not None
    kernel.plan(batch.device_lens_dev, batch.rows)
    batch.metadata = kernel
