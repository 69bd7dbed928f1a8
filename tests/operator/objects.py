"""A MiniSGLang object on an API server, and what the operator makes of it."""

import json
from collections.abc import Callable
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.support import wait_until

KINDS = (
    "deployment,statefulset,service,networkpolicy,poddisruptionbudget,controllerrevision,ingress"
)
OURS = "app.kubernetes.io/managed-by=minisgl-operator"


def manifest(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "minisglang.io/v1alpha1",
        "kind": "MiniSGLang",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "pvc://models/m"}, "engine": {"device": "cpu"}} | spec,
    }


class Object:
    """One object and its children.

    Args:
        step: called between two looks of everything that waits, such as `Nodes.step`.
    """

    def __init__(
        self,
        kubectl: Kubectl,
        namespace: str,
        name: str = "qwen",
        step: Callable[[], None] = lambda: None,
    ) -> None:
        self.kubectl, self.namespace, self.name = kubectl, namespace, name
        self._step = step

    def apply(self, **spec: Any) -> None:
        self.kubectl.apply(manifest(self.name, self.namespace, **spec))

    def wait(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Until `condition` holds; the failure shows the object's status."""

        def holds() -> bool:
            self._step()
            return condition()

        wait_until(holds, seconds, lambda: json.dumps(self.get().get("status"), indent=1))

    def wait_observed(self) -> None:
        def observed() -> bool:
            found = self.get()
            seen = found.get("status", {}).get("observedGeneration")
            return bool(seen == found["metadata"]["generation"])

        self.wait(observed)

    def get(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.get("minisglang", self.name, "-n", self.namespace)
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get().get("status", {})
        return found

    def group(self, index: int) -> dict[str, Any]:
        """A group as the status shows it; empty if it does not."""
        return next((g for g in self.status().get("groups", ()) if g["index"] == index), {})

    def condition(self, type: str) -> dict[str, str]:
        conditions = self.status().get("conditions", [])
        return next((c for c in conditions if c["type"] == type), {})

    def wait_told(self, type: str) -> None:
        """Until the operator has tried what this condition speaks of."""
        self.wait(lambda: "connecting" in self.condition(type).get("message", ""))
        self.wait_observed()

    def children(self, kinds: str = f"{KINDS},secret") -> dict[str, dict[str, Any]]:
        found = self.kubectl.get(kinds, "-n", self.namespace, "-l", OURS)
        return {f"{one['kind']}/{one['metadata']['name']}": one for one in found["items"]}

    def sets(self) -> dict[str, dict[str, Any]]:
        """The StatefulSets of its groups by name, those on their way out included."""
        found = self.children("statefulset")
        return {key.removeprefix("StatefulSet/"): one for key, one in found.items()}

    def uids(self) -> dict[str, str]:
        return {key: one["metadata"]["uid"] for key, one in self.children().items()}

    def delete_child(self, key: str) -> None:
        self.kubectl("delete", key, "-n", self.namespace, "--wait=false")

    def wait_children(self, *keys: str) -> None:
        wait_until(
            lambda: set(keys) <= set(self.children()), 30, lambda: str(self.children().keys())
        )
