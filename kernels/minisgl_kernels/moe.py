"""The Triton kernels of MoE layers, where they run."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl.config import env_switch
from minisgl_kernels.build import DISABLE_ENV

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MoeKernels:
    """See moe_route.py and moe_experts.py."""

    route: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
    run_experts: Callable[..., torch.Tensor]

    def compile_for(self, gate_up: torch.Tensor, down: torch.Tensor, top_k: int) -> None:
        """Compile what any number of tokens may need, so that no request waits for it."""
        from minisgl_kernels.moe_align import CHUNKS, align
        from minisgl_kernels.moe_experts import FEW, FEW_ROWS, sizes_for

        experts, hidden = down.shape[:2]
        many = torch.zeros(CHUNKS[0] + 1, dtype=torch.int32, device=down.device)
        for blocks in sizes_for(down.dtype):
            tokens = 1 if blocks is FEW else FEW_ROWS + 1
            x = torch.zeros(tokens, hidden, dtype=down.dtype, device=down.device)
            weights, ids = self.route(x.new_zeros(tokens, experts), top_k, True)
            self.run_experts(x, gate_up, down, weights, ids, blocks)
            align(many, experts, blocks[0].m)


@functools.cache
def moe_kernels() -> MoeKernels | None:
    """The kernels, tried once on the current GPU; None, with one warning, where they do not run."""
    if env_switch(DISABLE_ENV):
        _log.warning("experts run in torch: kernels are switched off by %s=1", DISABLE_ENV)
        return None
    try:
        from minisgl_kernels.moe_experts import run_experts
        from minisgl_kernels.moe_route import route

        kernels = MoeKernels(route, run_experts)
        weights = torch.zeros(2, 32, 16, dtype=torch.bfloat16, device="cuda")
        kernels.compile_for(weights, weights.view(2, 16, 32)[:, :, :16].contiguous(), 1)
        torch.cuda.synchronize()
    except Exception as error:  # no Triton, no compiler for its launcher, a GPU it does not know
        _log.warning("experts run in torch, because the Triton kernels do not run: %s", error)
        return None
    return kernels
