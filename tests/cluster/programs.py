"""The programs of the test cluster: where they lie, how they run, how they end."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        detached: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.argv = list(argv)
        self.name = Path(argv[0]).name
        self.log = log
        self._detached = detached
        self._env = {**os.environ, **(env or {})}
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
                env=self._env,
                start_new_session=self._detached,
            )

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
