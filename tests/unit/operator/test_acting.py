"""What a task does with the API server's answers."""

from typing import Any

from minisgl_operator import api, names
from minisgl_operator.kube import Api, ApiError, Cache
from minisgl_operator.metrics import Metrics
from minisgl_operator.observed import Manifest
from minisgl_operator.reconcile import Task
from tests.unit.operator.cases import SETTINGS, UID, observe

SPEC = {"model": {"uri": "file:///m"}, "suspend": True}


class Server(Api):
    """Takes every write but deletions."""

    def __init__(self) -> None:
        self.statuses: list[Manifest] = []
        self.denied: list[str] = []

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return None

    async def create(self, manifest: Manifest) -> Manifest:
        return manifest

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        if subresource:
            self.statuses.append(manifest["status"])
        return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "9"}}

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, *, foreground: bool = False
    ) -> None:
        self.denied.append(name)
        raise ApiError(403, "Forbidden", "an admission webhook denied the request")


async def test_a_child_that_may_not_be_deleted_holds_up_no_other_and_no_status() -> None:
    server = Server()
    cache = Cache(server, [None], lambda kind, found: None)
    metadata: dict[str, Any] = {"name": "qwen", "namespace": "models", "uid": UID, "generation": 1}
    cache.put({"kind": api.KIND, "metadata": metadata, "spec": SPEC})
    for name in ("one", "two"):
        labels = names.common(observe(SPEC).obj)
        stray = {"name": name, "namespace": "models", "uid": name, "labels": labels}
        cache.put({"kind": "Service", "metadata": stray})
    task = Task("models", "qwen", server, cache, None, SETTINGS, Metrics())
    await task.look()
    await task.stop()
    assert sorted(server.denied) == ["one", "two"]
    assert len(server.statuses) == 1
