"""The product on a cluster: the chart's operator, and objects with their children and endpoints."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.images import ROOT
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.load import Endpoint
from tests.cluster.msgl import GROUP, Manifest, Msgl

CHART = ROOT / "helm" / "minisglang"
SYSTEM = "minisglang-system"
NAMESPACE = "llm"
RELEASE = "minisglang"
OPERATOR = f"app.kubernetes.io/name=minisglang-operator,app.kubernetes.io/instance={RELEASE}"
"""Selects the operator's pods."""
COMPONENT = "app.kubernetes.io/component"
READY_SECONDS = 180.0
STEADY_SECONDS = 3.0
TINY = "pvc://models/tiny"


def on_node(name: str) -> Manifest:
    """A pod template that keeps pods on one node."""
    return {"spec": {"nodeSelector": {"kubernetes.io/hostname": name}}}


class Seen:
    """What an object's conditions said while a context lasts: (type, status, reason) each."""

    def __init__(self, served: "Served") -> None:
        self._served = served
        self.conditions: set[tuple[str, str, str]] = set()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            status = json.loads(line)["object"].get("status", {})
            self.conditions |= {
                (c["type"], c["status"], c["reason"]) for c in status.get("conditions", ())
            }

    def __enter__(self) -> "Seen":
        path = f"/apis/{GROUP}/v1alpha1/namespaces/{NAMESPACE}/minisglangs"
        query = f"watch=1&fieldSelector=metadata.name={self._served.name}"
        self._process = subprocess.Popen(
            ["kubectl", "get", "--raw", f"{path}?{query}"],
            env=self._served.kubectl.env, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._thread.join()


class Operator:
    """The chart's release."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl

    def helm(self, *args: str) -> str:
        """What `helm ARGS` prints."""
        done = subprocess.run(
            ["helm", *args, "--namespace", SYSTEM], env=self.kubectl.env,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"helm {' '.join(args)}: {done.stderr}{done.stdout}"
        return done.stdout

    def install(self, *sets: str) -> None:
        """Install or upgrade, with these values alone; until the operator's pod is ready."""
        # Without any value Helm takes those of the release before.
        flags = ["--reset-values", *(word for one in sets for word in ("--set", one))]
        self.helm("upgrade", "--install", RELEASE, str(CHART), "--create-namespace", *flags)
        self.wait()

    def wait(self) -> None:
        """Until the operator's Deployment is as it should be, and no older pod acts any more."""
        where = (f"deployment/{RELEASE}", f"--namespace={SYSTEM}")
        self.kubectl("rollout", "status", *where, "--timeout=120s", seconds=130)
        wanted = int(self.kubectl.get(*where)["spec"]["replicas"])
        self.kubectl.wait_for(
            "older operators are gone", lambda: len(self.pods()) == wanted, 60, "pods -A"
        )

    def scale(self, replicas: int) -> None:
        """Stop the operator (0), or start it again, and wait for that."""
        where = (f"deployment/{RELEASE}", f"--namespace={SYSTEM}")
        self.kubectl("scale", *where, f"--replicas={replicas}")
        if replicas:
            self.wait()
        else:
            self.kubectl.wait_for("no operator is left", lambda: not self.pods(), 60, "pods -A")

    def pods(self) -> list[Manifest]:
        """The operator's pods, those on their way out too."""
        where = (f"--namespace={SYSTEM}", f"--selector={OPERATOR}")
        found: list[Manifest] = self.kubectl.get("pods", *where)["items"]
        return found


class Served(Msgl):
    """One object, and what belongs to it.

    Args:
        ingress: the URL of the ingress that leads to it.
    """

    def __init__(self, kubectl: Kubectl, name: str, ingress: str) -> None:
        super().__init__(kubectl, NAMESPACE, name)
        self.ingress = ingress

    def watching(self) -> Seen:
        """A context that notes what the conditions say meanwhile."""
        return Seen(self)

    def is_settled(self) -> bool:
        """Ready, nothing changes, nothing is wrong, and all that is told of this generation."""
        found = self.get()
        status = found.get("status", {})
        held = {c["type"]: c["status"] for c in status.get("conditions", ())}
        wanted = {"Ready": "True", "Progressing": "False", "Degraded": "False"}
        return (
            status.get("observedGeneration") == found["metadata"]["generation"]
            and held.items() >= wanted.items()
        )

    def settle(self, seconds: float = READY_SECONDS) -> None:
        """Until `is_settled`, and for longer than what has just happened needs to be seen."""
        since: float | None = None

        def steadily() -> bool:
            nonlocal since
            if not self.is_settled():
                since = None
            elif since is None:
                since = time.monotonic()
            return since is not None and time.monotonic() - since > STEADY_SECONDS

        self.wait("the object is as it is wanted", steadily, seconds)

    def wait(
        self, what: str, condition: Callable[[], bool], seconds: float = READY_SECONDS
    ) -> None:
        """Until `condition` holds; a failure shows the object's conditions and pods."""
        try:
            self.kubectl.wait_for(what, condition, seconds, f"pods --namespace={NAMESPACE}")
        except AssertionError as error:
            lines = [
                f"{c['type']}={c['status']} {c['reason']}: {c['message']}"
                for c in self.status.get("conditions", ())
            ]
            raise AssertionError("\n".join([str(error), *lines, self.logs()])) from None

    def logs(self) -> str:
        """The last lines of the operator and of the object's pods."""
        parts = []
        for namespace, selector in (
            (SYSTEM, OPERATOR),
            (NAMESPACE, f"app.kubernetes.io/instance={self.name}"),
        ):
            try:
                parts.append(
                    self.kubectl(
                        "logs", f"--namespace={namespace}", f"--selector={selector}", "--prefix",
                        "--tail=6", "--max-log-requests=40", "--all-containers",
                    )
                )  # fmt: skip
            except (KubectlError, subprocess.TimeoutExpired) as error:
                parts.append(str(error))
        return "\n".join(parts)[-6000:]

    def pods(self, role: str = "", group: int | None = None) -> list[Manifest]:
        """Its pods that are not on their way out, by name."""
        wanted = [f"app.kubernetes.io/instance={self.name}"]
        wanted += [f"{COMPONENT}={role}"] if role else []
        wanted += [f"{GROUP}/group={group}"] if group is not None else []
        items = self.get("pods", f"--selector={','.join(wanted)}")["items"]
        kept = [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]
        return sorted(kept, key=lambda pod: str(pod["metadata"]["name"]))

    def uids(self, role: str = "") -> set[str]:
        """Which pods these are: another one of the same name is another."""
        return {pod["metadata"]["uid"] for pod in self.pods(role)}

    def lives(self) -> set[tuple[int, int]]:
        """Index and epoch of each group."""
        return {(group["index"], group["epoch"]) for group in self.status["groups"]}

    def endpoint(self, *keys: str) -> Endpoint:
        """Behind the ingress, by its host name."""
        return Endpoint(self.ingress, f"{self.name}.example.com", self.name, keys)

    def processes(self, pod: Manifest, container: str) -> list[int]:
        """The processes of a running container, as this machine counts them, oldest first."""
        uid = pod["metadata"]["uid"]
        (status,) = (s for s in pod["status"]["containerStatuses"] if s["name"] == container)
        identity = status["containerID"].rpartition("/")[2]
        found = []
        for path in Path("/proc").glob("[0-9]*/cgroup"):
            try:
                text = path.read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if uid in text and identity in text:
                found.append(int(path.parent.name))
        return sorted(found)

    def kill(self, pod: Manifest, container: str) -> None:
        """SIGKILL to all processes of a container."""
        for pid in self.processes(pod, container):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def delete(self) -> None:
        """Its pods end while the next test begins."""
        self.ask("delete", "msgl", self.name, "--ignore-not-found", "--wait=false")

    def wait_gone(self) -> None:
        """Until nothing of it is left."""
        self.kubectl.wait_for(
            f"nothing of {self.name} is left",
            lambda: not self._left(),
            120,
            f"all,msgl --namespace={NAMESPACE}",
        )

    def _left(self) -> list[Manifest]:
        kinds = "pods,statefulsets,deployments,services,controllerrevisions"
        selector = f"--selector=app.kubernetes.io/instance={self.name}"
        found: list[Manifest] = self.get(kinds, selector)["items"]
        return found


class Product:
    """A cluster with the chart installed and a namespace that has the models."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.kubectl = cluster, cluster.kubectl
        self.operator = Operator(cluster.kubectl)
        level = {"pod-security.kubernetes.io/enforce": "privileged"}
        metadata = {"name": NAMESPACE, "labels": level}
        self.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        cluster.claim_models(NAMESPACE)
        self.operator.install()

    def serve(self, name: str, **spec: Any) -> Served:
        """Apply an object of that name, on the CPU, with the tiny model unless said otherwise."""
        served = Served(self.kubectl, name, self.cluster.ingress_of(1))
        served.apply(**on_cpu(name, **spec))
        return served


def on_cpu(name: str, **spec: Any) -> Manifest:
    """The spec of an object that this machine can run; `spec` replaces whole fields."""
    return {
        "model": {"uri": TINY, "servedName": name},
        "engine": {
            "device": "cpu", "dtype": "float32",
            "extraArgs": ["--num-pages=8192"],
        },
        "failurePolicy": {"heartbeatTimeoutSeconds": 8, "backoffBaseSeconds": 5},
        "ranks": {
            "terminationGracePeriodSeconds": 20,
            "podTemplate": {
                "spec": {"containers": [{"name": "rank", "env": [
                    {"name": "OMP_NUM_THREADS", "value": "1"}]}]}
            },
        },
        "gateway": {"terminationGracePeriodSeconds": 90},
        "ingress": {"host": f"{name}.example.com", "className": "traefik"},
        **spec,
    }  # fmt: skip
