"""Self-fencing: a rank whose step loop stands still ends itself, and its containers start anew.

A collective with a peer that hangs never returns, and a process that was frozen wakes up in a world
that has replaced it. Nobody outside can tell either from slowness; the rank itself can.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

from minisgl.lifecycle import boot_clock

_log = logging.getLogger(__name__)

PEER_LOST_CODE = 3
"""A peer is gone: a collective failed."""
STUCK_CODE = 4
"""The step loop stood still for the heartbeat time-out."""
FORMING_CODE = 6
"""A rank that had joined was started anew before the group was formed."""


def leave(code: int, why: str) -> None:
    """End the process now, also from a thread, also while a collective blocks the main one."""
    _log.log(logging.ERROR if code else logging.INFO, "%s: leaving with code=%d", why, code)
    logging.shutdown()
    os._exit(code)


@contextlib.contextmanager
def ends_at_once(stop: threading.Event) -> Iterator[None]:
    """While this holds, SIGTERM ends the process: a rank of no group has nothing to finish.

    Waiting for the other ranks may block the main thread outside of Python, where no handler runs
    and `stop` is not set; the number of the signal still arrives in a pipe.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are not this thread's business
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        with open(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in (signal.SIGTERM, signal.SIGINT):
                    leave(0, "asked to end before the group was formed")

    threading.Thread(target=watch, name="start-watch", daemon=True).start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        if stop.is_set():
            leave(0, "asked to end before the group was formed")
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


class Watchdog:
    """Watches one loop; `silence` is the heartbeat time-out, in seconds."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._turned: float | None = None

    def start(self) -> None:
        """From now on the loop must turn."""
        self._turned = boot_clock()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def turn(self) -> None:
        """The loop is about to do its next round."""
        self.check()
        if self._turned is not None:
            self._turned = boot_clock()

    def check(self) -> None:
        """End the process if the loop stood still. Called before anything is sent or taken."""
        turned = self._turned
        if turned is not None:
            still = boot_clock() - turned
            if still > self._silence:
                leave(STUCK_CODE, f"the step loop stood still for {still:.1f} s")

    def stop(self) -> None:
        """The loop has ended, as it should."""
        self._turned = None

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._silence / 10, 0.5))
            self.check()
