"""Field cases that need pods which run; docs/kubernetes/field-cases.md lists all of them."""

import threading
from collections.abc import Iterator

import pytest

from tests.cluster import network
from tests.cluster.load import Load
from tests.cluster.product import NAMESPACE, Manifest, Product, Served
from tests.hub_server import Hub, serving
from tests.support import metrics, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
INSIDE = {"hostNetwork": False}


@pytest.fixture
def made(product: Product) -> Iterator[list[Served]]:
    """The objects of a test, which are deleted after it."""
    objects: list[Served] = []
    yield objects
    for served in objects:
        served.delete()


def test_a_crash_that_repeats_ends_with_its_first_error_line(
    product: Product, made: list[Served]
) -> None:
    """H14, H16: a budget, and the reason where one looks for it."""
    served = product.serve(
        "doomed",
        model={"uri": "pvc://models/none", "servedName": "doomed"},
        network=INSIDE,
        failurePolicy={
            "restartPolicy": "RecreateGroup", "maxGroupRestarts": 1,
            "backoffBaseSeconds": 1, "backoffMaxSeconds": 1,
        },
    )  # fmt: skip
    made.append(served)
    served.wait(
        "the budget is spent",
        lambda: served.condition("Degraded")["reason"] == "RestartBudgetExhausted",
    )
    (group,) = served.status["groups"]
    assert group["phase"] == "Failed" and group["restarts"] == 1
    assert "/none" in group["lastFailure"]["message"]
    assert group["lastFailure"]["exitCode"] > 0


@pytest.mark.long
def test_a_model_that_loads_for_long_is_not_killed(product: Product, made: list[Served]) -> None:
    """H39: liveness would have ended it three times over."""
    slow = 'sleep 50; exec minisgl "$@"'
    served = product.serve(
        "slow",
        network=INSIDE,
        ranks={
            "podTemplate": {
                "spec": {"containers": [{"name": "rank", "command": ["sh", "-c", slow, "minisgl"]}]}
            }
        },
    )
    made.append(served)
    served.settle()
    (pod,) = served.pods("rank")
    assert [s["restartCount"] for s in pod["status"]["containerStatuses"]] == [0]


def limited(**quota: str) -> list[Manifest]:
    """A class of pods, and how much of it its namespace may have."""
    scope = {"operator": "In", "scopeName": "PriorityClass", "values": ["limited"]}
    return [
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1,
         "metadata": {"name": "limited"}},
        {"apiVersion": "v1", "kind": "ResourceQuota",
         "metadata": {"name": "limited", "namespace": NAMESPACE},
         "spec": {"hard": quota, "scopeSelector": {"matchExpressions": [scope]}}},
    ]  # fmt: skip


@pytest.mark.long
def test_pods_that_a_quota_refused_for_long_come_soon_after_it_is_raised(
    product: Product, made: list[Served]
) -> None:
    """Their controllers wait twice as long after each refusal, and would not notice for minutes."""
    product.kubectl.apply(*limited(pods="0"))
    template = {"podTemplate": {"spec": {"priorityClassName": "limited"}}}
    served = product.serve(
        "poor", network=INSIDE, ranks={"priorityClassName": "limited"}, tokenizer=template
    )
    made.append(served)

    def refusals() -> int:
        about = "--field-selector=reason=FailedCreate,involvedObject.name=poor-g0-1"
        return sum(event["count"] for event in served.get("events", about)["items"])

    served.wait("the next try is minutes away", lambda: refusals() > 15)
    told = served.condition("Degraded")
    assert told["reason"] == "QuotaExceeded" and "poor-g0-1 gets no pod" in told["message"]
    product.kubectl.apply(*limited(pods="9"))
    served.wait(
        "both have their pod", lambda: bool(served.pods("rank") and served.pods("tokenizer")), 60
    )
    served.settle()


@pytest.fixture
def hub(product: Product) -> Iterator[tuple[Hub, str]]:
    """A hub with one model, and where pods reach it."""
    held = Hub()
    files = (product.cluster.models / "tiny").iterdir()
    held.add("org/tiny", {path.name: path.read_bytes() for path in files})
    with serving(held, network.HOST) as url:
        yield held, url


def test_one_job_downloads_for_all(
    product: Product, made: list[Served], hub: tuple[Hub, str]
) -> None:
    """H41: also when its transfer breaks off; ranks mount the claim read-only."""
    held, url = hub
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "cache", "namespace": NAMESPACE},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    product.kubectl.apply(claim)
    held.break_off.add("model.safetensors")
    env = [{"name": "HF_ENDPOINT", "value": url}]
    served = product.serve(
        "hub",
        replicas=2,
        model={
            "uri": "hf://org/tiny",
            "servedName": "hub",
            "cache": {"persistentVolumeClaim": {"claimName": "cache"}},
            "download": {
                "podTemplate": {"spec": {"containers": [{"name": "download", "env": env}]}}
            },
        },
        network=INSIDE,
    )
    made.append(served)
    with served.watching() as seen:
        served.settle()
    weights = [r for r in held.requests if r.startswith("GET") and "model.safetensors" in r]
    assert len(weights) == 2, held.requests  # the second goes on where the first one stopped
    assert ("ModelCached", "True", "Cached") in seen.conditions
    for pod in served.pods("rank"):
        (mount,) = (
            m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["mountPath"] == "/models"
        )
        assert mount["readOnly"]
    assert served.status["modelRevision"]
    with Load(served.endpoint(), clients=2, tokens=50) as load:
        load.go_round()
    assert not load.wrong()


def test_a_client_that_leaves_frees_its_place_and_a_full_queue_says_so(
    product: Product, made: list[Served]
) -> None:
    """H48, H49: through the ingress."""
    served = product.serve(
        "narrow",
        network=INSIDE,
        engine={
            "device": "cpu", "dtype": "float32", "maxRunningRequests": 1,
            "extraArgs": ["--num-pages=8192"],
        },
        gateway={"maxQueuedRequests": 1, "terminationGracePeriodSeconds": 30},
    )  # fmt: skip
    made.append(served)
    served.settle()
    endpoint = served.endpoint()
    (gateway,) = served.pods("gateway")
    address = f"http://{gateway['status']['podIP']}:8000"
    with Load(endpoint, clients=1, tokens=3000):
        waiting = threading.Thread(
            target=endpoint.stream, args=(endpoint.body("owls", 1),), daemon=True
        )
        waiting.start()
        wait_until(
            lambda: metrics(address)["minisgl_requests_waiting"] == 1, 30, lambda: "nobody waits"
        )
        refused = endpoint.stream(endpoint.body("bread", 1))
        assert refused.status == 429 and "queue" in refused.error
    wait_until(
        lambda: metrics(address)["minisgl_requests_running"] == 0,
        30,
        lambda: "a request runs for a client that has left",
    )
    waiting.join(60)
    assert not waiting.is_alive()
