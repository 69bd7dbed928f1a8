"""A Redis of one's own for tests, which can be killed, frozen, restarted and filled."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

import redis

from tests.support import wait_until

PASSWORD = "secret"


def free_port() -> int:
    """Below the ephemeral range: a client that redials there could connect to itself."""
    for port in range(20000 + os.getpid() % 5000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


class RedisServer:
    """`redis-server` (or VALKEY_SERVER) with a password and an append-only file, as a context."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it (again, with what its file holds), and wait until it answers."""
        program = os.environ.get("VALKEY_SERVER", "redis-server")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program, "--port", str(self.port), "--bind", "127.0.0.1", "--requirepass",
                    PASSWORD, "--appendonly", "yes", "--save", "", "--dir", str(self._folder),
                    "--maxmemory-policy", "noeviction",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        wait_until(self._answers, 20, lambda: (self._folder / "log").read_text()[-2000:])

    def client(self) -> redis.Redis:
        """A client of the test's own."""
        return redis.Redis(port=self.port, password=PASSWORD, protocol=2)

    def send_signal(self, number: int) -> None:
        """SIGSTOP freezes it, SIGCONT lets it go on, SIGKILL ends it."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)
