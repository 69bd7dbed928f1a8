"""H51: what the operator may do, and that it can do all that it has to with that."""

import json
from pathlib import Path

import pytest

from minisgl_operator.kube import CHILDREN
from tests.cluster.apiserver import ApiServer
from tests.operator.objects import OURS
from tests.operator.pair import Pair
from tests.operator.running import Operator, install_chart, requests_of_operator
from tests.support import wait_until


class Scoped(Operator):
    """An operator of some namespaces, or of all."""

    def __init__(self, api: ApiServer, folder: Path, scope: str, namespaces: list[str]) -> None:
        super().__init__(api, folder)
        with (folder / "config-a.yaml").open("a") as config:
            config.write(f"canReadNodes: {str(scope == 'cluster').lower()}\n")
        self._command += [
            "--watch-seconds=2",
            *(["--namespace", *namespaces] if namespaces else []),
        ]


@pytest.mark.parametrize("scope", ["cluster", "no nodes", "namespaces"])
def test_h51_nothing_that_the_operator_asks_for_is_refused(
    foreign_types: ApiServer,
    namespace: str,
    tmp_path: Path,
    scope: str,
    request: pytest.FixtureRequest,
) -> None:
    api = foreign_types
    watched: list[str] = []
    if scope == "namespaces":  # so many that their watches fill any usual pool of connections
        watched = [namespace, *(f"{namespace}-{n}" for n in range(9))]
        for name in watched[1:]:
            api.kubectl("create", "namespace", name)
    request.addfinalizer(lambda: install_chart(api))
    values = {
        "cluster": [],
        "no nodes": ["rbac.nodes=false"],
        "namespaces": [f"watchNamespaces={{{','.join(watched)}}}"],
    }
    install_chart(api, *values[scope])
    seen = len(requests_of_operator(api))
    with Scoped(api, tmp_path, scope, watched) as operator:
        pair = Pair(api, namespace)
        for kind in (*CHILDREN, "Secret"):
            pair.delete_all(kind)
        pair.edge.wait_children("StatefulSet/edge-g0-2", "Secret/edge-redis", "Ingress/edge")
        for kind in CHILDREN:
            stray(pair, kind)
        fail_a_pod(pair)
        left = dict.fromkeys(CHILDREN, "stray") | {"pod": "edge-gateway-x"}
        wait_until(
            lambda: not [kind for kind, name in left.items() if name in pair.of(kind)],
            60, operator.log,
        )  # fmt: skip
        pair.edge.wait(lambda: bool(events(pair)))
        assert "forbidden" not in operator.log()
    asked = requests_of_operator(api)[seen:]
    assert [one for one in asked if one.code in (401, 403)] == []
    assert {one.resource for one in asked if one.verb == "delete"} >= PRUNED


PRUNED = {
    "statefulsets", "deployments", "services", "jobs", "controllerrevisions", "ingresses",
    "networkpolicies", "poddisruptionbudgets", "persistentvolumeclaims", "httproutes", "pods",
}  # fmt: skip


def stray(pair: Pair, kind: str) -> None:
    """A child without an owner that nothing wants, as an orphan of an earlier time."""
    live = pair.api.kubectl.get(kind, "-n", pair.namespace, "-l", OURS)["items"][0]
    labels = {k: v for k, v in live["metadata"]["labels"].items() if "controller-uid" not in k}
    metadata = {"name": "stray", "namespace": pair.namespace, "labels": labels}
    one = {key: value for key, value in live.items() if key != "status"} | {"metadata": metadata}
    spec = one.get("spec", {})
    for assigned in ("clusterIP", "clusterIPs", "volumeName", "selector"):
        if kind in ("Service", "Job", "PersistentVolumeClaim"):
            spec.pop(assigned, None)
    if kind == "Job":
        spec["template"]["metadata"]["labels"] = {}
    pair.api.kubectl("create", "-f", "-", stdin=json.dumps(one))


def events(pair: Pair) -> list[str]:
    """Reasons of the Events that the operator has posted."""
    found = pair.api.kubectl.get("events", "-n", pair.namespace)["items"]
    return [one["reason"] for one in found if one["source"].get("component") == "minisgl-operator"]


def fail_a_pod(pair: Pair) -> None:
    """A pod of a gateway that was evicted."""
    deployment = pair.edge.children()["Deployment/edge-gateway"]
    template = deployment["spec"]["template"]
    owner = {
        "apiVersion": "apps/v1", "kind": "Deployment", "name": "edge-gateway",
        "uid": deployment["metadata"]["uid"], "controller": True,
    }  # fmt: skip
    metadata = {
        **template["metadata"], "name": "edge-gateway-x", "namespace": pair.namespace,
        "ownerReferences": [owner],
    }  # fmt: skip
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    pair.api.kubectl.apply(pod)
    pair.api.kubectl.set_status("pod", "edge-gateway-x", pair.namespace, phase="Failed")
