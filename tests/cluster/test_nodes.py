"""A node without power, on a cluster with Kubernetes' own time-outs.

Kubernetes alone takes six minutes, and leaves the pods of a StatefulSet Terminating for ever.
"""

import time
from collections.abc import Iterator

import pytest

from tests.cluster.load import Load
from tests.cluster.product import NAMESPACE, OPERATOR, SYSTEM, Product, Served, on_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAME = "pair"
ON_N1 = {"podTemplate": on_node("n1")}


def spread() -> dict[str, object]:
    """The groups on different nodes, where that is possible."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {
            "matchLabels": {
                "app.kubernetes.io/component": "rank",
                "app.kubernetes.io/instance": NAME,
            }
        },
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


@pytest.fixture(scope="module")
def pair(product: Product) -> Iterator[Served]:
    """A group on each node; gateway, tokenizer and detokenizer on n1."""
    served = product.serve(
        NAME,
        replicas=2,
        network={"hostNetwork": False},
        ranks={"affinity": spread(), "terminationGracePeriodSeconds": 20},
        gateway={"terminationGracePeriodSeconds": 30, **ON_N1},
        tokenizer=ON_N1,
        detokenizer=ON_N1,
    )
    served.settle()
    yield served
    served.delete()


def place(product: Product, namespace: str, selector: str, node: str) -> None:
    """Move the pods of a Deployment to a node, once."""
    kubectl = product.kubectl
    others = [one.name for one in product.cluster.nodes if one.name != node]
    where = (f"--namespace={namespace}", f"--selector={selector}")

    def nodes() -> list[tuple[str, bool]]:
        return [
            (
                pod["spec"].get("nodeName", ""),
                all(s["ready"] for s in pod["status"].get("containerStatuses", ())),
            )
            for pod in kubectl.get("pods", *where)["items"]
        ]

    now = nodes()
    assert now, f"no pod has {selector}"
    if now == [(node, True)]:
        return
    for other in others:
        kubectl("cordon", other)
    try:
        kubectl("delete", "pods", *where, "--wait=false")
        kubectl.wait_for(f"it is on {node}", lambda: nodes() == [(node, True)], 120, "pods -A")
    finally:
        for other in others:
            kubectl("uncordon", other)


def on_both(served: Served) -> None:
    """Until each node has a group; a new revision spreads what a loss has put together."""
    if {pod["spec"]["nodeName"] for pod in served.pods("rank")} != {"n1", "n2"}:
        served.patch({"restartedAt": str(time.time())})
        served.settle()
    assert {pod["spec"]["nodeName"] for pod in served.pods("rank")} == {"n1", "n2"}


@pytest.mark.parametrize(
    "lost", ["a group", pytest.param("a group, Redis and the operator", marks=pytest.mark.long)]
)
def test_streams_outlive_a_node_and_its_group_moves(
    product: Product, pair: Served, lost: str
) -> None:
    """H18: nothing is deleted by force."""
    node = product.cluster.nodes[1]
    away = "n2" if "Redis" in lost else "n1"
    place(product, SYSTEM, OPERATOR, away)
    place(
        product, NAMESPACE,
        f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component=redis", away,
    )  # fmt: skip
    product.operator.wait()
    pair.settle()
    on_both(pair)
    lives = pair.lives()
    with Load(pair.endpoint()) as load, pair.watching() as seen:
        begin = time.monotonic()
        node.power_cut()
        try:
            load.flow(180)
            print(f"\n{lost}: streams go on after {time.monotonic() - begin:.1f} s")
            pair.wait(
                "both groups serve on n1",
                lambda: (
                    {pod["spec"].get("nodeName") for pod in pair.pods("rank")} == {"n1"}
                    and pair.condition("RanksReady")["status"] == "True"
                ),
                300,
            )
            print(f"{lost}: both groups serve after {time.monotonic() - begin:.1f} s")
            load.go_round()
        finally:
            node.power_on()
        product.cluster.wait_until_ready()
        pair.settle()
        load.go_round()
    assert not load.wrong()
    assert ("Degraded", "True", "NodeLost") in seen.conditions
    # One group has another epoch, the other one has not moved.
    assert len(lives & pair.lives()) == 1
