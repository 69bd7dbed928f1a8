"""A MiniSGLang object on an API server, and what the operator makes of it."""

import json
from collections.abc import Callable
from typing import Any

from tests.cluster.kubectl import Kubectl
from tests.cluster.msgl import Msgl
from tests.support import wait_until

KINDS = (
    "deployment,statefulset,service,networkpolicy,poddisruptionbudget,controllerrevision,ingress"
)
OURS = "app.kubernetes.io/managed-by=minisgl-operator"


class Object(Msgl):
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
        super().__init__(kubectl, namespace, name)
        self._step = step

    def apply(self, **spec: Any) -> None:
        super().apply(**{"model": {"uri": "pvc://models/m"}, "engine": {"device": "cpu"}} | spec)

    def wait(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Until `condition` holds; the failure shows the object's status."""

        def holds() -> bool:
            self._step()
            return condition()

        wait_until(holds, seconds, lambda: json.dumps(self.status, indent=1))

    def wait_observed(self) -> None:
        def observed() -> bool:
            found = self.get()
            seen = found.get("status", {}).get("observedGeneration")
            return bool(seen == found["metadata"]["generation"])

        self.wait(observed)

    def group(self, index: int) -> dict[str, Any]:
        """A group as the status shows it; empty if it does not."""
        return next((g for g in self.status.get("groups", ()) if g["index"] == index), {})

    def children(self, kinds: str = f"{KINDS},secret") -> dict[str, dict[str, Any]]:
        found = self.get(kinds, "-l", OURS)
        return {f"{one['kind']}/{one['metadata']['name']}": one for one in found["items"]}

    def sets(self) -> dict[str, dict[str, Any]]:
        """The StatefulSets of its groups by name, those on their way out included."""
        found = self.children("statefulset")
        return {key.removeprefix("StatefulSet/"): one for key, one in found.items()}

    def uids(self) -> dict[str, str]:
        return {key: one["metadata"]["uid"] for key, one in self.children().items()}

    def delete_child(self, key: str) -> None:
        self.ask("delete", key, "--wait=false")

    def wait_children(self, *keys: str) -> None:
        wait_until(
            lambda: set(keys) <= set(self.children()), 30, lambda: str(self.children().keys())
        )
