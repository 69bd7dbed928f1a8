"""The running operator on a real API server, where nobody else acts on what it makes."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from minisgl_operator.api import API_VERSION, KIND
from tests.cluster.apiserver import ApiServer
from tests.cluster.kubectl import KubectlError
from tests.operator.objects import Object
from tests.operator.running import Operator, settle, writes_of_operator
from tests.support import wait_until

AT_REST_SECONDS = 12.0  # more than one resync


@pytest.fixture
def qwen(installed: ApiServer, operator: Operator, namespace: str) -> Object:
    one = Object(installed.kubectl, namespace)
    one.apply(replicas=2, gateway={"replicas": 2}, ingress={"host": "llm.example.com"})
    one.wait_children("StatefulSet/qwen-g0-1", "StatefulSet/qwen-g1-1", "Ingress/qwen")
    # A status is written at most once a second: the first one knows of no group yet.
    one.wait(lambda: len(one.status.get("groups", [])) == 2)
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
    # What its look for Redis ends with is told a moment later, and may change once.
    settle(installed, 60, [qwen.namespace])


def test_any_text_reaches_children_and_status(
    installed: ApiServer, operator: Operator, namespace: str
) -> None:
    """Server-side apply is read as YAML, which is not quite JSON."""
    name = "\U0001f917 模型\x00\x1b[1m\x7f\x85\u2028\ufeff"
    env = [{"name": "TEXT", "value": name}]
    one = Object(installed.kubectl, namespace)
    spec = {
        "model": {"uri": "pvc://models/m", "servedName": name},
        "engine": {"device": "cpu"},
        "ranks": {"podTemplate": {"spec": {"containers": [{"name": "rank", "env": env}]}}},
    }
    metadata = {"name": one.name, "namespace": namespace}
    made = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    installed.kubectl("create", "--filename=-", stdin=json.dumps(made))
    one.wait_children("StatefulSet/qwen-g0-1", "Deployment/qwen-gateway")
    one.wait(lambda: one.status.get("servedModel") == name)
    pod = one.children()["StatefulSet/qwen-g0-1"]["spec"]["template"]["spec"]
    assert env[0] in pod["containers"][0]["env"]


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
    qwen.ask("scale", "minisglang/qwen", "--replicas=3")
    qwen.wait_children("StatefulSet/qwen-g2-1")
    qwen.ask("scale", "minisglang/qwen", "--replicas=0")

    def leaving() -> bool:
        sets = [c for k, c in qwen.children().items() if k.startswith("StatefulSet/")]
        return all("deletionTimestamp" in one["metadata"] for one in sets)

    wait_until(leaving, 30, lambda: str(qwen.children().keys()))
    wait_until(
        lambda: qwen.condition("Ready")["reason"] == "ScaledToZero", 15,
        lambda: str(qwen.status),
    )  # fmt: skip
    assert "Deployment/qwen-gateway" in qwen.children()


def test_a_deleted_status_comes_back(qwen: Object) -> None:
    def settled() -> dict[str, Any]:
        return {k: v for k, v in qwen.status.items() if k != "conditions"}

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
        lambda: one.condition("Degraded")["reason"] == "NameConflict", 30,
        lambda: str(one.status),
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
        lambda: one.condition("Degraded")["reason"] == "InvalidPodTemplate", 30,
        lambda: str(one.status),
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
        qwen.ask("annotate", "minisglang/qwen", "touched=1")
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
