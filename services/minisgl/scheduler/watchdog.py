"""Self-fencing: a rank whose step loop stands still ends itself, and its containers start anew.

A collective with a peer that hangs never returns, and a process that was frozen wakes up in a world
that has replaced it. Nobody outside can tell either from slowness; the rank itself can.
"""

import logging
import os
import threading
import time

_log = logging.getLogger(__name__)

PEER_LOST_CODE = 3
"""A peer is gone: a collective failed."""
STUCK_CODE = 4
"""The step loop stood still for the heartbeat time-out."""
FORMING_CODE = 6
"""A rank that had joined was started anew before the group was formed."""


def boot_clock() -> float:
    """Seconds that go on while the process, or the machine, is frozen."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


def leave(code: int, why: str) -> None:
    """End the process now, also from a thread, also while a collective blocks the main one."""
    _log.error("%s: leaving with code=%d", why, code)
    logging.shutdown()
    os._exit(code)


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
