"""Two objects that have children of every kind between them.

Nobody but the operator acts on what it makes; the test says that a download is done.
"""

from tests.cluster.apiserver import ApiServer
from tests.operator.objects import OURS, Object

MODEL = {
    "uri": "hf://org/model",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "cache": {"persistentVolumeClaim": {"claimName": "models"}},
}
ROUTE = {
    "model": MODEL,
    "replicas": 2,
    "gateway": {"replicas": 2},
    "redis": {"managed": {"storage": {"size": "1Gi"}}},
    "httpRoute": {"parentRefs": [{"name": "public"}]},
}
INGRESS = {"replicas": 2, "ingress": {"host": "llm.example.com"}}


class Pair:
    """Two objects of one namespace that have all kinds of children between them."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self.api, self.namespace = api, namespace
        claim = {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": namespace},
            "spec": {
                "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}},
            },
        }  # fmt: skip
        api.kubectl.apply(claim)
        self.route = Object(api.kubectl, namespace, "route")
        self.edge = Object(api.kubectl, namespace, "edge")
        self.route.apply(**ROUTE)
        self.edge.apply(**INGRESS)
        self.edge.wait_children("StatefulSet/edge-g0-1", "StatefulSet/edge-g1-1")
        self.route.wait(lambda: bool(self.of("Job")))
        self.finish_download()
        self.route.wait_children("StatefulSet/route-g0-1", "StatefulSet/route-g1-1")
        for one in (self.route, self.edge):
            # A status is written at most once a second: the first one knows of no group yet.
            one.wait(lambda one=one: len(one.status.get("groups", [])) == 2)  # type: ignore[misc]
            one.wait_observed()

    def of(self, kind: str) -> dict[str, str]:
        """UIDs of the children of a kind by name, of those that nobody deletes."""
        items = self.api.kubectl.get(kind, "-n", self.namespace, "-l", OURS)["items"]
        found = (one["metadata"] for one in items)
        return {m["name"]: m["uid"] for m in found if "deletionTimestamp" not in m}

    def finish_download(self) -> None:
        for name in self.of("Job"):
            now = "2026-01-01T00:00:00Z"
            told = [
                {"type": kind, "status": "True", "lastTransitionTime": now}
                for kind in ("SuccessCriteriaMet", "Complete")
            ]
            times = {"startTime": now, "completionTime": now}
            self.api.kubectl.set_status(
                "job", name, self.namespace, conditions=told, succeeded=1, **times
            )

    def delete_all(self, kind: str) -> None:
        """Delete all children of a kind."""
        where = (kind, "-n", self.namespace, "-l", OURS)
        self.api.kubectl("delete", *where, "--wait=false")
        if kind == "PersistentVolumeClaim":  # a controller keeps it while pods use it
            for one in self.api.kubectl.get(*where)["items"]:
                self.api.kubectl(
                    "patch", kind, one["metadata"]["name"], "-n", self.namespace, "--type=json",
                    '--patch=[{"op": "remove", "path": "/metadata/finalizers"}]',
                )  # fmt: skip
