"""The operator as a process on a real API server, with the rights that its chart gives it."""

import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import yaml

from tests.cluster.apiserver import ApiServer, Request
from tests.cluster.programs import find, free_ports
from tests.support import wait_until

CHART = Path(__file__).resolve().parents[2] / "helm" / "minisglang"
RELEASE_NAMESPACE = "minisglang-system"
ACCOUNT = "release-minisglang"
QUIET_SECONDS = 12.0
PROGRAM = "import sys; from minisgl_operator.main import main; sys.exit(main())"
IMAGE = "registry.example/engine-{device}:1"


def install_chart(api: ApiServer, *sets: str) -> None:
    """`helm upgrade --install` of the release that every test of this tier shares; returns when
    objects can be made."""
    helm = find("helm")["helm"]
    flags = [word for one in sets for word in ("--set", one)]
    done = subprocess.run(
        # Without values of its own an upgrade would keep those of another test.
        [helm, "upgrade", "--install", "--reset-values", "release", str(CHART),
         f"--namespace={RELEASE_NAMESPACE}", "--create-namespace", *flags],
        env=api.kubectl.env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    api.kubectl("wait", "--for=condition=Established", "crd/minisglangs.minisglang.io")


def requests_of_operator(api: ApiServer) -> list[Request]:
    """All that it asked of the server so far, watches that go on left out."""
    user = f"system:serviceaccount:{RELEASE_NAMESPACE}:{ACCOUNT}"
    return [one for one in api.requests() if one.user == user]


def writes_of_operator(api: ApiServer, namespaces: Collection[str] = ()) -> list[Request]:
    """What it wrote so far (there); its Lease, which it renews all the time, left out."""
    found = (r for r in requests_of_operator(api) if r.writes and r.resource != "leases")
    return [r for r in found if not namespaces or r.namespace in namespaces]


def settle(
    api: ApiServer,
    seconds: float,
    namespaces: Collection[str] = (),
    quiet_seconds: float = QUIET_SECONDS,
) -> None:
    """Return when the operator has written nothing (there) for so long: more than a resync."""
    seen, since = -1, time.monotonic()

    def quiet() -> bool:
        nonlocal seen, since
        count = len(writes_of_operator(api, namespaces))
        if count != seen:
            seen, since = count, time.monotonic()
        time.sleep(0.5)  # the audit log may be long
        return time.monotonic() - since > quiet_seconds

    wait_until(quiet, seconds, lambda: str(writes_of_operator(api, namespaces)[-5:]))


def account_kubeconfig(api: ApiServer, folder: Path) -> Path:
    """A kubeconfig of the chart's ServiceAccount, which may do what its roles say and no more."""
    token = api.kubectl("create", "token", ACCOUNT, "-n", RELEASE_NAMESPACE).strip()
    config = yaml.safe_load(api.kubeconfig.read_text())
    (user,) = config["users"]
    user["user"] = {"token": token}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


class Operator:
    """One replica; a context that starts it and ends it."""

    def __init__(self, api: ApiServer, folder: Path, name: str = "a", image: str = IMAGE) -> None:
        self._log = folder / f"operator-{name}.log"
        (self.port,) = free_ports(1)
        config = folder / f"config-{name}.yaml"
        config.write_text(f"image: {image}\nredisImage: redis:7\n")
        self._command = [
            sys.executable, "-c", PROGRAM, "run",
            f"--config={config}", f"--port={self.port}", "--log-format=text",
        ]  # fmt: skip
        self._env = os.environ | {
            "KUBECONFIG": str(account_kubeconfig(api, folder)),
            "POD_NAMESPACE": RELEASE_NAMESPACE,
            "POD_NAME": name,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, acts: bool = True) -> None:
        """Start it; `acts`: wait until it holds the Lease and watches."""
        log = self._log.open("ab")
        seen = self.log().count("watching ")
        self._process = subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)
        log.close()
        if acts:
            wait_until(lambda: self.log().count("watching ") > seen, 60, self.log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def acts(self) -> bool:
        return "watching " in self.log()

    def ended(self) -> int | None:
        """Its exit code; None: it runs."""
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout=30)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Operator":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
