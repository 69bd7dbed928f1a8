"""A controller whose pods are refused is asked to try again: by itself it waits ever longer."""

from dataclasses import replace
from typing import Any

import pytest

from minisgl_operator import names
from minisgl_operator.observed import Apply, Key, Manifest, Plan, Warning
from minisgl_operator.plan import decide
from minisgl_operator.plan.refused import ASK_SECONDS
from tests.unit.operator.world import World, group_set, spec_of

RANKS, GATEWAY, JOB = (
    Key("StatefulSet", "llm-g0-1"),
    Key("Deployment", "llm-gateway"),
    Key("Job", "j"),
)
REFUSED = Warning("FailedCreate", "exceeded quota: few")


def without_ranks() -> World:
    """The pods of its group were taken away, and may not come back."""
    made = World(spec_of()).settle()
    made.pods = {name: pod for name, pod in made.pods.items() if "-g0-" not in name}
    return made


def planned(made: World, after: float = 0.0, **seen: Any) -> Plan:
    observed = made.observe()
    observed = replace(observed, **{"warnings": {RANKS: REFUSED}, **seen})
    observed = replace(observed, wall=observed.wall + after, now=observed.now + after)
    return decide(observed, made.desired(observed), group_set)


def asked(plan: Plan) -> dict[Key, str]:
    """When each child's controller is asked to try again."""
    manifests: list[Manifest] = [one.manifest for one in plan.actions if isinstance(one, Apply)]
    notes = {Key.of(one): one["metadata"].get("annotations") or {} for one in manifests}
    return {k: held[names.ASKED_AGAIN] for k, held in notes.items() if names.ASKED_AGAIN in held}


def test_a_set_without_its_pods_is_asked_again_each_half_minute_and_no_sooner() -> None:
    made = without_ranks()
    first = planned(made)
    assert set(asked(first)) == {RANKS}
    assert first.wake is not None and first.wake <= ASK_SECONDS + 0.2
    # Until then all is as it was, so nothing is written.
    assert asked(planned(made, first.wake - 0.3)) == asked(first)
    second = planned(made, first.wake)
    assert asked(second)[RANKS] > asked(first)[RANKS]
    assert asked(planned(made, first.wake + ASK_SECONDS))[RANKS] > asked(second)[RANKS]


def test_a_deployment_whose_pods_are_refused_is_asked_again() -> None:
    made = World(spec_of()).settle()
    failure = {"type": "ReplicaFailure", "status": "True", "message": REFUSED.message}
    made.live[GATEWAY]["status"] = {"conditions": [failure]}
    assert set(asked(planned(made, warnings={}))) == {GATEWAY}
    failure["status"] = "False"
    assert asked(planned(made, warnings={})) == {}


@pytest.mark.parametrize("reason", ["FailedCreate", "FailedScheduling"])
def test_a_set_that_has_its_pods_or_another_trouble_is_left_alone(reason: str) -> None:
    made = World(spec_of()).settle() if reason == REFUSED.reason else without_ranks()
    assert asked(planned(made, warnings={RANKS: Warning(reason, "0/1 nodes")})) == {}


def test_a_job_is_left_alone_as_its_controller_waits_a_minute_at_most() -> None:
    made = World(spec_of()).settle()
    job: Manifest = {"kind": "Job", "metadata": {"name": JOB.name}}
    observed = replace(made.observe(), warnings={JOB: REFUSED}, live={**made.live, JOB: job})
    wanted = made.desired(observed)
    wanted = replace(wanted, children=(*wanted.children, job))
    assert asked(decide(observed, wanted, group_set)) == {}


def test_what_was_asked_stays_in_nobodys_way_when_the_pods_are_there() -> None:
    """The annotation is not taken off again: that would be one more write, for nothing."""
    made = without_ranks()
    for action in planned(made).actions:
        made.act(action)
    assert names.ASKED_AGAIN in made.live[RANKS]["metadata"]["annotations"]
    made.settle()
    assert made.operate() == []
