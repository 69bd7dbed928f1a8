"""The running operator on a real API server, where nobody else acts on what it makes."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.operator.running import Operator, writes_of_operator
from tests.support import wait_until

KINDS = (
    "deployment,statefulset,service,networkpolicy,poddisruptionbudget,controllerrevision,ingress"
)
OURS = "app.kubernetes.io/managed-by=minisgl-operator"
AT_REST_SECONDS = 12.0  # more than one resync


def manifest(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "minisglang.io/v1alpha1",
        "kind": "MiniSGLang",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "pvc://models/m"}, "engine": {"device": "cpu"}} | spec,
    }


class Object:
    """One object and what the operator makes of it."""

    def __init__(self, kubectl: Kubectl, namespace: str, name: str = "qwen") -> None:
        self.kubectl, self.namespace, self.name = kubectl, namespace, name

    def apply(self, **spec: Any) -> None:
        self.kubectl.apply(manifest(self.name, self.namespace, **spec))

    def wait_observed(self) -> None:
        def observed() -> bool:
            found = self.get()
            seen = found.get("status", {}).get("observedGeneration")
            return bool(seen == found["metadata"]["generation"])

        wait_until(observed, 30, lambda: json.dumps(self.get()))

    def get(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.get("minisglang", self.name, "-n", self.namespace)
        return found

    def condition(self, type: str) -> dict[str, str]:
        conditions = self.get().get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == type), {})

    def wait_told(self, type: str) -> None:
        """Until the operator has tried what this condition speaks of."""
        wait_until(
            lambda: "connecting" in self.condition(type).get("message", ""),
            30,
            lambda: str(self.condition(type)),
        )
        self.wait_observed()

    def children(self) -> dict[str, dict[str, Any]]:
        found = self.kubectl.get(f"{KINDS},secret", "-n", self.namespace, "-l", OURS)
        return {f"{one['kind']}/{one['metadata']['name']}": one for one in found["items"]}

    def uids(self) -> dict[str, str]:
        return {key: one["metadata"]["uid"] for key, one in self.children().items()}

    def delete_child(self, key: str) -> None:
        self.kubectl("delete", key, "-n", self.namespace, "--wait=false")

    def wait_children(self, *keys: str) -> None:
        wait_until(
            lambda: set(keys) <= set(self.children()), 30, lambda: str(self.children().keys())
        )


@pytest.fixture
def qwen(installed: ApiServer, operator: Operator, namespace: str) -> Object:
    one = Object(installed.kubectl, namespace)
    one.apply(replicas=2, gateway={"replicas": 2}, ingress={"host": "llm.example.com"})
    one.wait_children("StatefulSet/qwen-g0-1", "StatefulSet/qwen-g1-1", "Ingress/qwen")
    # A status is written at most once a second: the first one knows of no group yet.
    wait_until(
        lambda: len(one.get().get("status", {}).get("groups", [])) == 2,
        30,
        lambda: json.dumps(one.get()),
    )
    one.wait_observed()
    return one


def test_an_object_gets_its_children_and_then_nothing_is_written(
    installed: ApiServer, qwen: Object
) -> None:
    assert {
        "Deployment/qwen-gateway", "Deployment/qwen-tokenizer", "Deployment/qwen-detokenizer",
        "Deployment/qwen-redis", "Service/qwen", "Service/qwen-ranks", "Service/qwen-redis",
        "Secret/qwen-redis", "Ingress/qwen",
    } <= set(qwen.children())  # fmt: skip
    qwen.wait_told("RedisReady")
    before = writes_of_operator(installed, [qwen.namespace])
    time.sleep(AT_REST_SECONDS)  # the absence of something has no condition to wait for
    assert writes_of_operator(installed, [qwen.namespace]) == before


@pytest.mark.parametrize(
    "key",
    [
        "Deployment/qwen-gateway", "Deployment/qwen-tokenizer", "Deployment/qwen-detokenizer",
        "Deployment/qwen-redis", "Service/qwen", "Service/qwen-ranks", "Service/qwen-redis",
        "NetworkPolicy/qwen-redis", "PodDisruptionBudget/qwen-gateway", "Ingress/qwen",
    ],
)  # fmt: skip
def test_a_deleted_child_comes_back_within_seconds(qwen: Object, key: str) -> None:
    """Field case H20."""
    uid = qwen.uids()[key]
    qwen.delete_child(key)
    wait_until(lambda: qwen.uids().get(key, uid) != uid, 15, lambda: str(qwen.children().keys()))


def test_a_deleted_group_comes_back_under_the_next_epoch(qwen: Object) -> None:
    qwen.delete_child("StatefulSet/qwen-g0-1")
    qwen.wait_children("StatefulSet/qwen-g0-2")
    assert "StatefulSet/qwen-g1-1" in qwen.children()


def test_the_secret_of_redis_comes_back_with_the_same_password(qwen: Object) -> None:
    before = qwen.children()["Secret/qwen-redis"]
    qwen.delete_child("Secret/qwen-redis")
    wait_until(
        lambda: qwen.uids().get("Secret/qwen-redis", "") not in ("", before["metadata"]["uid"]),
        30,
        lambda: str(qwen.children().keys()),
    )
    assert qwen.children()["Secret/qwen-redis"]["data"] == before["data"]


def test_an_edited_field_is_repaired_and_what_others_add_stays(qwen: Object) -> None:
    patch = {
        "metadata": {"annotations": {"injected.example/x": "1"}},
        "spec": {"replicas": 7, "template": {"spec": {"hostNetwork": True}}},
    }
    qwen.kubectl(
        "patch", "deployment/qwen-tokenizer", "-n", qwen.namespace, "--type=merge",
        f"--patch={json.dumps(patch)}",
    )  # fmt: skip
    wait_until(
        lambda: qwen.children()["Deployment/qwen-tokenizer"]["spec"]["replicas"] == 1,
        15,
        lambda: json.dumps(qwen.children()["Deployment/qwen-tokenizer"]["spec"]),
    )
    annotations = qwen.children()["Deployment/qwen-tokenizer"]["metadata"]["annotations"]
    assert annotations["injected.example/x"] == "1"


def test_kubectl_scale_makes_and_removes_groups(qwen: Object) -> None:
    qwen.kubectl("scale", "minisglang/qwen", "--replicas=3", "-n", qwen.namespace)
    qwen.wait_children("StatefulSet/qwen-g2-1")
    qwen.kubectl("scale", "minisglang/qwen", "--replicas=0", "-n", qwen.namespace)

    def leaving() -> bool:
        sets = [c for k, c in qwen.children().items() if k.startswith("StatefulSet/")]
        return all("deletionTimestamp" in one["metadata"] for one in sets)

    wait_until(leaving, 30, lambda: str(qwen.children().keys()))
    wait_until(
        lambda: qwen.condition("Ready").get("reason") == "ScaledToZero", 15,
        lambda: str(qwen.get().get("status")),
    )  # fmt: skip
    assert "Deployment/qwen-gateway" in qwen.children()


def test_a_deleted_status_comes_back(qwen: Object) -> None:
    def settled() -> dict[str, Any]:
        status = qwen.get().get("status", {})
        return {k: v for k, v in status.items() if k != "conditions"}

    before = settled()
    qwen.kubectl(
        "patch", "minisglang/qwen", "-n", qwen.namespace, "--subresource=status", "--type=json",
        '--patch=[{"op": "remove", "path": "/status"}]',
    )  # fmt: skip
    wait_until(lambda: settled() == before, 15, lambda: f"{settled()} is not {before}")


def test_a_name_that_is_somebody_elses_is_left_alone_and_named(
    installed: ApiServer, operator: Operator, namespace: str
) -> None:
    installed.kubectl.apply(
        {
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": "taken", "namespace": namespace},
            "spec": {"ports": [{"port": 1234}]},
        }
    )  # fmt: skip
    one = Object(installed.kubectl, namespace, "taken")
    one.apply()
    wait_until(
        lambda: one.condition("Degraded").get("reason") == "NameConflict", 30,
        lambda: str(one.get().get("status")),
    )  # fmt: skip
    assert "taken" in one.condition("Degraded")["message"]
    service = installed.kubectl.get("service", "taken", "-n", namespace)
    assert [p["port"] for p in service["spec"]["ports"]] == [1234]
    assert "Deployment/taken-gateway" in one.children()  # it stops no other child


def test_a_template_that_the_server_refuses_is_told_in_its_own_words(
    installed: ApiServer, operator: Operator, namespace: str
) -> None:
    one = Object(installed.kubectl, namespace)
    one.apply(tokenizer={"podTemplate": {"spec": {"noSuchField": 1}}})
    wait_until(
        lambda: one.condition("Degraded").get("reason") == "InvalidPodTemplate", 30,
        lambda: str(one.get().get("status")),
    )  # fmt: skip
    assert "noSuchField" in one.condition("Degraded")["message"]
    assert "Deployment/qwen-detokenizer" in one.children()
    one.apply(tokenizer={})
    one.wait_children("Deployment/qwen-tokenizer")


def test_an_upgrade_of_the_operator_restarts_no_model(
    installed: ApiServer,
    operator: Operator,
    folder: Path,
    qwen: Object,
    request: pytest.FixtureRequest,
) -> None:
    """Field case H32: another default image, and nobody asked for it."""
    sets = {k: c for k, c in qwen.children().items() if k.startswith("StatefulSet/")}
    assert operator.stop() == 0
    request.addfinalizer(operator.start)
    upgraded = Operator(installed, folder, "upgraded", image="registry.example/engine-{device}:2")
    with upgraded:
        seen = len(writes_of_operator(installed, [qwen.namespace]))
        qwen.kubectl("annotate", "minisglang/qwen", "touched=1", "-n", qwen.namespace)
        time.sleep(AT_REST_SECONDS)
        after = {k: c for k, c in qwen.children().items() if k.startswith("StatefulSet/")}
        ours = writes_of_operator(installed, [qwen.namespace])[seen:]
        assert [w for w in ours if w.verb == "delete"] == []
    assert {k: c["metadata"]["uid"] for k, c in after.items()} == {
        k: c["metadata"]["uid"] for k, c in sets.items()
    }
    assert [c["spec"]["template"] for c in after.values()] == [
        c["spec"]["template"] for c in sets.values()
    ]


def test_a_second_replica_stands_by_and_takes_over(
    installed: ApiServer, operator: Operator, folder: Path, namespace: str
) -> None:
    second = Operator(installed, folder, "second")
    second.start(acts=False)
    try:
        one = Object(installed.kubectl, namespace)
        one.apply()
        one.wait_children("StatefulSet/qwen-g0-1")
        assert not second.acts()
        operator.kill()
        wait_until(second.acts, 60, second.log)
        one.delete_child("Service/qwen")
        wait_until(lambda: "Service/qwen" in one.children(), 15, second.log)
    finally:
        second.stop()
        operator.start()


def test_an_object_that_is_deleted_leaves_nothing_to_be_made_again(
    installed: ApiServer, qwen: Object
) -> None:
    """Field case H35: no finalizer holds it, and the operator does not fight the collector."""
    assert "finalizers" not in qwen.get()["metadata"]
    qwen.kubectl("delete", "minisglang/qwen", "-n", qwen.namespace, "--wait=false")
    with pytest.raises(KubectlError, match="not found"):
        qwen.get()
    qwen.delete_child("Service/qwen")  # as the garbage collector would
    time.sleep(3)
    assert "Service/qwen" not in qwen.children()
