"""When a node counts as lost: a table of what is seen, with clocks as plain numbers."""

from dataclasses import replace
from typing import Any

import pytest

from minisgl_operator.observed import Bus, Node, Observed, Worker
from minisgl_operator.plan.nodes import lost_nodes
from minisgl_operator.plan.pods import Pod
from tests.unit.operator.world import SETTINGS, START, World, object_of, spec_of


def pod(name: str, node: str, role: str = "rank", *, ready: bool = True, age: float = 1000) -> Pod:
    return Pod(
        manifest={"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "status": {}},
        name=name, uid=name, role=role, index=0 if role == "rank" else None, epoch=1, ordinal=0,
        node=node, phase="Running", ready=ready, ready_since=START - age, started=START - age,
        deleting=None,
    )  # fmt: skip


def worker(pod: str, silent: float) -> Worker:
    return Worker("rank", "g0-1/0", pod, boot=1, silent=silent)


FINE = Node("n2", ready=True, lease_age=3.0)
OTHERS = {"n2": FINE, "n3": Node("n3", ready=True, lease_age=5.0)}


def seen(nodes: dict[str, Node] | None, bus: Bus, **spec: Any) -> Observed:
    return Observed(object_of(spec_of(**spec)), SETTINGS, 0.0, START, nodes=nodes, bus=bus)


def heard(*silences: float) -> Bus:
    return Bus("ok", workers=tuple(worker(f"p{i}", s) for i, s in enumerate(silences)))


UNREADABLE = Bus("not-observable", unread=500.0, workers=())

CASES = {
    "all is well": (Node("n1", True, 4.0), heard(1.0), False),
    "silent ranks under a live kubelet are the ranks' trouble": (
        Node("n1", True, 4.0), heard(500.0), False,
    ),
    "live ranks under a dead kubelet: nothing is done": (
        Node("n1", False, 500.0), heard(1.0), False,
    ),
    "one of two workers is heard": (Node("n1", False, 500.0), heard(500.0, 2.0), False),
    "the Lease stands still for less than 20 s": (Node("n1", True, 19.9), heard(11.0), False),
    "the silence is shorter than 10 s": (Node("n1", True, 25.0), heard(9.9), False),
    "a silence of 10 s, a Lease of 20 s": (Node("n1", True, 20.0), heard(10.0), True),
    "NotReady, and silent for 10 s": (Node("n1", False, 3.0), heard(10.0), True),
    "gone from the cluster, and silent": (None, heard(10.0), True),
    "gone from the cluster, but heard": (None, heard(1.0), False),
    "the bus cannot be read: the Lease alone, at 40 s": (Node("n1", True, 40.0), UNREADABLE, True),
    "the bus cannot be read, the Lease is 39 s old": (Node("n1", False, 39.0), UNREADABLE, False),
    "the bus was read a moment ago": (
        Node("n1", False, 500.0), Bus("unreachable", unread=5.0, workers=(worker("p0", 1),)), False,
    ),
    "nobody there has ever been heard, the Lease is 20 s old": (
        Node("n1", True, 25.0), Bus("ok"), False,
    ),
    "nobody there has ever been heard, the Lease is 40 s old": (
        Node("n1", True, 41.0), Bus("ok"), True,
    ),
    "NotReady, and nobody there has spoken to a Redis that is read for 10 s": (
        Node("n1", False, 20.0), Bus("ok", readable=10.0), True,
    ),
    "the same, and that Redis is read for 9 s": (
        Node("n1", False, 39.0), Bus("ok", readable=9.9), False,
    ),
    "NotReady, nobody there has spoken, the Lease stands still for 19 s": (
        Node("n1", False, 19.9), Bus("ok", readable=500.0), False,
    ),
    "Ready, nobody there has spoken, the Lease is 39 s old": (
        Node("n1", True, 39.0), Bus("ok", readable=500.0), False,
    ),
    "Redis takes no writes, so nobody is heard: the Lease alone": (
        Node("n1", True, 41.0), Bus("full", workers=(worker("p0", 0.0),)), True,
    ),
    "Redis takes no writes, the Lease is 39 s old": (
        Node("n1", True, 39.0), Bus("full", workers=(worker("p0", 0.0),)), False,
    ),
    "no Lease was seen, and the bus cannot be read": (Node("n1", False, None), UNREADABLE, False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_node_is_lost_only_if_it_and_its_workers_are_silent(case: str) -> None:
    node, bus, lost = CASES[case]
    nodes = {**OTHERS, **({"n1": node} if node else {})}
    pods = [pod(f"p{i}", "n1") for i in range(max(1, len(bus.workers)))]
    assert ("n1" in lost_nodes(seen(nodes, bus), pods)) is lost


@pytest.mark.parametrize(
    ("unread", "node", "lost"),
    [(10.0, Node("n1", True, 20.0), True), (9.0, Node("n1", True, 20.0), False),
     (600.0, Node("n1", True, 3.0), False), (10.0, Node("n1", False, 3.0), True)],
)  # fmt: skip
def test_the_silence_of_a_managed_redis_is_that_of_its_pod(
    unread: float, node: Node, lost: bool
) -> None:
    pods = [pod("r", "n1", "redis"), pod("p0", "n2")]
    bus = Bus("unreachable", unread=unread, workers=(worker("p0", 0.0),))
    found = lost_nodes(seen({**OTHERS, "n1": node}, bus), pods)
    assert set(found) == ({"n1"} if lost else set())


@pytest.mark.parametrize(("stale", "lost"), [(1, True), (2, True), (3, False), (4, False)])
def test_nothing_is_lost_while_more_than_half_of_the_leases_are_stale(
    stale: int, lost: bool
) -> None:
    nodes = {f"n{i}": Node(f"n{i}", True, 60.0 if i <= stale else 1.0) for i in range(1, 5)}
    assert ("n1" in lost_nodes(seen(nodes, heard(60.0)), [pod("p0", "n1")])) is lost


@pytest.mark.parametrize(
    ("silent", "ready", "lost"), [(30.0, True, True), (29.0, True, False), (500.0, False, False)]
)
def test_without_the_right_to_read_nodes_a_ready_pod_must_be_silent_for_the_heartbeat_timeout(
    silent: float, ready: bool, lost: bool
) -> None:
    found = lost_nodes(seen(None, heard(silent)), [pod("p0", "n1", ready=ready)])
    assert ("n1" in found) is lost


def test_without_the_right_to_read_nodes_a_redis_that_was_never_read_is_no_loss() -> None:
    pods = [pod("r", "n1", "redis"), pod("p0", "n2")]
    bus = Bus("unreachable", unread=500.0)
    assert lost_nodes(seen(None, bus), pods) == {}
    assert set(lost_nodes(seen(None, replace(bus, workers=(worker("p0", 0),))), pods)) == {"n1"}


def test_a_node_that_has_just_joined_and_is_not_known_yet_is_not_lost() -> None:
    young = pod("p0", "n9")
    young.manifest["metadata"]["creationTimestamp"] = "2027-01-15T07:59:50Z"
    assert lost_nodes(seen(OTHERS, Bus("ok")), [young]) == {}


def test_a_lost_node_costs_a_group_seconds_and_not_the_six_minutes_of_kubernetes() -> None:
    world = World(spec_of(replicas=2, parallelism={"tensor": 2})).settle()
    world.power_off("n1")
    began = world.wall
    world.until(lambda: bool(world.events("NodeLost")), 40)
    assert 10 <= world.wall - began <= 32  # the Lease was up to ten seconds old
    world.until(lambda: world.status["readyReplicas"] == 2, 60)
    assert {n for g in world.status["groups"] for n in g["nodes"]} & {"n1"} == set()
    assert all("n1" in m["spec"]["avoided"] for m in world.sets().values() if m["spec"]["avoided"])
    assert world.group(0)["lastFailure"]["reason"] == "NodeLost"


def test_the_pods_of_deployments_on_a_lost_node_are_deleted_gracefully() -> None:
    world = World(spec_of()).settle()
    world.power_off("n1")
    gone = {p["metadata"]["name"] for p in world.on("n1")}
    world.run(60)
    for name in gone & world.pods.keys():
        assert "deletionTimestamp" in world.pods[name]["metadata"]  # it stays: nothing is forced
    for role in ("gateway", "redis", "tokenizer", "detokenizer"):
        here = [p for p in world.pods.values() if f"-{role}-" in p["metadata"]["name"]]
        assert any("deletionTimestamp" not in p["metadata"] for p in here), role


def test_a_dead_kubelet_over_live_ranks_changes_nothing() -> None:
    world = World(spec_of(replicas=2)).settle()
    before = set(world.sets())
    world.kubelet_off("n1")
    world.run(45)  # until it is NotReady, which makes the pods unready
    assert set(world.sets()) == before
    world.run(300)
    assert not world.events("NodeLost")


def test_h18_a_pod_that_cannot_go_from_a_lost_node_blocks_nothing_and_is_named() -> None:
    world = World(spec_of(parallelism={"tensor": 2})).settle()
    world.power_off("n1")
    world.until(lambda: world.status["readyReplicas"] == 1 and world.group(0)["epoch"] == 2, 90)
    old = [p for p in world.rank_pods() if p["metadata"]["labels"]["minisglang.io/epoch"] == "1"]
    assert old and all("deletionTimestamp" in p["metadata"] for p in old)
    assert "llm-g0-1" in world.sets()
    degraded = world.condition("Degraded")
    assert degraded["reason"] == "NodeLost" and "n1" in degraded["message"]
    assert "cannot be removed" in degraded["message"]
    world.power_on("n1")
    world.until(lambda: list(world.sets()) == ["llm-g0-2"])


def test_a_group_that_finds_no_other_place_goes_back_to_the_node_when_that_is_back() -> None:
    world = World(spec_of())
    for name in ("n2", "n3"):
        world.machines[name].places = 0
    world.settle()
    world.power_off("n1")
    world.run(70)
    assert world.group(0)["phase"] == "Pending" and world.group(0)["epoch"] == 2
    world.power_on("n1")
    world.settle()
    assert world.group(0)["epoch"] == 3 and world.group(0)["nodes"] == ["n1"]
    assert world.group(0)["restarts"] == 1  # the second epoch is no failure
    assert world.sets()["llm-g0-3"]["spec"]["avoided"] == []


def test_without_the_right_to_read_nodes_the_group_moves_as_well() -> None:
    world = World(spec_of(replicas=2, parallelism={"tensor": 2}), reads_nodes=False).settle()
    world.machines["n1"].places = 0
    world.power_off("n1")
    world.until(lambda: world.status["readyReplicas"] == 2 and world.group(0)["restarts"] == 1, 120)


def test_half_of_two_nodes_is_not_more_than_half() -> None:
    machines = {name: m for name, m in World(spec_of()).machines.items() if name != "n3"}
    world = World(spec_of(), machines=machines).settle()
    world.power_off("n1")
    world.until(lambda: world.group(0)["epoch"] == 2 and world.status["readyReplicas"] == 1, 90)
