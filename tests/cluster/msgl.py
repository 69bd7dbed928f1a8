"""An object of kind MiniSGLang, as tests write and read it on an API server."""

import json
from typing import Any

from tests.cluster.kubectl import Kubectl

GROUP = "minisglang.io"
Manifest = dict[str, Any]


class Msgl:
    """One object, and whatever else is in its namespace."""

    def __init__(self, kubectl: Kubectl, namespace: str, name: str) -> None:
        self.kubectl, self.namespace, self.name = kubectl, namespace, name

    def apply(self, **spec: Any) -> None:
        """Create it, or replace what this test applied before."""
        metadata = {"name": self.name, "namespace": self.namespace}
        kind = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "MiniSGLang"}
        self.kubectl.apply({**kind, "metadata": metadata, "spec": spec})

    def patch(self, spec: Manifest) -> None:
        """Merge into the spec."""
        text = json.dumps({"spec": spec})
        self.ask("patch", "msgl", self.name, "--type=merge", f"--patch={text}")

    def ask(self, *args: str, seconds: float = 60) -> str:
        """`kubectl ARGS` in its namespace."""
        return self.kubectl(*args, f"--namespace={self.namespace}", seconds=seconds)

    def get(self, *args: str) -> Any:
        """`kubectl get ARGS` in its namespace, read; of nothing: the object."""
        return self.kubectl.get(*(args or ("msgl", self.name)), f"--namespace={self.namespace}")

    @property
    def status(self) -> Manifest:
        """Empty if nothing was told yet."""
        found: Manifest = self.get().get("status", {})
        return found

    def condition(self, kind: str) -> Manifest:
        """A condition, or an empty one."""
        held = (c for c in self.status.get("conditions", ()) if c["type"] == kind)
        return next(held, {"status": "", "reason": "", "message": ""})
