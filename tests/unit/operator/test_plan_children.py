"""What is done about children and pods other than the groups' sets."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from minisgl_operator import names
from minisgl_operator.observed import Apply, Delete, DeletePod, Desired, Key, Plan
from minisgl_operator.plan import decide
from tests.unit.operator.world import World, child, group_set, spec_of


def world(**spec: Any) -> World:
    return World(spec_of(**spec)).settle()


def planned(made: World, **seen: Any) -> Plan:
    observed = replace(made.observe(), **seen)
    return decide(observed, made.desired(observed), group_set)


def deleted(plan: Plan) -> set[str]:
    return {action.key.name for action in plan.actions if isinstance(action, Delete)}


def applied(plan: Plan) -> list[str]:
    return [Key.of(a.manifest).name for a in plan.actions if isinstance(a, Apply)]


def test_a_child_that_nothing_wants_any_more_is_pruned() -> None:
    made = world()
    stray = child(made.obj, "Ingress", "llm", "gateway")
    made.apply(Apply(stray))
    assert deleted(planned(made)) == {"llm"}


def test_an_unwanted_orphan_with_our_label_is_pruned_and_one_of_another_owner_is_not() -> None:
    made = world()
    orphan = child(made.obj, "Service", "llm-old", "gateway")
    orphan["metadata"]["ownerReferences"] = []
    other = child(made.obj, "Service", "llm-other", "gateway")
    other["metadata"]["ownerReferences"] = [{"uid": "someone", "controller": True}]
    bare: dict[str, Any] = {"kind": "Service", "metadata": {"name": "llm-bare"}}
    for manifest in (orphan, other, bare):
        made.apply(Apply(manifest))
    assert deleted(planned(made)) == {"llm-old"}


def test_what_is_being_deleted_is_not_deleted_again() -> None:
    made = world()
    made.apply(Apply(child(made.obj, "Ingress", "llm", "gateway")))
    made.live[Key("Ingress", "llm")]["metadata"]["deletionTimestamp"] = "2027-01-01T00:00:00Z"
    assert deleted(planned(made)) == set()


def test_a_name_that_somebody_else_holds_is_never_touched() -> None:
    made = World(spec_of())
    taken = Key("Service", "llm")
    plan = planned(made, foreign=frozenset({taken}))
    assert "llm" not in applied(plan) and "llm-gateway" in applied(plan)
    assert deleted(plan) == set()


def test_a_set_name_that_somebody_else_holds_costs_an_epoch() -> None:
    made = World(spec_of())
    made.operate()  # the revision's template
    plan = planned(made, foreign=frozenset({Key("StatefulSet", "llm-g0-7")}))
    assert "llm-g0-8" in applied(plan)


def test_h35_a_deleted_object_is_left_to_the_garbage_collector() -> None:
    made = world()
    obj = made.obj
    metadata = msgspec.structs.replace(obj.metadata, deletion_timestamp="2027-01-15T08:00:00Z")
    dying = msgspec.structs.replace(obj, metadata=metadata)
    assert planned(made, obj=dying) == Plan()


def test_failed_pods_of_deployments_are_deleted_and_those_of_jobs_are_not() -> None:
    made = world()
    for pod in made.pods.values():
        if pod["metadata"]["labels"][names.COMPONENT] == "tokenizer":
            failed = pod
    failed["status"] |= {"phase": "Failed", "reason": "Evicted"}
    job = {
        "metadata": {"name": "llm-model-x-1", "uid": "j", "labels": {names.COMPONENT: "model"}},
        "spec": {}, "status": {"phase": "Failed"},
    }  # fmt: skip
    plan = planned(made, pods=(*made.pods.values(), job))
    gone = [action.name for action in plan.actions if isinstance(action, DeletePod)]
    assert gone == [failed["metadata"]["name"]]


@pytest.mark.parametrize("label", [names.GROUP_INDEX, names.EPOCH, names.COMPONENT])
def test_a_pod_whose_set_let_go_of_it_is_replaced_with_its_group(label: str) -> None:
    """The set cannot make it again: the name is taken."""
    made = world(replicas=2)
    pod = made.rank_pods()[0]
    del pod["metadata"]["labels"][label]
    pod["metadata"]["ownerReferences"] = [{"uid": "nobody"}]  # the controller of sets does that
    plan = planned(made)
    (action,) = (a for a in plan.actions if isinstance(a, DeletePod))
    assert action.name == pod["metadata"]["name"] and "let go of it" in action.why
    assert "llm-g0-2" in applied(plan)
    made.operate()
    made.run(60)
    assert {g["index"]: g["epoch"] for g in made.status["groups"]} == {0: 2, 1: 1}
    assert made.status["groups"][0]["lastFailure"]["reason"] == "LabelsChanged"


def test_suspending_lets_streams_end_first_and_takes_redis_away_last() -> None:
    made = world(replicas=2)
    order: list[str] = []
    made.change(suspend=True)
    for _ in range(60):
        made.step()
        made.operate()
        here = {
            p["metadata"]["labels"][names.COMPONENT]
            for p in made.pods.values()
            if "deletionTimestamp" not in p["metadata"]
        }
        for role in {"gateway", "rank", "tokenizer", "redis"} - here - set(order):
            order.append(role)
            if role == "rank":
                assert not [p for p in made.pods.values() if "gateway" in p["metadata"]["name"]]
            if role == "redis":
                assert not made.rank_pods()
    assert order[0] == "gateway" and order[-1] == "redis" and not made.pods
    assert made.condition("Ready")["reason"] == made.condition("Progressing")["reason"]
    assert made.condition("Ready")["reason"] == "Suspended"
    assert Key("Service", "llm") in made.live and made.operate() == []
    made.change(suspend=False)
    made.settle()


def test_a_gateway_that_cannot_go_does_not_keep_an_object_from_being_suspended() -> None:
    made = world()
    (gateway,) = [p for p in made.pods.values() if "gateway" in p["metadata"]["name"]]
    made.change(suspend=True)
    made.operate()
    made.run(2)
    made.machines[gateway["spec"]["nodeName"]].kubelet = False
    made.machines[gateway["spec"]["nodeName"]].lease_at = made.wall + 10_000
    made.run(80)  # those that hang hold up the next stage for half a minute each
    assert all("deletionTimestamp" in p["metadata"] for p in made.pods.values())


def test_an_orphaned_set_of_a_namesake_is_replaced_and_not_adopted() -> None:
    made = World(spec_of())
    made.operate()
    made.operate()
    key = Key("StatefulSet", "llm-g0-1")
    held = made.live[key]["metadata"]
    held["ownerReferences"] = []
    held["labels"] = {**held["labels"], names.OBJECT_UID: "a-former-object"}
    first = planned(made)
    assert "llm-g0-2" in applied(first) and deleted(first) == set()
    made.operate()
    assert deleted(planned(made)) == {"llm-g0-1"}


@pytest.mark.parametrize("size", [None, 1])
def test_a_set_whose_template_is_gone_stays_as_it_is(size: int | None) -> None:
    made = world()
    observed = made.observe()
    wanted = made.desired(observed)
    sizes = {} if size is None else wanted.sizes
    plan = decide(observed, Desired(wanted.children, wanted.revision, sizes), group_set)
    assert deleted(plan) == set()
    assert ("llm-g0-1" in applied(plan)) is (size is not None)


def test_the_plan_says_when_to_look_again() -> None:
    made = world(failurePolicy={"backoffBaseSeconds": 300, "backoffMaxSeconds": 300})
    for _ in range(2):
        made.rank_pods()[0]["status"] |= {"phase": "Failed", "reason": "Evicted"}
        made.operate()
        made.run(20)
    wake = planned(made).wake
    assert wake is not None and 270 < wake < 301
