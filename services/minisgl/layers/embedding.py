"""Token embedding and LM head, both split by vocabulary."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from minisgl.distributed import Communicator
from minisgl.layers.base import META, BaseOP, Piece
from minisgl.layers.linear import product
from minisgl.layers.sharding import padded_shard
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.embedding import embedding_function, embedding_reference
from minisgl_kernels.skinny_linear import max_tokens, skinny_linear_function

FEW = 16
"""Tokens up to which the LM head is computed by the own kernel: beyond it loses, measured on an
H200 with vocabularies of 151,936 rows of 1,024 and of 5,120."""


class _VocabParallel(BaseOP):
    """A table [local vocabulary, hidden]; the vocabulary is padded to a multiple of the ranks."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, comm: Communicator) -> None:
        self._shard = padded_shard(vocab, comm.rank, comm.size)
        self._vocab, self._hidden, self._comm = vocab, hidden, comm
        self._few = min(max_tokens(), FEW) if comm.size == 1 else 0
        self.weight = torch.empty(self._shard.local, hidden, dtype=dtype, device=META)

    def pieces(self, prefix: str = "") -> Iterator[Piece]:
        hidden = slice(0, self._hidden)
        yield Piece(
            prefix + "weight", (self._vocab, self._hidden), (self._shard.take, hidden),
            prefix + "weight", (slice(0, self._shard.count), hidden),
        )  # fmt: skip

    def _logits(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if x.is_cuda and len(x) <= self._few and (kernel := skinny_linear_function()) is not None:
            with contextlib.suppress(KernelUnavailable):  # of this type or width
                return kernel(x, self.weight, out=out)
        if out is not None and self._comm.size == 1:
            return product(x, self.weight, out)
        logits = self._comm.all_gather(F.linear(x, self.weight))[:, : self._vocab]
        return logits if out is None else out.copy_(logits)


class VocabParallelEmbedding(_VocabParallel):
    """Rows of the table; each rank gives zero for the ids of the others, then they are added."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids is [T]; the result [T, hidden]."""
        if ids.is_cuda and (kernel := embedding_function()) is not None:
            with contextlib.suppress(KernelUnavailable):  # of this width
                out = kernel(ids, self.weight, self._shard.start, self._shard.count)
                self._comm.all_reduce(out)
                return out
        if self._comm.size == 1:
            return F.embedding(ids, self.weight)
        out = embedding_reference(ids, self.weight, self._shard.start, self._shard.count)
        self._comm.all_reduce(out)
        return out


class ParallelLMHead(_VocabParallel):
    """Scores of the whole vocabulary, from a table of its own."""

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x is [B, hidden]; the result [B, vocab], whole on every rank; in `out` if it is given."""
        return self._logits(x, out)


class TiedLMHead(BaseOP):
    """Scores of the whole vocabulary, from the table of the embedding."""

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        self._embedding = embedding

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x is [B, hidden]; the result [B, vocab], whole on every rank; in `out` if it is given."""
        return self._embedding._logits(x, out)
