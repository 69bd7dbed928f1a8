"""Nodes of a control plane that has none: scheduler and kubelets, played one step at a time.

What they do is written to the API server as the real ones write it: bindings, statuses of pods and
nodes, Leases, and the last delete of a pod that has ended. The controllers are real.
"""

import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from tests.cluster.apiserver import ApiServer

RANKS = "app.kubernetes.io/component=rank"


@dataclass
class Node:
    """`ranks`: how many rank pods have room; `power`: whether it and its kubelet are on."""

    name: str
    ranks: int = 8
    power: bool = True


@dataclass
class Nodes:
    """The nodes that a test's pods run on; `step` lets each do what is due."""

    api: ApiServer
    namespace: str
    nodes: dict[str, Node]
    broken_images: set[str] = field(default_factory=set)
    """Containers of these end at their start, again and again."""
    missing_images: set[str] = field(default_factory=set)
    held_pods: set[str] = field(default_factory=set)
    """Pods that do not get further than Pending on their node."""
    seen: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """The rank pods at each step, by name."""

    def __post_init__(self) -> None:
        trust = ssl.create_default_context(cafile=str(self.api.pki.certificate))
        trust.load_cert_chain(self.api.pki.folder / "admin.crt", self.api.pki.folder / "admin.key")
        self._http = httpx.Client(base_url=self.api.url, verify=trust, timeout=20)

    def join(self) -> None:
        """Register all nodes, ready, with their Leases."""
        for name in self.nodes:
            self._ask("POST", "/api/v1/nodes", {"metadata": {"name": name}}, known=(409,))
            self.tell(name, "True")
            self._ask("POST", _LEASES, {"metadata": {"name": name}, "spec": {}}, known=(409,))

    def leave(self) -> None:
        """Take all nodes out of the cluster."""
        for name in self.nodes:
            self._ask("DELETE", f"/api/v1/nodes/{name}", known=(404,))
            self._ask("DELETE", f"{_LEASES}/{name}", known=(404,))
        self._http.close()

    def tell(self, name: str, ready: str) -> None:
        """What the control plane says of a node: ready `True`, or `Unknown` for one not heard."""
        condition = {"type": "Ready", "status": ready, "reason": "Test", "message": "told"}
        status = {"status": {"conditions": [condition]}}
        self._patch(f"/api/v1/nodes/{name}/status", status)

    def pods(self, selector: str = RANKS) -> dict[str, dict[str, Any]]:
        """Pods by name."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        items = self._ask("GET", path, params={"labelSelector": selector})["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def set_status(self, pod: str, **status: Any) -> None:
        """What a kubelet or scheduler says of a pod."""
        self._patch(f"{self._path(pod)}/status", {"status": status})

    def step(self) -> None:
        """Renew Leases, place pods, start them, and take away those that have ended."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        for node in self.nodes.values():
            if node.power:
                self._patch(f"{_LEASES}/{node.name}", {"spec": {"renewTime": now}})
        pods = self.pods("")
        self.seen.append({name: pod for name, pod in pods.items() if _role(pod) == "rank"})
        for name, pod in pods.items():
            at = pod["spec"].get("nodeName")
            going = "deletionTimestamp" in pod["metadata"]
            if not at:
                if not going and not pod["spec"].get("schedulingGates"):
                    self._place(pod, pods)
            elif self.nodes[at].power:
                if going:
                    body = {"gracePeriodSeconds": 0}
                    self._ask("DELETE", self._path(name), body, known=(404,))
                elif name not in self.held_pods:
                    self._run(pod)

    def _place(self, pod: dict[str, Any], pods: dict[str, dict[str, Any]]) -> None:
        name = pod["metadata"]["name"]
        ranks = [p for p in pods.values() if _role(p) == "rank"]
        for node in self.nodes.values():
            used = sum(p["spec"].get("nodeName") == node.name for p in ranks)
            free = _role(pod) != "rank" or used < node.ranks
            avoided = f'"{node.name}"' in json.dumps(pod["spec"].get("affinity", {}))
            if free and not avoided:
                target = {"kind": "Node", "name": node.name}
                body = {"metadata": {"name": name}, "target": target}
                self._ask("POST", f"{self._path(name)}/binding", body, known=(404, 409))
                pod["spec"]["nodeName"] = node.name
                return
        message = f"0/{len(self.nodes)} nodes are available: no room for ranks"
        condition = _condition("PodScheduled", "False", "Unschedulable", message)
        self._say(pod, conditions=[condition])

    def _run(self, pod: dict[str, Any]) -> None:
        (container, *_) = pod["spec"]["containers"]
        image, names = container["image"], [c["name"] for c in pod["spec"]["containers"]]
        inits = [_condition("Initialized", "True"), _condition("PodScheduled", "True")]
        if image in self.missing_images:
            waiting = {"reason": "ImagePullBackOff", "message": f"Back-off pulling {image}"}
            states = [_container(n, image, False, 0, {"waiting": waiting}) for n in names]
            self._say(pod, phase="Pending", containerStatuses=states)
        elif image in self.broken_images:
            waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
            ended = {"exitCode": 1, "reason": "Error", "message": "RuntimeError: broken image"}
            ended |= {"startedAt": _now(), "finishedAt": _now()}
            states = [
                _container(n, image, False, 1, {"waiting": waiting}, {"terminated": ended})
                for n in names
            ]
            ready = _condition("Ready", "False", "ContainersNotReady")
            self._say(pod, phase="Running", containerStatuses=states, conditions=[ready, *inits])
        else:
            running = {"running": {"startedAt": _now()}}
            states = [_container(n, image, True, 0, running) for n in names]
            ready = _condition("Ready", "True")
            self._say(pod, phase="Running", containerStatuses=states, conditions=[ready, *inits])

    def _say(self, pod: dict[str, Any], **status: Any) -> None:
        """Write a pod's status, unless it says that already."""
        held = pod.get("status", {})
        if not all(_says(held.get(key), value) for key, value in status.items()):
            self.set_status(pod["metadata"]["name"], **status)

    def _path(self, pod: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{pod}"

    def _patch(self, path: str, body: dict[str, Any]) -> None:
        kind = "application/strategic-merge-patch+json"
        answer = self._http.patch(path, json=body, headers={"Content-Type": kind})
        if answer.status_code != 404:  # it has just gone
            answer.raise_for_status()

    def _ask(
        self, method: str, path: str, body: Any = None, known: Sequence[int] = (), **more: Any
    ) -> Any:
        """`known`: refusals that are none, as of a pod that has just gone."""
        answer = self._http.request(method, path, json=body, **more)
        if answer.is_error and answer.status_code not in known:
            raise AssertionError(f"{method} {path}: {answer.text}")
        return answer.json()


_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


def _role(pod: dict[str, Any]) -> str:
    return str(pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _condition(type: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    found = {"type": type, "status": status, "reason": reason, "message": message}
    return {**found, "lastTransitionTime": _now()}


def _container(
    name: str,
    image: str,
    ready: bool,
    restarts: int,
    state: dict[str, Any],
    last: dict[str, Any] | None = None,
) -> dict[str, Any]:
    found = {"name": name, "image": image, "imageID": "", "ready": ready, "state": state}
    return {**found, "restartCount": restarts, "lastState": last or {}}


def _says(held: Any, wanted: Any) -> bool:
    """Whether a status holds what is wanted of it, times aside."""
    if isinstance(wanted, dict):
        keys = [key for key in wanted if not key.endswith(("Time", "At"))]
        return isinstance(held, dict) and all(_says(held.get(k), wanted[k]) for k in keys)
    if isinstance(wanted, list):
        return isinstance(held, list) and all(any(_says(h, w) for h in held) for w in wanted)
    return bool(held == wanted) or not (held or wanted)
