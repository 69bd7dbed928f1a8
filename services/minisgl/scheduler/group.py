"""How the ranks of a group meet, and what each of them watches while they are together.

On one machine they meet at a file in the service's directory, and the launcher watches them. In a
cluster they meet through Redis and watch each other: `cluster.py`.
"""

from abc import ABC, abstractmethod
from pathlib import Path

from minisgl.config import EngineConfig, StartError, UsageError
from minisgl.distributed import Communicator, SingleRank
from minisgl.scheduler.feed import FeedPlace

PATIENCE_SECONDS = 7 * 24 * 3600.0
"""How long ranks wait for each other once they have met: a peer that is gone shows as a closed
connection at once, and one that hangs is the watchdog's business."""
LOOPBACK = "127.0.0.1"


class Members(ABC):
    """One rank's membership in its group."""

    @abstractmethod
    def meet(self, incarnation: int) -> tuple[Communicator, FeedPlace]:
        """Wait for all ranks: the way to talk to them, and where the feed is.

        Only rank 0's `incarnation` counts. Raises `StartError`.
        """

    def formed(self) -> None:  # noqa: B027 (nothing to do on one machine)
        """Rank 0: every rank is ready to step."""

    def each_second(self) -> None:  # noqa: B027
        """Called in a thread of its own; ends the process when this group is over."""

    def close(self) -> None:  # noqa: B027
        """Leave."""


class LocalMembers(Members):
    """Ranks of one host, which meet at a file."""

    def __init__(self, directory: Path, group: str, rank: int, size: int) -> None:
        check_rank(rank, size)
        self._directory, self._group, self._rank, self._size = directory, group, rank, size

    def meet(self, incarnation: int) -> tuple[Communicator, FeedPlace]:
        feed = FeedPlace(f"ipc://{self._directory}/feed.{self._group}")
        if self._size == 1:
            return SingleRank(), feed
        from minisgl.distributed.gloo import GlooCommunicator

        address = f"file://{self._directory}/rendezvous.{self._group}"
        comm = GlooCommunicator(address, self._rank, self._size, PATIENCE_SECONDS, host=LOOPBACK)
        return comm, feed


def check_rank(rank: int, size: int) -> None:
    """Raises `UsageError` for a rank that the group does not have."""
    if not 0 <= rank < size:
        raise UsageError(f"--tp-rank must be between 0 and {size - 1}, not {rank}")


def device_group(config: EngineConfig, comm: Communicator) -> Communicator:
    """The ranks of `comm`, whose tensors go through NCCL if the engine computes on GPUs.

    All ranks call it. Raises `StartError`.
    """
    if comm.size == 1 or config.fake_engine:
        return comm
    from minisgl.distributed.device import select_device
    from minisgl.distributed.gloo import GlooCommunicator

    device = select_device(config.device, comm.rank)
    kinds = [row[0] for row in comm.gather_ints([int(device.type == "cuda")])]
    if len(set(kinds)) > 1:
        raise StartError(
            f"rank {kinds.index(1)} has a GPU, but rank {kinds.index(0)} has none: make GPUs "
            "visible to all of them, or use --device cpu"
        )
    if device.type != "cuda" or not isinstance(comm, GlooCommunicator):
        return comm
    from minisgl.distributed.nccl import NcclCommunicator
    from minisgl.host import host_id

    return NcclCommunicator(comm, device, pynccl=config.pynccl, node=host_id())
