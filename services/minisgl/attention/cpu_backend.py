"""The project's own attention on a CPU (minisgl_kernels.cpu_decoder), in vector code.

Of a dense model on one rank a step is one call, which has its attention inside; then nothing here
is called. For the others, torch computes what stands between two calls.
"""

from typing import ClassVar

import torch

from minisgl.attention.base import AttentionBackend, AttentionContext, ForwardBatch
from minisgl.config import UsageError
from minisgl.kvcache.pool import KVPool
from minisgl_kernels.cpu_decoder import DIM_STEP, CpuAttention, cpu_decoder_available
from minisgl_kernels.cpu_matmul import chosen_isa


class CpuBackend(AttentionBackend):
    """`cpu`: prefill and decode, of pages of any size."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @classmethod
    def check(cls, capability: tuple[int, int] | None, *, prefill: bool, decode: bool) -> None:
        if capability is not None:
            raise UsageError("--attention-backend cpu computes on a CPU alone; use auto")

    def __init__(self, ctx: AttentionContext) -> None:
        super().__init__(ctx)
        if not cpu_decoder_available():
            raise UsageError(
                "--attention-backend cpu needs a C++ compiler (g++ 11 or later), and none works; "
                "use torch"
            )
        if ctx.head_dim % DIM_STEP:
            raise UsageError(
                f"--attention-backend cpu needs heads of a multiple of {DIM_STEP} dimensions, not "
                f"{ctx.head_dim}; use torch"
            )
        self._attention: CpuAttention | None = None

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        if self._attention is None:
            self._attention = self._make()
        self._attention.plan(batch.rows, batch.cached_lens, batch.device_lens, batch.page_table)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        assert self._attention is not None
        return self._attention.forward(q, pool.k(layer), pool.v(layer))

    def _make(self) -> CpuAttention:
        ctx = self.ctx
        return CpuAttention(
            heads=ctx.num_qo_heads, kv_heads=ctx.num_kv_heads, head_dim=ctx.head_dim,
            isa=chosen_isa(), threads=torch.get_num_threads(),
        )  # fmt: skip
