"""One object, one endpoint: what a newcomer does, and what stays true from the first moment."""

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.cluster import HOST_NAME
from tests.cluster.load import Load
from tests.cluster.product import NAMESPACE, Product, Served
from tests.support import lines, metrics, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def smol(product: Product) -> Iterator[Served]:
    """The real model, in one group of one rank."""
    begin = time.monotonic()
    served = product.serve(
        "smol",
        model={"uri": f"pvc://models/{MODEL}", "servedName": MODEL},
        network={"hostNetwork": False},
        ingress={"host": HOST_NAME},
    )
    served.wait(
        "the endpoint is ready",
        lambda: httpx.get(f"{product.cluster.ingress}/ready").status_code == 200,
    )
    print(f"from apply to a ready endpoint: {time.monotonic() - begin:.1f} s")
    served.settle()
    yield served
    served.delete()


def pieces(answer: httpx.Response) -> Iterator[str]:
    """The texts of a streamed answer as they come."""
    for line in lines(answer):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            yield choice["delta"].get("content") or ""


def test_tokens_of_a_real_model_come_through_the_ingress_one_by_one(
    product: Product, smol: Served
) -> None:
    url = product.cluster.ingress
    before = metrics(url).get("minisgl_requests_total", 0)
    body = {
        "model": MODEL, "stream": True, "max_tokens": 1000, "ignore_eos": True, "temperature": 0,
        "messages": [{"role": "user", "content": "Name three rivers."}],
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        coming = pieces(answer)
        first = [next(coming) for _ in range(3)]
        # Its first tokens are here while the others are still computed.
        wait_until(lambda: metrics(url)["minisgl_requests_running"] == 1, 5, lambda: "nothing runs")
        # The figure of running ones may be a second old; that of the ended ones never is.
        assert metrics(url).get("minisgl_requests_total", 0) == before
        first += [next(coming) for _ in range(40)]
    text = "".join(first)
    assert "River" in text and len([piece for piece in first if piece]) > 30


def test_the_object_tells_the_truth_from_its_first_moment(product: Product, smol: Served) -> None:
    """H52: Ready is never told of an older generation, nor before the endpoint answers."""
    served = product.serve("early", network={"hostNetwork": False})
    endpoint = served.endpoint()
    try:
        told_ready = False
        limit = time.monotonic() + 120
        while not told_ready:
            assert time.monotonic() < limit, served.status
            answers = endpoint.status("/v1/models") == 200
            found = served.get()
            ready = [
                c for c in found.get("status", {}).get("conditions", ()) if c["type"] == "Ready"
            ]
            told_ready = any(c["status"] == "True" for c in ready)
            assert answers or not told_ready or endpoint.status("/v1/models") == 200
        served.settle()
        assert endpoint.status() == 200
    finally:
        served.delete()


def test_all_but_ranks_on_the_hosts_network_run_in_a_restricted_namespace(
    product: Product, smol: Served
) -> None:
    level = "pod-security.kubernetes.io/enforce"
    product.kubectl("label", "namespace", NAMESPACE, f"{level}=restricted", "--overwrite")
    served = None
    try:
        served = product.serve("strict", network={"hostNetwork": False})
        served.settle()
        served.patch({"network": {"hostNetwork": True}})
        served.wait(
            "the condition names Pod Security",
            lambda: served.condition("Degraded")["reason"] == "PodSecurityForbidden",
        )
        assert served.endpoint().status("/health") == 200
    finally:
        product.kubectl("label", "namespace", NAMESPACE, f"{level}=privileged", "--overwrite")
        if served is not None:
            served.delete()


@pytest.mark.long
def test_two_groups_of_two_ranks_on_the_hosts_network_share_a_node(product: Product) -> None:
    """H01: each group finds free ports of one range; H61: the operator speaks from its pod."""
    shape = {"tensor": 2}
    here = {"nodeSelector": {"kubernetes.io/hostname": "n2"}}
    both = [product.serve(name, parallelism=shape, ranks=here) for name in ("one", "two")]
    try:
        for served in both:
            served.settle()
            pods = served.pods("rank")
            assert len(pods) == 2 and all(pod["spec"]["hostNetwork"] for pod in pods)
            assert {pod["spec"]["nodeName"] for pod in pods} == {"n2"}
        loads = [Load(served.endpoint(), clients=2, tokens=100) for served in both]
        with loads[0], loads[1]:
            for load in loads:
                load.go_round()
        assert [load.wrong() for load in loads] == [[], []]
    finally:
        for served in both:
            served.delete()


def test_a_group_spans_two_nodes(product: Product) -> None:
    apart = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {
                        "matchLabels": {
                            "app.kubernetes.io/component": "rank",
                            "app.kubernetes.io/instance": "wide",
                        }
                    },
                }
            ]
        }
    }
    served = product.serve("wide", parallelism={"tensor": 2}, ranks={"affinity": apart})
    try:
        served.settle()
        assert {pod["spec"]["nodeName"] for pod in served.pods("rank")} == {"n1", "n2"}
        with Load(served.endpoint(), clients=2, tokens=100) as load:
            load.go_round()
        assert not load.wrong()
    finally:
        served.delete()


def test_helm_test_passes(product: Product, smol: Served) -> None:
    said = product.operator.helm("test", "minisglang", "--logs", "--timeout=2m")
    assert "Succeeded" in said
