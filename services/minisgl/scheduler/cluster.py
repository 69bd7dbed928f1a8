"""A rank's membership in its group in a cluster: met through Redis, and left for good reasons only.

Redis that is away is no such reason. Another incarnation is, and so is a rank that was started anew
before the group was complete.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from minisgl.bus.base import REPLACED_CODE, BusError, ReplacedError
from minisgl.bus.network import Network, tell_libraries
from minisgl.bus.rendezvous import Meeting, Rendezvous, listeners
from minisgl.config import RankConfig, StartError
from minisgl.distributed import Communicator, SingleRank
from minisgl.lifecycle import boot_clock
from minisgl.scheduler.feed import FeedPlace
from minisgl.scheduler.group import PATIENCE_SECONDS, Members, check_rank
from minisgl.scheduler.watchdog import FORMING_CODE, leave

T = TypeVar("T")

_log = logging.getLogger(__name__)

START_SECONDS = 1800.0
"""How long a rank waits for the others to come."""


class RedisMembers(Members):
    """Ranks that find each other through Redis, on any hosts."""

    def __init__(self, config: RankConfig, boot: int, network: Network | None = None) -> None:
        """`network` is the host's; None: as it is now."""
        self._size = config.engine.tensor_parallel_size
        check_rank(config.tp_rank, self._size)
        self._config = config
        self._rank = config.tp_rank
        self._boot = boot
        self._meeting: Meeting | None = None
        self._forming = True
        self._opened = 0.0
        """Rank 0: when others could join, in seconds of the boot clock."""
        self._listeners: list[socket.socket] = []
        """Rank 0: of the store and of the feed, until these take them over."""
        self._rendezvous = Rendezvous(
            config.bus,
            config.service,
            config.group,
            size=self._size,
            revision=config.revision,
            silence=config.heartbeat_timeout_seconds,
            password_file=config.bus_password_file,
            ca_file=config.bus_ca_file,
            network=network,
        )

    def meet(self, incarnation: int) -> tuple[Communicator, FeedPlace]:
        meeting = self._open(incarnation) if self._rank == 0 else self._join()
        self._meeting = meeting
        store_listener, feed_listener = self._listeners or (None, None)
        endpoint = f"tcp://{_bracketed(meeting.host)}:{meeting.feed_port}"
        feed = FeedPlace(endpoint, feed_listener)
        if self._size == 1:
            return SingleRank(), feed
        from minisgl.distributed.gloo import GlooCommunicator

        here = (
            meeting.host if self._rank == 0 else self._address((meeting.host, meeting.store_port))
        )
        store = f"tcp://{_bracketed(meeting.host)}:{meeting.store_port}"
        comm = GlooCommunicator(
            store, self._rank, self._size, PATIENCE_SECONDS, host=here, listener=store_listener
        )
        return comm, feed

    def formed(self) -> None:
        self._forming = False
        if self._rank == 0:
            self._patiently(self._rendezvous.formed)

    def each_second(self) -> None:
        meeting = self._meeting
        if meeting is None:
            return
        try:
            if self._rank == 0:
                self._rendezvous.keep()
                if self._forming:
                    self._watch_forming()
            elif self._rendezvous.replaced(meeting.incarnation):
                leave(REPLACED_CODE, "the group has another incarnation")
        except ReplacedError as error:
            leave(REPLACED_CODE, str(error))

    def _watch_forming(self) -> None:
        """End what cannot become a group any more, with the name of the rank that is to blame."""
        if anew := self._rendezvous.started_anew():
            leave(FORMING_CODE, f"rank {anew[0]} was started anew while the group formed")
        if boot_clock() - self._opened > START_SECONDS and (absent := self._rendezvous.absent()):
            leave(FORMING_CODE, f"rank {absent[0]} has not come within {START_SECONDS:g} s")

    def close(self) -> None:
        self._rendezvous.close()
        for one in self._listeners:
            one.close()

    def _open(self, incarnation: int) -> Meeting:
        host = self._patiently(self._address)
        store_port = feed_port = 0  # a group of one listens nowhere
        if self._size > 1:
            self._listeners = listeners(host, self._config.port_range, 2)
            store_port, feed_port = (one.getsockname()[1] for one in self._listeners)
        meeting = Meeting(incarnation, host, store_port, feed_port)
        if not self._patiently(lambda: self._rendezvous.open(meeting, self._boot)):
            raise StartError(f"another rank 0 of group {self._config.group} starts at this moment")
        self._opened = boot_clock()
        return meeting

    def _address(self, way: tuple[str, int] | None = None) -> str:
        """That of this rank for the others, on the `way` to rank 0; rank 0's own: to Redis."""
        asked = self._config.interface
        nic = self._rendezvous.nic(asked, way)
        tell_libraries(nic, os.environ, asked=bool(asked))
        _log.info("ranks meet on interface=%s address=%s", nic.name or "unknown", nic.address)
        return nic.address

    def _join(self) -> Meeting:
        return self._rendezvous.join(self._rank, self._boot, seconds=START_SECONDS)

    def _patiently(self, work: Callable[[], T]) -> T:
        """The result of `work`, as soon as Redis answers: it is no reason to end."""
        while True:
            try:
                return work()
            except BusError:
                time.sleep(1.0)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
