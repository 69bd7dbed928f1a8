"""What a worker shows to the kubelet: files, because a probe must not start a Python each time.

`live` holds whole seconds since the machine's boot, as in /proc/uptime, of the last turn of the
worker's own loop; it depends on nothing else, neither Redis nor a peer. `ready` exists exactly
while the worker serves. With several ranks in one pod each has its own: `live.3`, `ready.3`.

    sh -c 'read up _ < /proc/uptime; [ $((${up%.*} - $(cat DIR/live))) -lt 60 ]'
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from minisgl.config import UsageError
from minisgl.lifecycle import boot_clock

LIVE_SECONDS = 1

_log = logging.getLogger(__name__)


class Health:
    """The files of one worker in `directory`; nothing at all without one."""

    def __init__(self, directory: str | None, name: str = "") -> None:
        """Raises `UsageError` if the directory cannot be written."""
        self._live = self._ready = None
        self._written = 0
        self._is_ready = False
        self._fails = False
        if directory is None:
            return
        suffix = f".{name}" if name else ""
        self._live = Path(directory) / f"live{suffix}"
        self._ready = Path(directory) / f"ready{suffix}"
        try:
            # A container that is restarted in place finds what the one before it left.
            self._ready.unlink(missing_ok=True)
            self._write_turn()
        except OSError as error:
            raise UsageError(
                f"--health-dir {directory!r} cannot be written: {error.strerror or error}"
            ) from None

    def turn(self) -> None:
        """The worker's loop turns. A disk that takes nothing is the probe's business, not its."""
        self._try(self._write_turn)

    def show_ready(self, ready: bool) -> None:
        """Whether the worker serves now."""
        if self._ready is not None and ready != self._is_ready:
            self._try(lambda: self._write_ready(ready))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._fails = False
        except OSError as error:
            if not self._fails:
                _log.error("the files of the probes cannot be written: %s", error)
            self._fails = True

    def _write_turn(self) -> None:
        if self._live is None:
            return
        now = int(boot_clock())
        if now - self._written >= LIVE_SECONDS:
            # By renaming: a probe that reads in between must not find an empty file.
            new = self._live.with_name(f".{self._live.name}")
            new.write_text(f"{now}\n")
            os.replace(new, self._live)
            self._written = now

    def _write_ready(self, ready: bool) -> None:
        assert self._ready is not None
        if ready:
            self._ready.touch()
        else:
            self._ready.unlink(missing_ok=True)
        self._is_ready = ready
