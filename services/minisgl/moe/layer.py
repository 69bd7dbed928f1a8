"""The MLP of a decoder layer with experts."""

from collections.abc import Iterator

import torch

from minisgl.distributed import Communicator
from minisgl.layers.base import META, BaseOP, Piece
from minisgl.layers.linear import Linear
from minisgl.layers.sharding import Shard
from minisgl.moe.experts import route, run_experts
from minisgl_kernels.moe import MoeKernels, moe_kernels


class Experts(BaseOP):
    """The weights of all experts, each split over the ranks by its intermediate size."""

    def __init__(
        self, experts: int, hidden: int, width: int, shard: Shard, dtype: torch.dtype
    ) -> None:
        self._hidden, self._width, self._shard = hidden, width, shard
        local = shard.local
        self.gate_up_proj = torch.empty(experts, 2 * local, hidden, dtype=dtype, device=META)
        self.down_proj = torch.empty(experts, hidden, local, dtype=dtype, device=META)

    def pieces(self, prefix: str = "") -> Iterator[Piece]:
        rows, hidden, local = self._shard.take, slice(0, self._hidden), self._shard.local
        wide, narrow = (self._width, self._hidden), (self._hidden, self._width)
        into, down = prefix + "gate_up_proj", prefix + "down_proj"
        for e in range(self.gate_up_proj.shape[0]):
            name = f"{prefix}{e}."
            yield Piece(name + "gate_proj.weight", wide, (rows, hidden), into,
                        (e, slice(0, local), hidden))  # fmt: skip
            yield Piece(name + "up_proj.weight", wide, (rows, hidden), into,
                        (e, slice(local, 2 * local), hidden))  # fmt: skip
            yield Piece(name + "down_proj.weight", narrow, (hidden, rows), down,
                        (e, hidden, slice(0, local)))  # fmt: skip


class MoeMLP(BaseOP):
    """A router, whole on every rank, and the experts that it chooses for each token."""

    def __init__(
        self, *, experts: int, top_k: int, normalise: bool, hidden: int, width: int, shard: Shard,
        dtype: torch.dtype, comm: Communicator,
    ) -> None:  # fmt: skip
        self.gate = Linear(hidden, experts, False, dtype)
        self.experts = Experts(experts, hidden, width, shard, dtype)
        self._top_k, self._normalise, self._comm = top_k, normalise, comm
        self._compiled: MoeKernels | None = None

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can hold it: torch must ask the device how many rows an expert has.

        Asked on a GPU only.
        """
        return moe_kernels() is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [T, hidden]; so is the result, whole on every rank."""
        kernels = self._kernels() if x.is_cuda else None
        scores, experts = self.gate.forward(x), self.experts
        choose = kernels.route if kernels else route
        weights, ids = choose(scores, self._top_k, self._normalise)
        run = kernels.run_experts if kernels else run_experts
        out = run(x, experts.gate_up_proj, experts.down_proj, weights, ids)
        self._comm.all_reduce(out)
        return out

    def _kernels(self) -> MoeKernels | None:
        """Compiled at the first forward, which no graph captures."""
        if self._compiled is None and (kernels := moe_kernels()) is not None:
            kernels.compile_for(self.experts.gate_up_proj, self.experts.down_proj, self._top_k)
            self._compiled = kernels
        return self._compiled
