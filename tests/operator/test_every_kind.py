"""Objects with children of every kind: all of them come back, and the objects stay the user's."""

import itertools
import json
from collections.abc import Iterator

import pytest

from minisgl_operator.kube import CHILDREN
from tests.cluster.apiserver import ApiServer
from tests.operator.pair import INGRESS, Pair
from tests.operator.running import Operator, install_chart, settle
from tests.support import wait_until


@pytest.fixture(scope="module")
def operator(
    foreign_types: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    install_chart(foreign_types)
    with Operator(foreign_types, tmp_path_factory.mktemp("operator")) as running:
        yield running


@pytest.fixture
def pair(foreign_types: ApiServer, operator: Operator, namespace: str) -> Pair:
    return Pair(foreign_types, namespace)


@pytest.mark.parametrize("kind", [*CHILDREN, "Secret"])
def test_h20_deleted_children_of_every_kind_come_back(pair: Pair, kind: str) -> None:
    before = pair.of(kind)
    assert before
    pair.delete_all(kind)

    def back() -> bool:
        now = pair.of(kind)
        return len(now) == len(before) and not set(now.values()) & set(before.values())

    wait_until(back, 30, lambda: f"{pair.of(kind)} after {before}")
    if kind != "StatefulSet":  # whose names count on
        assert pair.of(kind).keys() == before.keys()


def test_h54_nothing_is_written_into_an_object_but_its_status(
    pair: Pair, operator: Operator
) -> None:
    found = pair.route.kubectl.get(
        "minisglang", "route", "-n", pair.namespace, "--show-managed-fields"
    )
    fields = {
        (one["manager"], one.get("subresource", "")) for one in found["metadata"]["managedFields"]
    }
    assert fields == {("kubectl", ""), ("minisgl-operator", "status")}
    assert "kopf" not in json.dumps(found)
    assert "inconsistenc" not in operator.log()


def test_h56_a_condition_of_somebody_else_is_theirs_alone(pair: Pair) -> None:
    for number, reason in itertools.product(range(1, 4), ("Passed", "Failed")):
        audit(pair, reason)
        pair.edge.apply(**INGRESS | {"replicas": number})
        pair.edge.wait_observed()
        assert pair.edge.condition(AUDITED)["reason"] == reason
        assert pair.edge.condition("Ready")["status"]
    found = pair.api.kubectl.get(
        "minisglang", "edge", "-n", pair.namespace, "--show-managed-fields"
    )
    owners = {
        one["manager"] for one in found["metadata"]["managedFields"] if AUDITED in json.dumps(one)
    }
    assert owners == {"auditor"}
    # Two who undo each other's writes would never stop.
    settle(pair.api, 30, [pair.namespace], quiet_seconds=3)


AUDITED = "example.com/Audited"


def audit(pair: Pair, reason: str) -> None:
    """Write a condition, in front of all others."""
    condition = {
        "type": AUDITED, "status": "True", "reason": reason, "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    first = pair.edge.status["conditions"][0]["type"]
    operation = "replace" if first == AUDITED else "add"
    patch = [{"op": operation, "path": "/status/conditions/0", "value": condition}]
    pair.edge.kubectl(
        "patch", "minisglang/edge", "-n", pair.namespace, "--subresource=status",
        "--field-manager=auditor", "--type=json", f"--patch={json.dumps(patch)}",
    )  # fmt: skip
