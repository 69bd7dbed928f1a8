"""What ranks say to each other, and the case of one rank."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class PeerError(RuntimeError):
    """Another rank is gone or does not answer: this rank cannot go on."""


class Communicator(ABC):
    """One rank's end of a group. Every rank makes the same calls in the same order.

    All methods raise `PeerError` when another rank is lost. One thread at a time.
    """

    rank: int
    size: int
    transport: str = ""
    """What tensors travel by between this rank and the others. Gloo: `gloo/ADDRESS`. NCCL: what it
    chose for ranks of one node, then for those of others, as `P2P, IB between nodes`. Empty: there
    are no others, or nothing is known yet."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks, in place."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors [..., n] of all ranks side by side: [..., size * n]."""

    def sum_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory [rows, width] whose `all_reduce` is the fastest, to compute into; None: any is.

        What is in it holds until the next call.
        """
        return None

    def check(self) -> None:
        """Raises `PeerError` if a peer is known to be lost. Costs nothing; call it after a wait for
        the device, whose collectives may have been aborted."""
        return

    @abstractmethod
    def barrier(self) -> None:
        """Wait on the host until every rank is here."""

    @abstractmethod
    def broadcast_int(self, value: int) -> int:
        """Rank 0's value, through host memory. What the others give is ignored."""

    @abstractmethod
    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Each rank's values, equally many, by rank, through host memory."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Not collective; may be called twice."""


class SingleRank(Communicator):
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        pass

    def broadcast_int(self, value: int) -> int:
        return value

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        return [list(values)]

    def close(self) -> None:
        pass
