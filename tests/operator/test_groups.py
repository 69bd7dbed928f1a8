"""Groups of ranks under the real controllers of Kubernetes, on nodes that the test plays."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from minisgl.messages import WorkerState, encode_state
from tests.cluster.apiserver import ApiServer
from tests.cluster.programs import Unavailable
from tests.operator.nodes import Node, Nodes
from tests.operator.objects import Object
from tests.operator.running import Operator, install_chart
from tests.redis_server import PASSWORD, RedisServer
from tests.support import wait_until

CONTROLLERS = (
    "statefulset-controller", "deployment-controller", "replicaset-controller",
    "serviceaccount-controller", "garbage-collector-controller", "namespace-controller",
    "persistentvolumeclaim-protection-controller",
)  # fmt: skip
OLD, NEW, BAD = "registry.example/engine:old", "registry.example/engine:new", "registry.example/bad"
SETTLES = 60.0
ROLES = ("gateway", "tokenizer", "detokenizer", "rank")
"""Whose pods speak on the bus."""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ApiServer]:
    try:
        server = ApiServer(controllers=CONTROLLERS)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with server:
        install_chart(server)
        server.kubectl("wait", "--for=condition=Established", "crd/minisglangs.minisglang.io")
        yield server


@pytest.fixture(scope="module")
def operator(cluster: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    with Operator(cluster, tmp_path_factory.mktemp("operator")) as running:
        yield running


@pytest.fixture(scope="module")
def bus() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@dataclass
class Stage:
    """An object of one namespace, and the nodes that its pods run on."""

    nodes: Nodes
    qwen: Object
    bus: RedisServer

    def speak(self) -> None:
        """Let workers be heard on the bus from now on."""
        step = Beats(self).step
        self.qwen = Object(self.qwen.kubectl, self.qwen.namespace, step=step)

    def apply(self, **spec: Any) -> None:
        """The object; its Redis is one that runs already."""
        secret = {"name": "bus", "key": "password"}
        address = f"127.0.0.1:{self.bus.port}"
        external = {"address": address, "passwordSecretRef": secret}
        self.qwen.apply(**{"image": OLD, "redis": {"external": external}, **spec})

    def ready(self, **spec: Any) -> "Stage":
        """The object, once all of it serves."""
        self.apply(**spec)
        self.settle()
        return self

    def settle(self) -> None:
        self.qwen.wait(self.settled, SETTLES)

    def settled(self) -> bool:
        found = self.qwen.get()
        status = found.get("status", {})
        wanted = found["spec"]["replicas"]
        return bool(
            status.get("observedGeneration") == found["metadata"]["generation"]
            and status["readyReplicas"] == status["updatedReplicas"] == wanted
            and len(self.qwen.sets()) == wanted
        )

    def wait_degraded(self, reason: str, *words: str) -> str:
        """Until condition Degraded has this reason and these words; its message."""

        def told() -> bool:
            found = self.qwen.condition("Degraded")
            return found["reason"] == reason and all(word in found["message"] for word in words)

        self.qwen.wait(told, SETTLES)
        return self.qwen.condition("Degraded")["message"]

    def images(self) -> list[str]:
        """Of each rank pod that serves, sorted."""
        return sorted(image(p) for p in self.nodes.pods().values() if serves(p))

    def least(self) -> int:
        """The fewest rank pods that served at any step since the last look here."""
        seen, self.nodes.seen = self.nodes.seen, []
        return min(sum(serves(p) for p in pods.values()) for pods in seen)


def serves(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def image(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["image"])


def group_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["minisglang.io/group"])


@pytest.fixture
def stage(
    cluster: ApiServer, operator: Operator, bus: RedisServer, namespace: str
) -> Iterator[Stage]:
    """Two nodes, each with room for eight ranks, and a claim that holds the model."""
    metadata = {"name": "bus", "namespace": namespace}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    cluster.kubectl.apply({**secret, "stringData": {"password": PASSWORD}})
    make_claim(cluster, namespace, "models", "ReadOnlyMany")
    nodes = Nodes(cluster, namespace, {name: Node(name) for name in ("n1", "n2")})
    nodes.join()
    yield Stage(nodes, Object(cluster.kubectl, namespace, step=nodes.step), bus)
    cluster.kubectl("delete", "minisglang", "--all", "-n", namespace, "--wait=false")
    nodes.leave()


@pytest.fixture
def namespace(cluster: ApiServer) -> str:
    name = f"groups-{next(_numbers)}"
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


def make_claim(api: ApiServer, namespace: str, name: str, mode: str) -> None:
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": name, "namespace": namespace}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
    api.kubectl.apply({**claim, "spec": spec})


def test_h11_a_class_that_is_missing_is_named_in_a_condition(stage: Stage) -> None:
    stage.apply(ranks={"runtimeClassName": "nvidia"})
    message = stage.wait_degraded("Forbidden", 'RuntimeClass "nvidia" not found')
    assert "StatefulSet qwen-g0-1 gets no pod" in message
    template = {"spec": {"priorityClassName": "web"}}
    stage.apply(gateway={"podTemplate": template})
    message = stage.wait_degraded("Forbidden", "no PriorityClass with name web")
    assert "Deployment qwen-gateway gets no pod" in message
    stage.ready()
    stage.qwen.wait(lambda: stage.qwen.condition("Degraded")["status"] == "False")


def test_h18_a_pod_that_cannot_go_from_a_lost_node_blocks_nothing_and_is_not_forced(
    stage: Stage,
) -> None:
    nodes = stage.nodes
    nodes.nodes |= {"n3": Node("n3", ranks=0)}
    nodes.nodes["n1"].ranks = nodes.nodes["n2"].ranks = 1
    nodes.join()
    stage.speak()
    stage.ready(parallelism={"tensor": 2})
    (stuck,) = [n for n, pod in nodes.pods().items() if pod["spec"]["nodeName"] == "n2"]
    nodes.nodes["n2"].power, nodes.nodes["n3"].ranks = False, 1
    nodes.tell("n2", "Unknown")
    stage.qwen.kubectl("delete", "pod", stuck, "-n", stage.qwen.namespace, "--wait=false")
    stage.wait_degraded("NodeLost", "node n2", stuck, "nothing is deleted by force")

    def elsewhere() -> bool:
        group = stage.qwen.group(0)
        return group.get("phase") == "Ready" and group["epoch"] == 2

    stage.qwen.wait(elsewhere, SETTLES)
    assert stage.qwen.group(0)["lastFailure"]["reason"] == "NodeLost"
    assert stage.qwen.group(0)["nodes"] == ["n1", "n3"]
    assert "deletionTimestamp" in nodes.pods()[stuck]["metadata"]
    nodes.nodes["n2"].power = True
    nodes.tell("n2", "True")
    stage.settle()
    assert stuck not in nodes.pods()


class Beats:
    """What ready workers on nodes with power say on the bus, for as long as they are asked."""

    def __init__(self, stage: Stage) -> None:
        self._nodes, self._qwen = stage.nodes, stage.qwen
        self._redis = stage.bus.client()
        self._count = 0

    def step(self) -> None:
        self._nodes.step()
        self._count += 1
        for name, pod in self._nodes.pods("").items():
            at, labels = pod["spec"].get("nodeName"), pod["metadata"]["labels"]
            role = labels.get("app.kubernetes.io/component")
            if role not in ROLES or not (at and self._nodes.nodes[at].power and serves(pod)):
                continue
            service = f"{self._qwen.namespace}.qwen.{labels['minisglang.io/uid'][:8]}"
            id = name
            if role == "rank":
                group = f"g{group_of(pod)}-{labels['minisglang.io/epoch']}"
                id = f"{group}/{labels['apps.kubernetes.io/pod-index']}"
            state = WorkerState(role=role, id=id, boot=1, beat=self._count, pod=name)
            self._redis.set(f"minisgl:{{{service}}}:state:{role}:{id}", encode_state(state))


def test_h23_h28_groups_are_replaced_whole_and_never_hold_pods_of_two_revisions(
    stage: Stage,
) -> None:
    stage.ready(parallelism={"tensor": 2})
    stage.apply(parallelism={"tensor": 3}, image=NEW)
    stage.settle()
    assert stage.images() == [NEW] * 3
    assert {name.rpartition("-")[0] for name in stage.nodes.pods()} == {"qwen-g0-2"}
    for pods in stage.nodes.seen:
        assert len({image(pod) for pod in pods.values()}) <= 1


def test_h24_by_default_one_group_is_down_and_none_is_added(stage: Stage) -> None:
    for node in stage.nodes.nodes.values():
        node.ranks = 1  # with a surge, the new group would wait for ever
    stage.ready(replicas=2)
    stage.least()
    stage.apply(replicas=2, image=NEW)
    stage.settle()
    assert stage.images() == [NEW, NEW]
    assert max(len(pods) for pods in stage.nodes.seen) == 2
    assert stage.least() == 1


@pytest.mark.parametrize(
    ("trouble", "reason", "words"),
    [
        ("missing_images", "ImagePullFailed", f"image {BAD}"),
        ("broken_images", "BackOff", "RuntimeError: broken image"),
    ],
)
def test_h25_a_good_image_rolls_out_after_a_bad_one(
    stage: Stage, trouble: str, reason: str, words: str
) -> None:
    policy = {"heartbeatTimeoutSeconds": 5}
    stage.speak()
    getattr(stage.nodes, trouble).add(BAD)
    stage.ready(replicas=2, failurePolicy=policy)
    stage.least()
    stage.apply(replicas=2, failurePolicy=policy, image=BAD)
    stage.wait_degraded(reason, words)
    stage.qwen.wait(lambda: set(stage.nodes.pods()) == {"qwen-g0-2-0", "qwen-g1-1-0"})
    assert stage.images() == [OLD]
    stage.apply(replicas=2, failurePolicy=policy, image=NEW)
    stage.settle()
    assert stage.images() == [NEW, NEW]
    assert stage.least() == 1


def test_h26_a_single_group_without_surge_goes_down_and_comes_back(stage: Stage) -> None:
    stage.ready()
    stage.least()
    stage.apply(image=NEW)
    stage.settle()
    assert stage.images() == [NEW]
    assert stage.least() == 0


def test_h35_an_object_and_its_namespace_go_without_the_operator(
    stage: Stage, operator: Operator, request: pytest.FixtureRequest
) -> None:
    stage.ready()
    kubectl, namespace = stage.qwen.kubectl, stage.qwen.namespace
    assert operator.stop() == 0
    request.addfinalizer(operator.start)
    kubectl("delete", "minisglang/qwen", "-n", namespace, "--wait=false")
    stepping(stage, lambda: not stage.qwen.children())
    kubectl("delete", "namespace", namespace, "--wait=false")
    stepping(stage, lambda: namespace not in kubectl("get", "namespaces", "-o", "name"))


def stepping(stage: Stage, condition: Callable[[], bool]) -> None:
    """Until something holds, also where the object is gone."""

    def holds() -> bool:
        stage.nodes.step()
        return condition()

    shown = ("get", "all,pvc", "-n", stage.qwen.namespace)
    wait_until(holds, SETTLES, lambda: stage.qwen.kubectl(*shown))


def test_h40_a_claim_that_one_node_only_can_mount_is_named_with_the_reason(
    stage: Stage,
) -> None:
    make_claim(stage.nodes.api, stage.qwen.namespace, "single", "ReadWriteOnce")
    for node in stage.nodes.nodes.values():
        node.ranks = 1
    stage.nodes.held_pods.add("qwen-g1-1-0")  # as a kubelet that waits for a volume
    stage.apply(replicas=2, model={"uri": "pvc://single/m"})
    message = stage.wait_degraded("VolumeUnavailable", "single is ReadWriteOnce")
    assert "n1, n2" in message and "qwen-g1-1-0 waits" in message


def test_h52_ready_is_never_told_of_a_generation_whose_ranks_crash(stage: Stage) -> None:
    stage.speak()
    stage.nodes.broken_images.add(BAD)
    stage.ready()
    stage.qwen.wait(lambda: stage.qwen.condition("Ready")["status"] == "True")
    stage.apply(image=BAD)
    told = []

    def crashes() -> bool:
        found = stage.qwen.get()
        conditions = {c["type"]: c for c in found["status"]["conditions"]}
        if conditions["Ready"]["observedGeneration"] != found["metadata"]["generation"]:
            return False
        told.append(conditions["Ready"]["status"])
        return bool(conditions["Degraded"]["reason"] == "BackOff")

    stage.qwen.wait(crashes, SETTLES)
    assert set(told) == {"False"}
    assert stage.qwen.condition("Progressing")["reason"] != "RolloutComplete"
    stage.apply(image=NEW)
    stage.settle()
    stage.qwen.wait(lambda: stage.qwen.condition("Ready")["status"] == "True")


def test_h57_a_pod_without_a_place_is_told_in_the_words_of_the_scheduler(stage: Stage) -> None:
    for node in stage.nodes.nodes.values():
        node.ranks = 0
    stage.apply()
    stage.wait_degraded("InsufficientCapacity", "0/2 nodes are available: no room for ranks")
    # Until its pod is ready the gateway comes first.
    stage.qwen.wait(lambda: stage.qwen.condition("Ready")["reason"] == "InsufficientCapacity")
    assert "qwen-g0-1-0" in stage.qwen.condition("Ready")["message"]


def test_h57_a_pod_that_is_gated_is_told(stage: Stage) -> None:
    gated = {"schedulingGates": [{"name": "example.com/quota"}]}
    stage.apply(ranks={"podTemplate": {"spec": gated}})
    stage.wait_degraded("InsufficientCapacity", "qwen-g0-1-0", "scheduling gates")


def test_h58_the_longest_name_gets_all_its_pods(stage: Stage) -> None:
    longest = Object(stage.qwen.kubectl, stage.qwen.namespace, "q" * 40, step=stage.nodes.step)
    stage.qwen = longest
    stage.ready(parallelism={"tensor": 2})
    assert set(stage.nodes.pods()) == {f"{longest.name}-g0-1-0", f"{longest.name}-g0-1-1"}
