"""Whatever happens to an object's pods, children and operator: its streams go on, and it heals."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kubectl import KubectlError
from tests.cluster.load import Load
from tests.cluster.product import CHART, RELEASE, SYSTEM, Manifest, Product, Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG = pytest.mark.long
NAME = "qwen"
SHAPE = {
    "replicas": 2,
    "parallelism": {"tensor": 2},
    "tokenizer": {"replicas": 2},
    "detokenizer": {"replicas": 2},
}


@pytest.fixture(scope="module")
def qwen(product: Product) -> Iterator[Served]:
    """Two groups of two ranks on the hosts' network."""
    served = product.serve(NAME, **SHAPE)
    served.settle()
    yield served
    served.delete()


def restarts(served: Served) -> dict[str, int]:
    """How often each rank's container was restarted in place, by the pod's name."""
    return {
        pod["metadata"]["name"]: sum(
            s["restartCount"] for s in pod["status"].get("containerStatuses", ())
        )
        for pod in served.pods("rank")
    }


def unbroken(load: Load, served: Served) -> None:
    """All is as wanted again, every client got a whole answer since, and none a wrong one."""
    served.settle()
    load.go_round()
    assert not load.wrong()


@pytest.mark.long
def test_a_deleted_rank_pod_costs_no_stream(qwen: Served) -> None:
    with Load(qwen.endpoint()) as load:
        victim = qwen.pods("rank", group=0)[0]["metadata"]
        qwen.ask("delete", "pod", victim["name"], "--wait=false")
        qwen.wait("the pod is another one", lambda: victim["uid"] not in qwen.uids("rank"))
        unbroken(load, qwen)


def test_a_killed_rank_costs_no_stream_and_restarts_in_place(qwen: Served) -> None:
    """H12: nobody hangs in a collective; H19: what it computed is replayed."""
    before, lives = restarts(qwen), qwen.lives()
    with Load(qwen.endpoint()) as load:
        victim = qwen.pods("rank", group=1)[1]
        qwen.kill(victim, "rank")
        name = victim["metadata"]["name"]
        qwen.wait("it restarted", lambda: restarts(qwen).get(name, 0) > before[name])
        unbroken(load, qwen)
    assert qwen.lives() == lives


QUIET = "service,secret,ingress,networkpolicy,controllerrevision,poddisruptionbudget"
"""Kinds of children in which nothing runs."""


def children(served: Served, kinds: str) -> dict[tuple[str, str], Manifest]:
    """Its living children of some kinds, by kind and name."""
    items = served.get(kinds, f"--selector=app.kubernetes.io/instance={served.name}")["items"]
    return {
        (item["kind"], item["metadata"]["name"]): item
        for item in items
        if "deletionTimestamp" not in item["metadata"]
        and item["metadata"]["ownerReferences"][0]["kind"] == "MiniSGLang"
    }


@pytest.mark.parametrize(
    "kinds",
    ["deployment", pytest.param("statefulset", marks=LONG), pytest.param(QUIET, marks=LONG)],
)
def test_every_child_comes_back_without_a_broken_stream(qwen: Served, kinds: str) -> None:
    """H20, on a cluster where something runs in them."""
    before = children(qwen, kinds)
    assert len({kind for kind, _ in before}) == len(kinds.split(","))
    with Load(qwen.endpoint()) as load:
        for (kind, name), item in before.items():
            uid = item["metadata"]["uid"]
            qwen.ask("delete", kind.lower(), name, "--wait=false")
            qwen.wait(
                f"{kind} {name} is there again",
                lambda uid=uid: (
                    len(now := children(qwen, kinds)) >= len(before)
                    and uid not in {one["metadata"]["uid"] for one in now.values()}
                ),
            )
            if kinds != QUIET:
                qwen.settle()
        unbroken(load, qwen)
    secrets = [key for key in before if key[0] == "Secret"]
    after = children(qwen, kinds)
    assert [after[key]["data"] for key in secrets] == [before[key]["data"] for key in secrets]


@pytest.mark.long
def test_an_edited_field_is_repaired_without_a_broken_stream(qwen: Served) -> None:
    target = f"deployment/{NAME}-tokenizer"
    with Load(qwen.endpoint()) as load:
        before = qwen.get(target)["spec"]["template"]["spec"]["containers"][0]["image"]
        qwen.ask("set", "image", target, "tokenizer=nowhere.example/none:1")
        qwen.wait(
            "the image is the old one",
            lambda: (
                qwen.get(target)["spec"]["template"]["spec"]["containers"][0]["image"] == before
            ),
        )
        qwen.ask("scale", f"deployment/{NAME}-gateway", "--replicas=0")
        qwen.wait(
            "a gateway is wanted",
            lambda: qwen.get(f"deployment/{NAME}-gateway")["spec"]["replicas"] == 1,
        )
        unbroken(load, qwen)


@pytest.mark.parametrize("how", [pytest.param("kill", marks=LONG), "delete"])
def test_redis_restarts_and_streams_go_on(qwen: Served, how: str) -> None:
    with Load(qwen.endpoint()) as load:
        (redis,) = qwen.pods("redis")
        ranks = restarts(qwen)
        if how == "kill":
            qwen.kill(redis, "redis")
        else:
            qwen.ask("delete", "pod", redis["metadata"]["name"], "--wait=false")
        load.flow()
        unbroken(load, qwen)
    # Redis is no reason for a rank to end.
    assert restarts(qwen) == ranks


@pytest.mark.long
def test_the_operator_restarts_while_a_rank_dies(product: Product, qwen: Served) -> None:
    with Load(qwen.endpoint()) as load:
        qwen.kill(qwen.pods("rank", group=0)[0], "rank")
        (operator,) = product.operator.pods()
        product.kubectl("delete", "pod", operator["metadata"]["name"], f"--namespace={SYSTEM}")
        product.operator.wait()
        unbroken(load, qwen)


@pytest.mark.long
def test_ranks_form_again_without_the_operator(product: Product, qwen: Served) -> None:
    product.operator.scale(0)
    try:
        before = restarts(qwen)
        with Load(qwen.endpoint()) as load:
            victim = qwen.pods("rank", group=0)[1]
            name = victim["metadata"]["name"]
            qwen.kill(victim, "rank")
            qwen.wait("it restarted", lambda: restarts(qwen)[name] > before[name])
            load.flow()
            load.go_round()
            assert not load.wrong()
    finally:
        product.operator.scale(1)
    qwen.settle()


@pytest.mark.long
def test_a_kubelet_without_a_pulse_is_no_lost_node(product: Product, qwen: Served) -> None:
    """Its pods compute on, so nothing is done, and their streams go on."""
    node = product.cluster.nodes[1]
    before = qwen.uids("rank")
    with Load(qwen.endpoint()) as load:
        node.kill_agents()
        try:
            product.kubectl.wait_for(
                "n2 is not ready", lambda: not product.cluster.is_ready("n2"), 120, "nodes"
            )
            load.flow()
            load.go_round()
        finally:
            node.start_agents()
        product.cluster.wait_until_ready()
        unbroken(load, qwen)
    assert qwen.uids("rank") == before


@pytest.mark.long
def test_a_drained_node_costs_no_stream(product: Product, qwen: Served) -> None:
    """Also while a pod of an old set hangs Terminating."""
    kubectl = product.kubectl
    # On the node that stays: drain itself waits for every pod of its node to end.
    held = next(
        pod["metadata"]["name"] for pod in qwen.pods("rank") if pod["spec"]["nodeName"] == "n1"
    )
    hold = '{"metadata": {"finalizers": ["tests.example.com/hold"]}}'
    free = '{"metadata": {"finalizers": null}}'
    old = qwen.lives()

    def new_groups_serve() -> bool:
        status = qwen.status
        return status["readyReplicas"] == status["updatedReplicas"] == 2 and not qwen.lives() & old

    qwen.ask("patch", "pod", held, "--type=merge", f"--patch={hold}")
    with Load(qwen.endpoint()) as load:
        try:
            qwen.patch({"restartedAt": str(time.time())})
            qwen.wait("both groups have another epoch", new_groups_serve)
            assert held in qwen.condition("Degraded")["message"]
            load.go_round()
            kubectl(
                "drain", "n2", "--ignore-daemonsets", "--delete-emptydir-data",
                f"--pod-selector=app.kubernetes.io/instance={NAME}", "--timeout=150s", seconds=180,
            )  # fmt: skip
            qwen.wait(
                "all of it serves on n1",
                lambda: (
                    {p["spec"].get("nodeName") for p in qwen.pods()} == {"n1"}
                    and new_groups_serve()
                ),
            )
            load.go_round()
        finally:
            kubectl("uncordon", "n2")
            qwen.ask("patch", "pod", held, "--type=merge", f"--patch={free}")
        unbroken(load, qwen)


def evict(served: Served, pod: Manifest) -> None:
    """As a drain does, and whoever takes nodes away; raises `KubectlError` if that may not be."""
    place = {"name": pod["metadata"]["name"], "namespace": served.namespace}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": place}
    path = f"/api/v1/namespaces/{served.namespace}/pods/{place['name']}/eviction"
    served.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


@pytest.mark.long
def test_evictions_cost_no_stream_and_take_one_group_at_a_time(qwen: Served) -> None:
    with Load(qwen.endpoint()) as load:
        for role in ("gateway", "tokenizer", "detokenizer", "redis"):
            evict(qwen, qwen.pods(role)[0])
            load.flow()
            qwen.settle()
        # Its peer ends with it, and would be let go once it is no longer ready.
        evict(qwen, qwen.pods("rank", group=0)[0])
        for pod in qwen.pods("rank", group=1):
            with pytest.raises(KubectlError, match="disruption budget"):
                evict(qwen, pod)
        unbroken(load, qwen)
    (reason,) = (g["lastFailure"]["reason"] for g in qwen.status["groups"] if g["index"] == 0)
    assert reason == "Evicted"


@pytest.mark.long
def test_objects_and_streams_outlive_the_chart(product: Product, qwen: Served) -> None:
    """H35, H37: uninstalled and installed again under the same name."""
    before = qwen.uids()
    with Load(qwen.endpoint()) as load:
        product.operator.helm("uninstall", "minisglang", "--wait")
        load.flow()
        load.go_round()
        product.operator.install()
        unbroken(load, qwen)
    assert qwen.uids() == before


@pytest.mark.long
def test_an_upgrade_of_the_operator_restarts_no_pod(product: Product, qwen: Served) -> None:
    """H32: also with `image` unset and another default image."""
    before = qwen.uids()
    with Load(qwen.endpoint()) as load:
        product.operator.install("defaults.image=nowhere.example/other:2", "operator.podLabels.a=b")
        unbroken(load, qwen)
        assert qwen.uids() == before
    product.operator.install()


@pytest.mark.long
def test_a_rollback_over_a_newer_chart_restarts_no_pod(
    product: Product, qwen: Served, tmp_path: Path
) -> None:
    """Its CRD had a field that the older one does not know, and an object used it."""
    newer = tmp_path / "newer"
    shutil.copytree(CHART, newer)
    crd = newer / "templates/crd.yaml"
    text, field = crd.read_text(), "suspend:"
    (line,) = (one for one in text.splitlines() if one.strip().startswith(field))
    indent = line[: line.index(field)]
    crd.write_text(text.replace(line, f"{indent}newer: {{type: string}}\n{line}"))
    chart = newer / "Chart.yaml"
    chart.write_text(re.sub(r"(?m)^version: .*", "version: 9.9.9", chart.read_text()))
    helm, before = product.operator.helm, qwen.uids("rank")
    revision = json.loads(helm("history", RELEASE, "--output=json", "--max=1"))[0]["revision"]
    with Load(qwen.endpoint()) as load:
        helm("upgrade", RELEASE, str(newer), "--reuse-values", "--wait")
        product.operator.wait()
        qwen.patch({"newer": "yes"})
        assert qwen.get()["spec"]["newer"] == "yes"
        unbroken(load, qwen)
        helm("rollback", RELEASE, str(revision), "--wait")
        product.operator.wait()
        assert "newer" not in qwen.get()["spec"]
        qwen.patch({"tokenizer": {"replicas": 1}})
        unbroken(load, qwen)
        qwen.patch({"tokenizer": SHAPE["tokenizer"]})
        unbroken(load, qwen)
    assert qwen.uids("rank") == before


@pytest.mark.long
def test_what_is_deleted_without_an_operator_finishes_its_streams(product: Product) -> None:
    served = product.serve("brief", network={"hostNetwork": False})
    served.settle()
    endpoint = served.endpoint()
    product.operator.scale(0)
    try:
        with Load(endpoint, clients=2, tokens=1500) as load:
            counts = [len(one.answers) for one in load.progress]
            served.delete()
            served.wait(
                "each stream that was open has ended",
                lambda: all(
                    len(one.answers) > n for one, n in zip(load.progress, counts, strict=True)
                ),
            )
            firsts = [one.answers[n] for one, n in zip(load.progress, counts, strict=True)]
            assert [(a.finish, a.error) for a in firsts] == [("length", "")] * 2
        served.wait_gone()
    finally:
        product.operator.scale(1)
