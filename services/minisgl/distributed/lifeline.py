"""Hears that a peer is gone while this rank waits for its GPU.

A collective of NCCL with a rank that has died runs for ever, and tells nobody. The host's own
connections break at once: a thread talks over them all the time.
"""

import threading
from collections.abc import Callable

from minisgl.distributed.base import Communicator, PeerError

BEAT_SECONDS = 0.25
LEAVE_SECONDS = 5.0
"""How long after a peer has left in good order this rank must leave too."""


class Lifeline:
    """A thread on a group of its own. Every rank has one."""

    def __init__(
        self,
        group: Communicator,
        on_lost: Callable[[str], None],
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`on_lost` is called once, in the thread, with what happened. `failure` is asked at each
        beat whether something else is known to be wrong."""
        self._group, self._on_lost, self._failure = group, on_lost, failure
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)

    def start(self) -> None:
        """From now on a lost peer is noticed."""
        self._thread.start()

    def stop(self) -> None:
        """Leave in good order. May be repeated; a peer that hangs does not hold it up for long."""
        self._leaving.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * BEAT_SECONDS)

    def _run(self) -> None:
        try:
            lost = self._watch()
        except PeerError as error:
            lost = str(error)
        if lost is not None and not self._leaving.is_set():
            self._on_lost(lost)

    def _watch(self) -> str | None:
        """What was lost; None when this rank left."""
        while True:
            rows = self._group.gather_ints([int(self._leaving.is_set())])
            left = [rank for rank, (leaves,) in enumerate(rows) if leaves]
            if left:
                in_order = self._leaving.wait(LEAVE_SECONDS)
                return None if in_order else f"rank {left[0]} has left the group"
            if why := self._failure():
                return why
            self._leaving.wait(BEAT_SECONDS)
