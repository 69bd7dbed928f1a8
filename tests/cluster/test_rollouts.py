"""Changes of an object under load: images, shape, number, keys."""

import base64
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import image_name
from tests.cluster.load import Load
from tests.cluster.product import GROUP, NAMESPACE, Product, Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAME = "roll"


@pytest.fixture(scope="module")
def roll(product: Product) -> Iterator[Served]:
    """Two groups of one rank; services that two pods of each role serve."""
    product.kubectl.apply(key_secret("first"))
    served = product.serve(
        NAME,
        replicas=2,
        network={"hostNetwork": False},
        failurePolicy={"heartbeatTimeoutSeconds": 8, "startupTimeoutSeconds": 60},
        gateway={
            "terminationGracePeriodSeconds": 30,
            "apiKeysSecretRef": {"name": "keys", "key": "keys"},
        },
    )
    served.settle()
    yield served
    served.delete()


def key_secret(*keys: str) -> dict[str, object]:
    data = base64.b64encode("\n".join(keys).encode()).decode()
    metadata = {"name": "keys", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"keys": data}}


def images(served: Served, role: str) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in served.pods(role)}


def test_services_roll_without_a_failed_request(roll: Served) -> None:
    """H29: Traefik sends to an old pod for two more seconds."""
    endpoint = roll.endpoint("first")
    label = {"metadata": {"labels": {"rolled": "yes"}}}
    with Load(endpoint) as long, Load(endpoint, clients=4, tokens=8) as short:
        for role in ("gateway", "tokenizer", "detokenizer"):
            before = roll.uids(role)
            roll.patch({role: {"podTemplate": label}})
            roll.wait(
                f"{role} is rolled",
                lambda role=role, before=before: (
                    (now := roll.uids(role)) != set() and not now & before
                ),
            )
            roll.settle()
            short.go_round()
        long.go_round()
    assert not long.wrong() + short.wrong()
    assert not long.refused() + short.refused()


def test_a_broken_image_stops_at_one_group_and_a_good_one_goes_on(
    product: Product, roll: Served
) -> None:
    """H25: the group that the bad image broke is replaced first, outside of the budget."""
    good, later = image_name("engine-cpu"), "ghcr.io/minisglang/minisglang-engine-cpu:later"
    for node in product.cluster.nodes:
        node.run("ctr", "--namespace=k8s.io", "images", "tag", "--force", good, later)
    with Load(roll.endpoint("first")) as load, roll.watching() as seen:
        roll.patch({"image": "ghcr.io/minisglang/none:1", "imagePullPolicy": "Never"})
        roll.wait(
            "the condition names the image",
            lambda: roll.condition("Degraded")["reason"] == "ImagePullFailed",
        )
        assert "ghcr.io/minisglang/none:1" in roll.condition("Degraded")["message"]
        load.flow()
        roll.patch({"image": later})
        roll.settle()
        load.go_round()
    assert images(roll, "rank") == images(roll, "gateway") == {later}
    assert ("Progressing", "True", "RollingOut") in seen.conditions
    assert not load.wrong()


@pytest.mark.long
def test_a_changed_shape_replaces_groups_whole(roll: Served) -> None:
    """H23, H28: no group has ranks of two shapes, and no stream notices."""
    with Load(roll.endpoint("first")) as load:
        roll.patch({"parallelism": {"tensor": 2}})
        roll.settle()
        assert [len(roll.pods("rank", group=n)) for n in (0, 1)] == [2, 2]
        load.go_round()
        roll.patch({"parallelism": {"tensor": 1}})
        roll.settle()
        assert [len(roll.pods("rank", group=n)) for n in (0, 1)] == [1, 1]
        load.go_round()
    assert not load.wrong()


def test_scaling_by_kubectl_breaks_no_stream(roll: Served) -> None:
    """H21: without a group the gateway stays, and says when to try again."""
    endpoint = roll.endpoint("first")

    def groups() -> set[str]:
        return {pod["metadata"]["labels"][f"{GROUP}/group"] for pod in roll.pods("rank")}

    def scale(count: int) -> None:
        roll.ask("scale", "msgl", NAME, f"--replicas={count}")
        roll.wait(f"{count} groups", lambda: groups() == {str(n) for n in range(count)})
        if count:
            roll.settle()

    with Load(endpoint) as load:
        scale(1)
        load.go_round()
        scale(2)
        load.go_round()
        scale(0)
        roll.wait("it says why", lambda: roll.condition("Ready")["reason"] == "ScaledToZero")
        roll.wait("nobody is ready", lambda: endpoint.status() == 503)
        refusal = endpoint.stream(endpoint.body("rivers", 4))
        assert refusal.status == 503
        scale(1)
        load.go_round()
        assert not load.wrong()
        assert {answer.status for answer in load.refused()} <= {503}
    assert roll.get()["spec"]["replicas"] == 1
    assert roll.status["selector"]


@pytest.mark.long
def test_rotated_keys_restart_nothing(product: Product, roll: Served) -> None:
    """H43: the kubelet takes up to a minute and a half, the gateway none."""
    before = roll.uids()
    old, new = roll.endpoint("first"), roll.endpoint("second")
    assert (old.status("/v1/models"), new.status("/v1/models")) == (200, 401)
    with Load(old) as load:
        product.kubectl.apply(key_secret("first", "second"))
        roll.wait("the new key opens", lambda: new.status("/v1/models") == 200)
        load.flow()
    assert not load.wrong() + [str(answer) for answer in load.refused()]
    product.kubectl.apply(key_secret("second"))
    roll.wait("the old key does not", lambda: old.status("/v1/models") == 401)
    assert roll.uids() == before
