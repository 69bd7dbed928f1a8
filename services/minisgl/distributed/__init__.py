"""Communication between tensor-parallel ranks."""

from minisgl.distributed.base import Communicator, PeerError, SingleRank

__all__ = ["Communicator", "PeerError", "SingleRank"]
