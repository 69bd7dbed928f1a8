"""The project's own decode kernel (minisgl_kernels.decode_attention). It reads slots: any page size
suits it, and there is no work for the host."""

import logging
import os
from dataclasses import dataclass

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
from minisgl_kernels.partition import STEP, partition

_log = logging.getLogger(__name__)

LEFT = 32
"""Multiprocessors that the attention of half a batch leaves to what runs beside it."""

FUSED_TOKENS = 32
"""Beyond it the launch that is spared is hidden."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step's plan."""

    kernel: DecodeAttention
    stream: torch.cuda.Stream | None = None
    """Where it is to run, if not on the current one: on some multiprocessors alone."""


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
            self._whole = _Planned(self._kernel())
        except KernelUnavailable as error:
            raise UsageError(f"--attention-backend mini: {error}; use fi") from None
        self._halves: list[_Planned] = []
        self.fuses = int(os.environ.get("MINISGL_FUSED_TOKENS", FUSED_TOKENS))

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        _plan(batch, self._whole)

    def capture_metadata(self, batch: ForwardBatch) -> None:
        if batch.halves is None:
            self.prepare_metadata(batch)
            return
        if not self._halves:  # at the first warm-up, before anything is captured
            self._halves = self._beside()
        for half, planned in zip(batch.halves.batches, self._halves, strict=True):
            _plan(half, planned)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        planned: _Planned = batch.metadata
        arguments = q.contiguous(), pool.k(layer), pool.v(layer), batch.page_table
        if planned.stream is None:
            return planned.kernel.attention(*arguments)
        out, current = torch.empty_like(q), torch.cuda.current_stream()
        begin, end = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(current)
        with torch.cuda.stream(planned.stream):
            planned.stream.wait_event(begin)
            planned.kernel.attention(*arguments, out)
            end.record(planned.stream)
        current.wait_event(end)
        if os.environ.get("MINISGL_HALVES_GREEN") == "2":
            torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        return out

    def forward_qkv(
        self, qkv: torch.Tensor, turn: Turn, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        planned: _Planned = batch.metadata
        return planned.kernel.attention_of_qkv(
            qkv, turn.q_weight, turn.k_weight, turn.eps, turn.table, pool.k(layer), pool.v(layer),
            batch.page_table,
        )  # fmt: skip

    def _kernel(self, left: int = 0) -> DecodeAttention:
        ctx = self.ctx
        return self._make(
            max_batch=ctx.max_running, num_qo_heads=ctx.num_qo_heads,
            num_kv_heads=ctx.num_kv_heads, head_dim=ctx.head_dim, dtype=ctx.dtype,
            device=ctx.device, left=left,
        )  # fmt: skip

    def _beside(self) -> list[_Planned]:
        """Kernels for both halves of a batch."""
        left = int(os.environ.get("MINISGL_HALVES_LEFT", LEFT))
        device = self.ctx.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        try:
            if os.environ.get("MINISGL_HALVES_GREEN", "0") == "0":
                raise KernelUnavailable("switched off")
            part = partition(device, (processors - left) // STEP * STEP, 2)
        except KernelUnavailable as error:
            _log.debug("halves share all multiprocessors: %s", error)
            return [_Planned(self._kernel(left)) for _ in range(2)]
        left = processors - part.count
        return [_Planned(self._kernel(left), stream) for stream in part.streams]


def _plan(batch: ForwardBatch, planned: _Planned) -> None:
    assert batch.device_lens_dev is not None
    planned.kernel.plan(batch.device_lens_dev, batch.rows)
    batch.metadata = planned
