"""Whatever somebody writes into the labels and annotations of children, the operator goes on."""

from copy import deepcopy
from typing import Any

import pytest

from minisgl_operator import names
from minisgl_operator.desired import desired
from minisgl_operator.observed import Apply, Key, Manifest
from minisgl_operator.plan import plan
from minisgl_operator.status import status
from tests.unit.operator.cases import CASES, observe, settled

SPEC: dict[str, Any] = {**CASES["two-nodes"], "failurePolicy": {"maxGroupRestarts": 1}}


def family() -> list[Manifest]:
    """All children of an object, with what the plan remembers of its groups."""
    observed = settled(SPEC)
    live = dict(observed.live)
    for action in plan(observed, desired(observed)).actions:
        if isinstance(action, Apply):
            live[Key.of(action.manifest)] = action.manifest
    for one in live.values():
        if one["kind"] == "StatefulSet":
            failure = '{"time": "2026-01-01T00:00:00Z", "reason": "OOMKilled", "message": ""}'
            one["metadata"]["annotations"] |= {
                names.RESTARTS: "2", names.SPENT: "1", names.LAST_RESTART: "2026-01-01T00:00:00Z",
                names.LAST_FAILURE: failure, names.SERVED: "2026-01-01T00:00:00Z",
                names.HAS_SERVED: "true", names.NOT_BEFORE: "2026-01-01T00:00:00Z",
                names.AVOIDED: "n1,n2", names.FAILED: "true",
            }  # fmt: skip
    return list(live.values())


@pytest.mark.parametrize(
    "garbage", [None, "", "garbage", "-1", "1e9", "9" * 40, "{}", '{"time":1}']
)
def test_no_label_and_no_annotation_of_a_child_can_stop_the_operator(garbage: str | None) -> None:
    children = family()
    spoilt = 0
    for child in children:
        for part in ("labels", "annotations"):
            for key in child["metadata"].get(part, {}):
                other = deepcopy(child)
                if garbage is None:
                    del other["metadata"][part][key]
                else:
                    other["metadata"][part][key] = garbage
                observed = observe(SPEC, [one for one in children if one is not child] + [other])
                wanted = desired(observed)
                assert plan(observed, wanted).actions, f"{Key.of(child)} {key}"
                assert status(observed, wanted)["conditions"]
                spoilt += 1
    assert spoilt > 100
