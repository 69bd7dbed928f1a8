"""How all ranks of a group see the same messages in the same step.

Rank 0 takes what arrived, says how much that is by a broadcast of one number, and publishes the
bytes as they are; every rank decodes them for itself. The number is what keeps the ranks in step:
a rank that waits for it knows that nothing of this step is missing.
"""

import socket
from dataclasses import dataclass
from typing import Protocol

import zmq

from minisgl.config import StartError
from minisgl.distributed import Communicator

_STOP = -1


@dataclass(frozen=True, slots=True)
class FeedPlace:
    """Where rank 0 publishes."""

    endpoint: str
    listener: socket.socket | None = None
    """Rank 0: what listens there already, if it does. It is taken over."""


class Feed(Protocol):
    """One rank's end. Each step of every rank makes one call."""

    def exchange(self, raws: list[bytes] | None) -> list[bytes] | None:
        """The entries of this step, or None: stop. Only rank 0's argument counts."""
        ...

    def close(self) -> None: ...


class SingleFeed:
    """A group of one."""

    def exchange(self, raws: list[bytes] | None) -> list[bytes] | None:
        return raws

    def close(self) -> None:
        pass


class PubSubFeed:
    """Rank 0 publishes; the others subscribe. Made by all ranks at the same time."""

    def __init__(self, comm: Communicator, place: FeedPlace, timeout: float) -> None:
        """Returns when every rank is connected; `StartError` after `timeout` seconds."""
        self._comm, endpoint = comm, place.endpoint
        self._context = zmq.Context()
        kind = zmq.XPUB if comm.rank == 0 else zmq.SUB
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without limits: a publisher that reaches one drops messages.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if comm.rank == 0:
            # Else only the first of equal subscriptions is reported.
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            if place.listener is not None:
                self._socket.setsockopt(zmq.USE_FD, place.listener.detach())
            self._socket.bind(endpoint)
            comm.barrier()
            # A subscriber that is not connected yet would miss the first steps.
            for _ in range(comm.size - 1):
                if not self._socket.poll(int(timeout * 1000)):
                    raise StartError(f"not every rank subscribed at {endpoint} in {timeout:g} s")
                self._socket.recv()
        else:
            comm.barrier()
            self._socket.connect(endpoint)
            self._socket.subscribe(b"")
        comm.barrier()

    def exchange(self, raws: list[bytes] | None) -> list[bytes] | None:
        if self._comm.rank == 0:
            self._comm.broadcast_int(_STOP if raws is None else len(raws))
            for raw in raws or ():
                self._socket.send(raw)
            return raws
        count = self._comm.broadcast_int(0)
        return None if count == _STOP else [self._socket.recv() for _ in range(count)]

    def close(self) -> None:
        self._context.destroy(linger=0)


def make_feed(comm: Communicator, place: FeedPlace, timeout: float) -> Feed:
    """This rank's end. Made by all ranks at the same time."""
    return SingleFeed() if comm.size == 1 else PubSubFeed(comm, place, timeout)
