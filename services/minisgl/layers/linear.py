"""Matrix products whose weights are split over the ranks."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minisgl.distributed import Communicator
from minisgl.layers.base import META, BaseOP, Piece
from minisgl.layers.sharding import Shard
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.tuned_linear import TunedLinear, tuned_linear_function

MEASURED = 512
"""Tokens of the largest step that is captured; beyond it a full chunk of prompts is measured, and
other steps are torch's."""
LARGE = 1 << 25
"""Weights from which on measuring pays: a library's own choice for smaller products, on an H200,
was within the noise of the best."""
MANY = 1 << 34
"""The same for a full chunk: tokens times weights."""


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T` for x [T, inputs] and weight [outputs, inputs]: [T, outputs], in `out` if it
    is given; on a GPU by the algorithm that was measured to be the fastest."""
    kernel = _measured(x, weight)
    if kernel is not None and (out is None or out.is_contiguous()):
        with contextlib.suppress(KernelUnavailable):
            return kernel(x, weight, out=out)
    return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)


def add_product(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Add `x @ weight.T` to the residual [T, outputs], in place, in the same way."""
    kernel = _measured(x, weight)
    if kernel is not None and residual.is_contiguous():
        with contextlib.suppress(KernelUnavailable):
            kernel(x, weight, residual=residual)
            return
    residual.addmm_(x, weight.t())


def _measured(x: torch.Tensor, weight: torch.Tensor) -> TunedLinear | None:
    """The product whose algorithms are measured, where that pays."""
    if not x.is_cuda or x.dtype.itemsize != 2 or not x.is_contiguous():
        return None
    if len(x) <= MEASURED:
        pays = weight.numel() >= LARGE
    else:
        pays = len(x) * weight.numel() >= MANY
    return tuned_linear_function() if pays else None


class Linear(BaseOP):
    """`x @ weight.T + bias`, whole on every rank. weight is [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        self.weight = torch.empty(outputs, inputs, dtype=dtype, device=META)
        self.bias = torch.empty(outputs, dtype=dtype, device=META) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [T, inputs]; the result [T, outputs]."""
        if self.bias is None:
            return product(x, self.weight)
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a merged one: its name in the checkpoint, its outputs, those held here."""

    name: str
    size: int
    shard: Shard


class MergedColumnLinear(Linear):
    """Projections of the same input in one product, each split by outputs: Q, K, V or gate, up.

    In a checkpoint they stand beside this operator under their own names.
    """

    def __init__(self, inputs: int, parts: Sequence[Part], bias: bool, dtype: torch.dtype) -> None:
        super().__init__(inputs, sum(p.shard.local for p in parts), bias, dtype)
        self._inputs, self._parts = inputs, tuple(parts)

    def pieces(self, prefix: str = "") -> Iterator[Piece]:
        parent = prefix.rstrip(".").rpartition(".")[0]
        start = 0
        for part in self._parts:
            source = f"{parent}.{part.name}." if parent else f"{part.name}."
            put = slice(start, start + part.shard.count)
            inputs = slice(0, self._inputs)
            yield Piece(
                source + "weight", (part.size, self._inputs), (part.shard.take, inputs),
                prefix + "weight", (put, inputs),
            )  # fmt: skip
            if self.bias is not None:
                yield Piece(
                    source + "bias", (part.size,), (part.shard.take,), prefix + "bias", (put,)
                )
            start += part.shard.local


class RowParallelLinear(Linear):
    """Split by inputs: each rank has a share of the sum, and an all-reduce adds them up."""

    def __init__(
        self, inputs: int, shard: Shard, outputs: int, bias: bool, dtype: torch.dtype,
        comm: Communicator,
    ) -> None:  # fmt: skip
        super().__init__(shard.local, outputs, bias, dtype)
        self._inputs, self._shard, self._outputs, self._comm = inputs, shard, outputs, comm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [T, local inputs]; the result [T, outputs] is whole on every rank."""
        bias = self.bias if self._comm.rank == 0 else None  # once in the sum
        out = self._comm.sum_buffer(x.shape[0], self._outputs, x.dtype)
        if bias is None:
            out = product(x, self.weight, out)
        elif out is None:
            out = F.linear(x, self.weight, bias)
        else:
            torch.addmm(bias, x, self.weight.t(), out=out)
        self._comm.all_reduce(out)
        return out

    def pieces(self, prefix: str = "") -> Iterator[Piece]:
        outputs = slice(0, self._outputs)
        yield Piece(
            prefix + "weight", (self._outputs, self._inputs), (outputs, self._shard.take),
            prefix + "weight", (outputs, slice(0, self._shard.count)),
        )  # fmt: skip
        if self.bias is not None:
            yield Piece(prefix + "bias", (self._outputs,), (outputs,), prefix + "bias", (outputs,))
