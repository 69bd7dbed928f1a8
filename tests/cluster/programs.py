"""The programs of the test cluster: where they lie, how they run, how they end."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support import is_running, wait_until

BUILD = Path(__file__).with_name("build_tools.sh")
API_SERVER = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
"""What the API server alone takes; parts etcd and k8s of the build."""


class Unavailable(Exception):
    """This machine cannot run what was asked for; the text says why and what to do."""


def tools_dir() -> Path:
    """`CLUSTER_TOOLS`, or else the folder in the user's cache that `make cluster-tools` fills."""
    given = os.environ.get("CLUSTER_TOOLS")
    if given:
        return Path(given).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "minisgl" / "cluster-tools"


def find(*names: str) -> dict[str, str]:
    """The path of each program; raises `Unavailable` if one has not been built."""
    folder = tools_dir()
    missing = [name for name in names if not os.access(folder / name, os.X_OK)]
    if missing:
        way = "run `make cluster-tools`" if shutil.which("go") else "install Go 1.26 and run it"
        raise Unavailable(
            f"{folder} has no {', '.join(missing)}: {way}, or set CLUSTER_TOOLS to a folder of them"
        )
    return {name: str(folder / name) for name in names}


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on, each another one."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class Program:
    """A long-running program with a log, which can be killed and started again.

    It ends with the process that started it, also when that is killed, unless it is `detached`.
    The starting thread must then live on: the kernel watches the thread. `record` is a file that
    keeps the process's identity, for `end_recorded`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        detached: bool = False,
        record: Path | None = None,
    ) -> None:
        self.argv = list(argv)
        self.name = Path(argv[0]).name
        self.log = log
        self._detached = detached
        self._record = record
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; only while it runs."""
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process.pid

    def start(self) -> None:
        """Start it (again)."""
        guard = [] if self._detached else ["setpriv", "--pdeathsig", "KILL"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                guard + self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=self._detached,
            )
        if self._record is not None:
            with self._record.open("a") as record:
                record.write(f"{self.pid} {_birth(self.pid)}\n")

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.poll() is None

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal and wait for its end; SIGKILL follows after 10 seconds."""
        if self._process is None or not self.runs():
            return
        self._process.send_signal(number)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def tail(self, count: int = 2000) -> str:
        """The end of its log."""
        return f"{self.name}: {self.log.read_text(errors='replace')[-count:]}"


def recorded(record: Path) -> list[int]:
    """The processes in a file of `Program` that still run, the oldest first."""
    if not record.exists():
        return []
    lines = (line.split() for line in record.read_text().splitlines())
    return [int(pid) for pid, birth in lines if _birth(int(pid)) == birth]


def end_recorded(record: Path) -> None:
    """Kill what a file of `Program` names, the youngest first, and wait for its end."""
    for pid in reversed(recorded(record)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    limit = time.monotonic() + 20
    while any(is_running(pid) for pid in recorded(record)):
        if time.monotonic() > limit:
            raise AssertionError(f"these do not end: {recorded(record)}")
        time.sleep(0.05)


def child(pid: int) -> int:
    """The first child of a process that has one thread; 0 if it has none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else 0


def await_program(pid: int, name: str) -> None:
    """Wait until a process has become a program: `unshare` is itself until it is done."""
    comm = Path(f"/proc/{pid}/comm")
    wait_until(lambda: comm.read_text() == f"{name}\n", 10, lambda: f"runs {comm.read_text()}")


def _birth(pid: int) -> str:
    """When a process began, in clock ticks: with its id, its identity. Empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
