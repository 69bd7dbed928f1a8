"""A server of one's own: start `minisgl serve` in a process of its own, wait for it, stop it."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO

import httpx

from minisgl.config import StartError
from minisgl.lifecycle import PARENT_FD_ENV

STOP_SECONDS = 30.0


def choose_port(preferred: int = 0) -> int:
    """`preferred`, or a free port if something listens there."""
    with socket.socket() as probe:
        # As the server does: a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`minisgl serve MODEL` on a free port of this machine, as a context.

    Its output is copied to `echo` until it is ready. Raises `StartError` if it ends, or is not
    ready within `start_seconds`.
    """

    def __init__(
        self,
        model: str,
        arguments: Sequence[str] = (),
        *,
        port: int = 0,
        start_seconds: float = 600.0,
        echo: IO[bytes] | None = None,
    ) -> None:
        self.port = choose_port(port)
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "minisgl", "serve", model, "--port", str(self.port)]
        self.command += arguments
        self.start_seconds = start_seconds
        self._echo = echo
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed at exit)
        self._leash = -1
        self._shown = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the launcher, the parent of all others."""
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        """All that it has printed."""
        return self._read_log(0).decode(errors="replace")

    def _read_log(self, at: int) -> bytes:
        # pread: the server writes at the file offset that it shares with this process.
        return os.pread(self._log.fileno(), 1 << 24, at)

    def __enter__(self) -> "Server":
        # The server ends when nobody holds the other end of this pipe any more: also after our
        # own kill -9.
        theirs, self._leash = os.pipe()
        try:
            # Its own session: a Ctrl-C in this terminal reaches us alone, and we stop it in order.
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(theirs,),
                env=os.environ | {PARENT_FD_ENV: str(theirs)},
            )
        finally:
            os.close(theirs)
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _show_log(self) -> None:
        text = self._read_log(self._shown)
        self._shown += len(text)
        if self._echo is not None:
            self._echo.write(text)
            self._echo.flush()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + self.start_seconds
        while True:
            code = process.poll()
            self._show_log()
            if code is not None:
                last = self.log.strip().splitlines()[-1:] or ["it printed nothing"]
                raise StartError(f"the server ended with code {code}: {last[0]}")
            if time.monotonic() > limit:
                raise StartError(f"the server was not ready after {self.start_seconds:.0f} seconds")
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    self._show_log()
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def stop(self, how: int = signal.SIGINT) -> int:
        """End it as Ctrl-C does, by force if that takes too long; returns its exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(how)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        os.close(self._leash)
        self._log.close()
