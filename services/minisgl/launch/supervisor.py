"""Processes that live and end together, given as data.

The supervisor starts them, waits until those that are waited for are ready, watches them, and ends
them in stages. It knows nothing of what they do. Each child inherits two pipes (see lifecycle.py):
one to say that it is ready, and one whose end-of-file tells it that the supervisor is gone.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from minisgl.lifecycle import PARENT_FD_ENV, READY_FD_ENV, report

QUICK_SECONDS = 3.0
"""What children get to end by themselves after one of them has failed."""
INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process to start."""

    name: str
    """For messages: `rank 0`."""
    command: tuple[str, ...]
    fds: tuple[int, ...] = ()
    """Descriptors that it inherits under the same numbers."""
    waited: bool = True
    """Whether the start waits for its ready signal."""
    stage: int = 0
    """An orderly end begins with the lowest stage; the next begins when that has ended."""
    stop_seconds: float = 10.0
    """What it gets to end by itself after SIGTERM in an orderly end."""
    quiet: bool = False
    """Whether what it writes to stdout is dropped."""


def minisgl_command(*arguments: str) -> tuple[str, ...]:
    """The command line of a `minisgl` process with the interpreter that runs now."""
    # -P: a file torch.py in the user's folder must not be imported in place of the real one.
    return (sys.executable, "-P", "-m", "minisgl", *arguments)


class Child:
    """A started process and the pipe on which it says that it is ready."""

    def __init__(self, spec: ChildSpec, parent_fd: int) -> None:
        self.spec = spec
        self.ready: str | None = None
        """The line that it wrote when it was ready."""
        self.ready_fd, write = os.pipe()
        os.set_blocking(self.ready_fd, False)
        env = dict(os.environ, **{PARENT_FD_ENV: str(parent_fd), READY_FD_ENV: str(write)})
        # Blocked, and so in the child: Ctrl-C at a terminal reaches its whole process group, but
        # it is the supervisor that ends the children, in order.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if spec.quiet else None,
                env=env,
                pass_fds=(parent_fd, write, *spec.fds),
            )
        except BaseException:
            os.close(self.ready_fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(write)

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self.process.poll()

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than it was asked to. A SIGTERM that finds it almost done,
        its handlers gone, is what it was asked for."""
        return self.code not in (None, 0, -signal.SIGTERM)

    def read_ready(self) -> None:
        """Take its ready line, once the pipe is readable."""
        with contextlib.suppress(BlockingIOError):
            line = os.read(self.ready_fd, 4096).decode(errors="replace").strip()
            if line and self.ready is None:
                self.ready = line

    def send(self, number: int) -> None:
        """Send a signal, if it still runs."""
        self.process.send_signal(number)

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.code
        if code is None or code >= 0:
            return f"{self.spec.name} ended with code {code}"
        with contextlib.suppress(ValueError):
            killed = signal.Signals(-code)
            hint = " (out of memory?)" if killed == signal.SIGKILL else ""
            return f"{self.spec.name} was ended by {killed.name}{hint}"
        return f"{self.spec.name} was ended by signal {-code}"


class Supervisor:
    """Runs children until one of them fails or the user ends them.

    With `end_with_first`, a child that ends is a failure even with code 0, and the exit code is
    then 1. Without it, the others may go on after a child has ended with 0, and the exit code is
    the first failing one's. Used once, in the main thread: it handles the signals.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[ChildSpec],
        *,
        startup_seconds: float,
        end_with_first: bool = True,
    ) -> None:
        self._name = name
        self._specs = specs
        self._startup_seconds = startup_seconds
        self._end_with_first = end_with_first
        self._children: list[Child] = []
        self._asked = 0
        self._interrupts = 0
        self._selector = selectors.DefaultSelector()

    def run(self, on_ready: Callable[[], None]) -> int:
        """Start, watch and end the children; the exit code. `on_ready` is called when all are."""
        parent_read, parent_write = os.pipe()
        with self._signals():
            try:
                for spec in self._specs:
                    child = Child(spec, parent_read)
                    self._children.append(child)
                    self._selector.register(child.ready_fd, selectors.EVENT_READ, child)
                code = self._wait_ready()
                if code is None:
                    on_ready()
                    code = self._watch()
                return code
            finally:
                self._kill()
                for child in self._children:
                    os.close(child.ready_fd)
                os.close(parent_read)
                os.close(parent_write)
                self._selector.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and the end of a child wake `_wait`."""
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._asked += number != signal.SIGCHLD
            self._interrupts += number == signal.SIGINT

        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, on_signal)
        self._selector.register(wake_read, selectors.EVENT_READ)
        try:
            yield
        finally:
            # This process ends now; a late signal must not break off what it still cleans up.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            wake_read.close()
            wake_write.close()

    def _wait(self, limit: float | None) -> None:
        """Until something happened, or `limit` seconds have passed."""
        for key, _ in self._selector.select(limit):
            if isinstance(key.data, Child):
                key.data.read_ready()
                # One line is all that it says; end-of-file would be readable for ever.
                self._selector.unregister(key.fd)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)

    def _wait_ready(self) -> int | None:
        """None once all are ready, else the exit code."""
        deadline = time.monotonic() + self._startup_seconds
        while True:
            if self._asked:
                return 0
            for child in self._children:
                if child.code is not None:
                    return self._failed_start(child)
            missing = [c.spec.name for c in self._children if c.spec.waited and c.ready is None]
            if not missing:
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                self._kill()
                report(
                    self._name,
                    f"not ready after {self._startup_seconds:g} seconds, still waiting for "
                    f"{', '.join(missing)}: see its log, or raise --startup-timeout-seconds",
                )
                return 1
            self._wait(left)

    def _failed_start(self, child: Child) -> int:
        # At once, so that the line in which the child said why is the last one on the screen.
        self._kill()
        if (child.code or 0) <= 0:  # it had no chance to say why
            report(self._name, f"{child.ending()} before it was ready")
        return 2 if child.code == 2 else 1

    def _watch(self) -> int:
        while not self._asked:
            ended = [c for c in self._children if c.code is not None]
            failed = [c for c in ended if self._end_with_first or c.code != 0]
            if failed:
                # Of several, the one that was killed: ranks end when they lose one of them.
                return self._failed(min(failed, key=lambda c: (c.code or 0) >= 0))
            if len(ended) == len(self._children):
                return 0
            self._wait(None)
        return self._stop()

    def _failed(self, child: Child) -> int:
        self._signal_and_wait(self._children, QUICK_SECONDS)
        self._kill()
        # Last, so that it is below what the others log about it.
        report(self._name, f"{child.ending()}; everything else was ended")
        code = child.code or 0
        if self._end_with_first:
            return 1
        return code if code >= 0 else 128 - code

    def _stop(self) -> int:
        """The orderly end, stage by stage; 0 if every child ended well and in time."""
        code = 0
        for stage in sorted({spec.stage for spec in self._specs}):
            children = [c for c in self._children if c.spec.stage == stage]
            later = [c for c in self._children if c.spec.stage > stage]
            limit = max(c.spec.stop_seconds for c in children)
            self._signal_and_wait(children, limit, needed=later)
            if self._interrupts > 1:
                self._kill()
                return INTERRUPTED
            for gone in later:
                if gone.failed:
                    return self._failed(gone)
            for child in children:
                if child.code is None:
                    report(self._name, f"{child.spec.name} did not end in {limit:g} s: killed")
                    code = code or 1
                elif child.failed:
                    report(self._name, child.ending())
                    code = code or (child.code if child.code > 0 else 128 - child.code)
        self._kill()
        return min(code, 1) if self._end_with_first else code

    def _signal_and_wait(
        self, children: Sequence[Child], limit: float, needed: Sequence[Child] = ()
    ) -> None:
        """SIGTERM, then wait until they have ended, for at most `limit` seconds.

        Returns earlier at a second SIGINT, and when one of `needed` has failed: without an engine a
        gateway cannot finish its streams. One that has ended well has finished what it held: then
        SIGTERM went to the whole process group.
        """
        for child in children:
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + limit
        while any(c.code is None for c in children) and self._interrupts < 2:
            left = deadline - time.monotonic()
            if left <= 0 or any(c.failed for c in needed):
                return
            self._wait(left)

    def _kill(self) -> None:
        for child in self._children:
            child.send(signal.SIGKILL)
        for child in self._children:
            child.process.wait()
