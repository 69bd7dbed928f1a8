"""A Redis of one's own for tests, which can be killed, frozen, restarted and filled."""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from tests.support import wait_until

PASSWORD = "secret"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"


def free_port(first: int | None = None) -> int:
    """Below the ephemeral range: a client that redials there could connect to itself.

    Processes that look at the same time, such as pytest's workers, have neighbouring numbers: they
    begin far enough from each other.
    """
    for port in range(first or 20000 + os.getpid() * 61 % 5000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def documented_rules(service: str) -> list[str]:
    """The rules of the ACL user, as the page about reliability gives them; its password: first."""
    line = re.search(r"^ACL SETUSER minisgl (.*)$", PAGE.read_text(), re.MULTILINE)
    assert line is not None
    return line[1].replace("SERVICE", service).replace(">PASSWORD", ">first").split()


def guarded_blocks() -> list[str]:
    """What the page about reliability says to type for a guarded Redis, block by block."""
    section = PAGE.read_text().partition("\n## A guarded Redis\n")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


class RedisServer:
    """`redis-server` (or VALKEY_SERVER) with a password and an append-only file, as a context.

    It speaks TLS alone if it gets a folder with `ca.crt`, `redis.crt` and `redis.key`.
    """

    def __init__(self, certificates: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"
        self.password = PASSWORD
        """What `client` gives: a test that changes it says so here."""
        self._certificates = certificates
        self._listen = ["--port", str(self.port)]
        if certificates is not None:
            self._listen = [
                "--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no",
                "--tls-ca-cert-file", str(certificates / "ca.crt"),
                "--tls-cert-file", str(certificates / "redis.crt"),
                "--tls-key-file", str(certificates / "redis.key"),
            ]  # fmt: skip
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        """Its data and its log; gone at the end."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it (again, with what its file holds), and wait until it answers."""
        program = os.environ.get("VALKEY_SERVER", "redis-server")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    program, *self._listen, "--bind", "127.0.0.1", "--requirepass",
                    self.password, "--appendonly", "yes", "--save", "", "--dir",
                    str(self.folder), "--maxmemory-policy", "noeviction",
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        wait_until(self.answers, 20, lambda: (self.folder / "log").read_text()[-2000:])

    def client(self) -> redis.Redis:
        """A client of the test's own."""
        tls: dict[str, Any] = {}
        if self._certificates is not None:
            tls = {"ssl": True, "ssl_ca_certs": str(self._certificates / "ca.crt")}
        return redis.Redis(
            host="127.0.0.1", port=self.port, password=self.password, protocol=2, **tls
        )

    def send_signal(self, number: int) -> None:
        """SIGSTOP freezes it, SIGCONT lets it go on, SIGKILL ends it."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def answers(self) -> bool:
        """Whether it is there."""
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
        shutil.rmtree(self.folder, ignore_errors=True)
