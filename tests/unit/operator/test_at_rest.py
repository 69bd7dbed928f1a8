"""A status says nothing that moves while nothing happens: it is written once and then left."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minisgl_operator.observed import (
    Action,
    Bus,
    Key,
    Node,
    Observed,
    Post,
    Refusal,
    Warning,
    Worker,
)
from minisgl_operator.plan import decide
from minisgl_operator.status import status
from tests.unit.operator.world import START, World, group_set, spec_of

LATER = (0.3, 1.0, 2.0, 9.0, 47.0, 613.0, 86_400.0)
"""Seconds; each look is at another time, and no second one has the same parts of a second."""


def serving() -> World:
    return World(spec_of(replicas=3, parallelism={"tensor": 2})).settle()


def crashing() -> World:
    made = World(spec_of(image="bad:1", replicas=2), broken_images={"bad:1"})
    made.run(30)
    for pod in made.rank_pods():
        pod["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    made.spec["failurePolicy"]["startupTimeoutSeconds"] = 10**6
    return made


def exhausted() -> World:
    policy = {"maxGroupRestarts": 1, "startupTimeoutSeconds": 60, "backoffBaseSeconds": 4}
    made = World(spec_of(image="bad:1", failurePolicy=policy), broken_images={"bad:1"})
    made.until(lambda: made.group(0).get("phase") == "Failed")
    return made


def without_a_place() -> World:
    made = World(spec_of(replicas=2))
    for machine in made.machines.values():
        machine.cordoned = True
    made.run(70)
    made.spec["failurePolicy"]["startupTimeoutSeconds"] = 10**6
    return made


def on_a_lost_node() -> World:
    made = World(spec_of(replicas=2, parallelism={"tensor": 2})).settle()
    made.power_off("n1")
    made.run(120)
    return made


def suspended() -> World:
    made = World(spec_of(replicas=2)).settle()
    made.change(suspend=True)
    made.run(60)
    return made


def scaled_to_zero() -> World:
    made = World(spec_of(replicas=2)).settle()
    made.change(replicas=0)
    made.run(60)
    return made


def downloading() -> World:
    made = World(spec_of(model={"uri": "hf://org/model"}), model_ready=False)
    made.run(20)
    return made


WORLDS: dict[str, Callable[[], World]] = {
    "all groups serve": serving,
    "ranks crash": crashing,
    "the budget is spent": exhausted,
    "no node has room": without_a_place,
    "a node is lost": on_a_lost_node,
    "suspended": suspended,
    "no groups": scaled_to_zero,
    "the model is on its way": downloading,
}
SEEN: dict[str, dict[str, Any]] = {
    "as it is": {},
    "no Redis": {"bus": Bus("unreachable", "connection refused", unread=100.0)},
    "Redis not seen from here": {"bus": Bus("not-observable", "no route", unread=100.0)},
    "children refused": {
        "refused": {
            Key("Deployment", "llm-gateway"): Refusal("InvalidPodTemplate", "no such", START),
            Key("Service", "old"): Refusal("Forbidden", "denied", START, deletion=True),
        },
        "warnings": {Key("StatefulSet", "llm-g0-1"): Warning("FailedCreate", "exceeded quota")},
        "foreign": frozenset({Key("Service", "llm"), Key("Secret", "llm-redis")}),
    },
}


def later(observed: Observed, seconds: float, shuffled: random.Random) -> Observed:
    """The same, so many seconds later and in another order: what is silent, unread or standing
    still is so for longer, and who beats does."""

    def older(worker: Worker) -> Worker:
        silent = worker.silent + seconds if worker.silent > 5 else shuffled.random()
        return replace(worker, silent=silent, running=shuffled.randrange(9))

    def node(one: Node) -> Node:
        still = one.lease_age or 0.0
        return replace(one, lease_age=still + seconds if still > 15 else 9 * shuffled.random())

    def mixed(found: Any) -> Any:
        items = list(found.items())
        shuffled.shuffle(items)
        return dict(items)

    bus = observed.bus
    unread = bus.unread + seconds if bus.unread else 0.0
    return replace(
        observed,
        now=observed.now + seconds,
        wall=observed.wall + seconds,
        live=mixed(observed.live),
        warnings=mixed(observed.warnings),
        refused=mixed(observed.refused),
        nodes={name: node(one) for name, one in mixed(observed.nodes).items()},
        bus=replace(bus, unread=unread, workers=tuple(older(w) for w in bus.workers)),
    )


def writes(made: World, observed: Observed) -> list[Action]:
    """What the plan would have written, in an order that is not that of the sight."""
    actions = decide(observed, made.desired(observed), group_set).actions
    return sorted((one for one in actions if not isinstance(one, Post)), key=str)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("case", WORLDS)
def test_the_same_sight_at_another_time_is_the_same_status(case: str, seen: str) -> None:
    made = WORLDS[case]()
    shuffled = random.Random(case + seen)
    observed = replace(made.observe(), **SEEN[seen])
    made.status = status(observed, made.desired(observed))
    observed = replace(observed, obj=made.obj)
    for seconds in LATER:
        other = later(observed, seconds, shuffled)
        assert status(other, made.desired(other)) == made.status
        assert writes(made, other) == writes(made, observed)
