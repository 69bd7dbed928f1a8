"""What every process of the service shares: signals, readiness, its parent and errors.

A process that the launcher started finds two inherited pipes by their environment variables. It
writes one line into the first when it is ready. The second is never written: its write end is held
by the launcher alone, so end-of-file means that the launcher is gone, however it went. The process
then ends by itself, also when its main loop is stuck.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from minisgl.config import StartError, UsageError
from minisgl.rundir import RunDirectory

READY_FD_ENV = "MINISGL_READY_FD"
PARENT_FD_ENV = "MINISGL_PARENT_FD"
ORPHAN_SECONDS = 2.0
"""What a process whose launcher is gone gets to end by itself."""


def boot_clock() -> float:
    """Seconds that go on while the process, or the machine, is frozen."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Lifecycle:
    """The life of this process. Made once, at its very start, in the main thread.

    Once `handle_signals` was called, SIGTERM and SIGINT set `stop`, and a second SIGINT ends the
    process at once. Until then they do what they do to any program.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.orphan = threading.Event()
        self._directory: RunDirectory | None = None
        self._ready_fd = _inherited_fd(READY_FD_ENV)
        parent_fd = _inherited_fd(PARENT_FD_ENV)
        if parent_fd is not None:
            threading.Thread(
                target=self._watch_parent, args=(parent_fd,), name="parent-watch", daemon=True
            ).start()

    def handle_signals(self) -> None:
        """From now on SIGTERM and SIGINT ask for an orderly end, by `stop`."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        if self.orphan.is_set():
            self.stop.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _watch_parent(self, fd: int) -> None:
        while os.read(fd, 64):
            pass
        self.orphan.set()
        # Not while SIGTERM would still kill: who dies without a word cannot remove the directory.
        # To the main thread, so that what it waits for is interrupted.
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        # The main loop is stuck, or drains for a client that nobody serves any more.
        if self._directory is not None:
            self._directory.release()
        os._exit(1)

    def ready(self, word: str = "ready") -> None:
        """Tell the launcher, if there is one, that this process does its work; once."""
        fd, self._ready_fd = self._ready_fd, None
        if fd is None:
            return
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone: the watch ends this
            os.write(fd, word.encode() + b"\n")
        os.close(fd)

    @contextlib.contextmanager
    def directory(self, bus: str) -> Iterator[None]:
        """Hold a share of the launcher's directory, where `bus` is `ipc://DIR` of a launcher."""
        if bus.startswith("ipc://"):
            self._directory = RunDirectory.join(Path(bus.removeprefix("ipc://")))
        try:
            yield
        finally:
            if self._directory is not None:
                self._directory.release(wait=ORPHAN_SECONDS / 2 if self.orphan.is_set() else 0)


def _inherited_fd(name: str) -> int | None:
    """The pipe that the launcher left under `name`, which our own children must not see."""
    value = os.environ.pop(name, None)
    if value is None:
        return None
    try:
        fd = int(value)
        os.set_inheritable(fd, False)
    except (ValueError, OSError, OverflowError):
        raise UsageError(
            f"{name} is set by the launcher alone and names no open pipe here: unset it"
        ) from None
    return fd


def report_errors(name: str, body: Callable[[], int]) -> int:
    """Run `body`; turn what it raises into the exit code and what the user reads on stderr.

    `UsageError`: one line, 2. `StartError`: one line, 1. Anything else: a traceback, 1.
    """
    try:
        return body()
    except (UsageError, StartError) as error:
        report(name, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has left: `minisgl ... | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        traceback.print_exc()
        report(name, f"{type(error).__name__}: {error}")
        return 1


def end_process(code: int) -> NoReturn:
    """End this process at once, when all that it has opened is closed.

    Python would take every module apart first, which for torch or a tokenizer's libraries lasts for
    one to three seconds, in which a restarted worker could serve again.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has left
            stream.flush()
    os._exit(code)


def report(name: str, message: str) -> None:
    """One line for the user on stderr, whatever the message holds; written at once and whole."""
    line = " ".join(message.split())
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{name}: {line}\n")
        sys.stderr.flush()
