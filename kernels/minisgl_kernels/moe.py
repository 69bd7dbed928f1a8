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
        from minisgl_kernels.moe_experts import sizes_for

        device = down.device
        x = torch.zeros(2, down.shape[1], dtype=down.dtype, device=device)
        scores = torch.zeros(2, down.shape[0], dtype=down.dtype, device=device)
        many = torch.zeros(CHUNKS[0] + 1, dtype=torch.int32, device=device)
        weights, ids = self.route(scores, top_k, True)
        for blocks in sizes_for(down.dtype):
            self.run_experts(x, gate_up, down, weights, ids, blocks)
            align(many, down.shape[0], blocks[0].m)


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
