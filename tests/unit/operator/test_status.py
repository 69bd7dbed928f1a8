"""The status: counts, groups and conditions, out of what is seen."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from minisgl_operator import names
from minisgl_operator.observed import Bus, Key, Observed, Refusal, Warning, Worker
from minisgl_operator.status import status, url
from minisgl_operator.status.conditions import TYPES
from minisgl_operator.times import rfc3339
from tests.unit.operator.world import World, object_of, set_condition, spec_of

CLAIM = {"spec": {"accessModes": ["ReadWriteMany"]}}
CRD = Path(__file__).parents[3] / "helm/minisglang/templates/crd.yaml"


def world(**spec: Any) -> World:
    return World(spec_of(**spec)).settle()


def told(made: World, **seen: Any) -> dict[str, Any]:
    observed = replace(made.observe(), claims={"models": CLAIM}, **seen)
    return status(observed, made.desired(observed))


def conditions(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in found["conditions"]}


def message(found: dict[str, Any], kind: str) -> str:
    return str(next(c["message"] for c in found["conditions"] if c["type"] == kind))


def test_an_object_that_serves() -> None:
    made = world(replicas=2, parallelism={"tensor": 2})
    found = told(made)
    assert conditions(found) == {
        "Ready": ("True", "Serving"),
        "Progressing": ("False", "RolloutComplete"),
        "Degraded": ("False", "AsWanted"),
        "RedisReady": ("True", "Answering"),
        "RanksReady": ("True", "PodsReady"),
        "TokenizersReady": ("True", "PodsReady"),
        "DetokenizersReady": ("True", "PodsReady"),
        "GatewayReady": ("True", "PodsReady"),
    }
    assert found["replicas"] == found["readyReplicas"] == found["updatedReplicas"] == 2
    assert found["groupPhases"] == {"Ready": 2}
    assert found["currentRevision"] == found["updateRevision"]
    assert found["selector"].endswith("apps.kubernetes.io/pod-index=0")
    (first, _) = found["groups"]
    assert first["ranks"] == first["readyRanks"] == 2 and first["nodes"] == ["n1"]
    assert first["incarnation"] == "0123456789abcdef"


def test_a_group_that_ends_is_no_scaling_from_a_number_to_the_same() -> None:
    made = world(replicas=2)
    made.change(replicas=0)
    made.operate()
    text = message(made.status, "Progressing")
    assert text == "2 groups that are not wanted any more end"
    assert conditions(made.status)["Progressing"] == ("True", "Scaling")


def test_one_group_and_one_pod_are_told_of_in_the_singular() -> None:
    made = world(replicas=1)
    assert message(made.status, "Ready") == "1 of 1 group serves llm"
    assert message(made.status, "GatewayReady") == "Deployment llm-gateway: 1 of 1 pod is ready"
    made.change(replicas=0)
    made.operate()
    assert message(made.status, "Progressing") == "1 group that is not wanted any more ends"


def test_h52_ready_waits_for_a_group_of_this_generation() -> None:
    made = world(replicas=2, rolloutStrategy={"maxUnavailable": 1})
    made.change(image="good:2")
    made.operate()
    seen: list[tuple[int, str]] = []
    while not made.settled():
        ready = made.condition("Ready")
        assert made.status["observedGeneration"] == ready["observedGeneration"] == 2
        serving = [
            g for g in made.status["groups"]
            if g["phase"] == "Ready" and g["revision"] == made.status["updateRevision"]
        ]  # fmt: skip
        assert (ready["status"] == "True") is bool(serving)
        seen.append((made.status["updatedReplicas"], made.condition("Progressing")["reason"]))
        made.step()
        made.operate()
    assert {reason for _, reason in seen} <= {"RollingOut", "Starting"}
    assert made.condition("Progressing")["reason"] == "RolloutComplete"


def test_h52_an_object_whose_ranks_crash_is_neither_ready_nor_complete() -> None:
    made = World(spec_of(image="bad:1"), broken_images={"bad:1"})
    made.run(40)
    for pod in made.rank_pods():
        state = pod["status"]["containerStatuses"][0]
        state["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    found = conditions(told(made))
    assert found["Ready"] == ("False", "GroupRestarting")
    assert found["Progressing"][0] == "True" and found["Degraded"] == ("True", "BackOff")
    assert "this image is broken" in message(told(made), "Degraded")


def test_h56_conditions_merge_by_type_and_keep_the_time_of_their_last_change() -> None:
    made = world()
    foreign = {
        "type": "example.com/Checked", "status": "True", "reason": "Ours", "message": "",
        "lastTransitionTime": "2020-01-01T00:00:00Z",
    }  # fmt: skip
    made.status["conditions"].append(foreign)
    before = {c["type"]: c for c in made.status["conditions"]}
    made.run(50)
    made.crash(made.rank_pods()[0])
    made.operate()
    after = {c["type"]: c for c in made.status["conditions"]}
    assert after["example.com/Checked"] == foreign
    kept = "GatewayReady"
    assert after[kept]["lastTransitionTime"] == before[kept]["lastTransitionTime"]
    assert after["Ready"]["status"] == "False"
    assert after["Ready"]["lastTransitionTime"] > before["Ready"]["lastTransitionTime"]
    assert len(after) == len(made.status["conditions"])


def test_h56_a_change_of_message_alone_keeps_the_time() -> None:
    made = world(replicas=2)
    before = made.condition("Ready")
    made.run(5)
    made.crash(made.rank_pods()[0])
    made.operate()
    after = made.condition("Ready")
    assert after["message"] != before["message"]
    assert after["lastTransitionTime"] == before["lastTransitionTime"]


SCHEDULER = {
    "the scheduler says why": ("Unschedulable", "0/3 nodes are available: 3 Insufficient gpu."),
    "gated, without any message": ("SchedulingGated", ""),
}


@pytest.mark.parametrize("case", SCHEDULER)
def test_h57_a_pod_without_a_node_shows_the_schedulers_words(case: str) -> None:
    reason, text = SCHEDULER[case]
    made = World(spec_of())
    for machine in made.machines.values():
        machine.cordoned = True
    made.run(3)
    for pod in made.rank_pods():
        set_condition(pod, "PodScheduled", False, made.wall, reason, text)
    ready = [p for p in made.pods.values() if p not in made.rank_pods()]
    for pod in ready:
        pod["spec"]["nodeName"] = "n1"
        pod["status"]["phase"] = "Running"
        set_condition(pod, "Ready", True, made.wall)
    found = told(made)
    assert conditions(found)["Ready"] == ("False", "InsufficientCapacity")
    assert conditions(found)["Degraded"] == ("True", "InsufficientCapacity")
    assert "llm-g0-1-0" in message(found, "Ready") and (text or reason) in message(found, "Ready")


def test_h57_a_pod_that_no_scheduler_has_looked_at_is_named() -> None:
    made = World(spec_of())
    made.operate()
    made.operate()
    made.wall += 1
    made._controllers()
    for pod in made.rank_pods():
        pod["spec"]["schedulerName"] = "volcano"
    seen = Bus("ok")
    for pod in made.pods.values():
        if pod not in made.rank_pods():
            set_condition(pod, "Ready", True, made.wall)
    found = told(made, bus=seen)
    assert conditions(found)["Ready"] == ("False", "WaitingForRanks")
    assert "volcano has not looked at it" in message(found, "Ready")


def waiting(reason: str, text: str) -> dict[str, Any]:
    return {"name": "rank", "image": "x:1", "state": {"waiting": {"reason": reason,
                                                                  "message": text}}}  # fmt: skip


DEGRADED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a foreign object": (
        {"foreign": frozenset({Key("Service", "llm")})}, "NameConflict", "Service llm exists",
    ),
    "a refused template": (
        {"refused": {Key("Deployment", "llm-gateway"):
                     Refusal("InvalidPodTemplate", "no such", 0)}},
        "InvalidPodTemplate", "Deployment llm-gateway was refused: no such",
    ),
    "a set that may not create pods": (
        {"warnings": {Key("StatefulSet", "llm-g0-1"):
                      Warning("FailedCreate", "violates PodSecurity")}},
        "PodSecurityForbidden", "violates PodSecurity",
    ),
    "a quota": (
        {"warnings": {Key("StatefulSet", "llm-g0-1"):
                      Warning("FailedCreate", "exceeded quota: q")}},
        "QuotaExceeded", "exceeded quota: q",
    ),
    "a missing RuntimeClass": (
        {"warnings": {Key("StatefulSet", "llm-g0-1"):
                      Warning("FailedCreate", "pod rejected: RuntimeClass nvidia not found")}},
        "Forbidden", "RuntimeClass nvidia",
    ),
}  # fmt: skip


@pytest.mark.parametrize("suspend", [False, True])
def test_a_child_that_a_finalizer_keeps_is_named_once_it_is_overdue(suspend: bool) -> None:
    made = world(suspend=suspend) if not suspend else World(spec_of(suspend=True))
    if suspend:
        made.operate()
    gone = {"name": "llm-old", "deletionTimestamp": rfc3339(made.wall),
            "finalizers": ["foregroundDeletion", "example.com/b", "example.com/a"]}  # fmt: skip
    live = {**made.live, Key("Service", "llm-old"): {"kind": "Service", "metadata": gone}}
    assert conditions(told(made, live=live))["Degraded"][0] == "False"
    found = told(made, live=live, wall=made.wall + 31)
    assert conditions(found)["Degraded"] == ("True", "Forbidden")
    assert message(found, "Degraded") == (
        "Service llm-old was deleted and stays: nobody removes its finalizer "
        "example.com/a, example.com/b"
    )


def test_a_pod_that_a_finalizer_keeps_is_named_and_its_group_goes_on_without_it() -> None:
    made = world()
    (pod,) = made.rank_pods()
    pod["metadata"]["finalizers"] = ["example.com/audit"]
    made.terminate(pod)
    made.run(60)
    assert made.status["readyReplicas"] == 1
    text = "nobody removes its finalizer example.com/audit"
    assert made.group(0)["lastFailure"]["message"].endswith(text)
    assert conditions(made.status)["Degraded"] == ("True", "Forbidden")
    assert message(made.status, "Degraded").startswith("pod llm-g0-1-0 was deleted and stays")


@pytest.mark.parametrize("case", DEGRADED)
def test_degraded_names_the_child_and_the_cause(case: str) -> None:
    seen, reason, text = DEGRADED[case]
    made = world()
    if "warnings" in seen:
        made.pods = {n: p for n, p in made.pods.items() if "-g0-" not in n}
    found = told(made, **seen)
    assert conditions(found)["Degraded"] == ("True", reason)
    assert text in message(found, "Degraded")


def test_a_failed_create_that_is_over_is_not_told() -> None:
    made = world()
    event = {Key("StatefulSet", "llm-g0-1"): Warning("FailedCreate", "exceeded quota")}
    assert conditions(told(made, warnings=event))["Degraded"][0] == "False"


def test_h11_a_deployment_whose_pods_are_refused_says_so_in_the_servers_words() -> None:
    made = world()
    gateway = made.live[Key("Deployment", "llm-gateway")]
    failure = {"type": "ReplicaFailure", "status": "True", "message": "no PriorityClass named web"}
    gateway["status"] = {"conditions": [failure]}
    found = told(made)
    assert conditions(found)["Degraded"] == ("True", "Forbidden")
    assert "Deployment llm-gateway gets no pod: no Prio" in message(found, "Degraded")
    failure["status"] = "False"
    assert conditions(told(made))["Degraded"][0] == "False"


@pytest.mark.parametrize("older", [True, False])
def test_a_server_that_is_too_old_for_models_of_images_is_named(older: bool) -> None:
    made = world(model={"uri": "oci://registry.example.com/m:1"})
    said = "spec.template.spec.volumes[0]: Required value: must specify a volume type"
    refused = {Key("StatefulSet", "llm-g0-1"): Refusal("InvalidPodTemplate", said, 0)}
    settings = replace(made.observe().settings, image_volumes=not older)
    found = told(made, refused=refused, settings=settings)
    assert conditions(found)["Degraded"] == ("True", "InvalidPodTemplate")
    assert ("needs Kubernetes 1.35" in message(found, "Degraded")) is older


@pytest.mark.parametrize(("status", "over"), [({}, False), ({"active": 1}, True)])
def test_a_job_that_has_its_pod_by_now_is_not_told(status: dict[str, int], over: bool) -> None:
    made = world()
    key = Key("Job", "llm-model-1")
    made.live[key] = {"kind": "Job", "metadata": {"name": key.name}, "status": status}
    found = told(made, warnings={key: Warning("FailedCreate", "exceeded quota")})
    assert (conditions(found)["Degraded"][0] == "False") is over


CONTAINERS = [
    ("ErrImagePull", "ImagePullFailed"), ("InvalidImageName", "ImagePullFailed"),
    ("CreateContainerConfigError", "InvalidPodTemplate"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "reason"), CONTAINERS)
def test_a_container_that_cannot_start_degrades(state: str, reason: str) -> None:
    made = world()
    made.rank_pods()[0]["status"]["containerStatuses"] = [waiting(state, "the kubelet's words")]
    found = told(made)
    assert conditions(found)["Degraded"] == ("True", reason)
    assert "the kubelet's words" in message(found, "Degraded")


def exits(*, count: int, now: str, started: bool, code: int = 2) -> dict[str, Any]:
    """A container that has ended, and what it does now."""
    over = {"terminated": {"exitCode": code, "message": "no such model folder"}}
    states = {
        "has just ended": {"state": over},
        "is held back": {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": over},
        "runs again": {"state": {"running": {}}, "lastState": over},
    }
    return {"name": "tokenizer", "restartCount": count, "started": started, **states[now]}


def with_tokenizer(container: dict[str, Any]) -> World:
    made = world()
    (pod,) = (p for name, p in made.pods.items() if name.startswith("llm-tokenizer"))
    pod["status"]["containerStatuses"] = [container]
    set_condition(pod, "Ready", bool(container["started"]), made.wall)
    return made


@pytest.mark.parametrize("now", ["has just ended", "is held back", "runs again"])
def test_a_container_that_ends_again_and_again_is_told_at_each_moment(now: str) -> None:
    """The kubelet holds it back for a part of the time only."""
    made = with_tokenizer(exits(count=4, now=now, started=False))
    found = told(made)
    assert conditions(found)["Degraded"] == ("True", "BackOff")
    text = "container tokenizer ends again and again with code 2: no such model folder"
    assert text in message(found, "Degraded")


def test_a_container_that_has_ended_once_is_told_until_it_works_again() -> None:
    made = with_tokenizer(exits(count=1, now="runs again", started=False))
    assert "container tokenizer has ended with code 2" in message(told(made), "Degraded")
    made = with_tokenizer(exits(count=1, now="runs again", started=True))
    assert conditions(told(made))["Degraded"][0] == "False"
    made = with_tokenizer(exits(count=1, now="runs again", started=False, code=0))
    assert conditions(told(made))["Degraded"][0] == "False"


def test_a_role_that_is_not_ready_says_why_and_so_does_the_object() -> None:
    made = with_tokenizer(exits(count=4, now="is held back", started=False))
    found = told(made)
    assert conditions(found)["Ready"] == ("False", "GatewayUnavailable")
    for kind in ("TokenizersReady", "Ready"):
        assert message(found, kind).startswith("Deployment llm-tokenizer: 0 of 1 pod is ready: pod")
        assert message(found, kind).endswith("no such model folder")
    assert "tokenizer" not in message(found, "DetokenizersReady").replace("detokenizer", "")


def test_a_redis_whose_pod_is_refused_says_so_rather_than_that_nobody_listens() -> None:
    made = world()
    made.pods = {name: pod for name, pod in made.pods.items() if "redis" not in name}
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: few"}
    made.live[Key("Deployment", "llm-redis")]["status"] = {"conditions": [failure]}
    found = told(made, bus=Bus("unreachable", "connection refused"))
    assert conditions(found)["Ready"] == ("False", "RedisUnavailable")
    assert message(found, "Ready").endswith("Deployment llm-redis gets no pod: exceeded quota: few")


MOUNTS = {
    'secret "keys" not found': "True",
    "failed to sync secret cache: timed out waiting for the condition": "False",
    "cannot get resource: no relationship found between node 'n1' and this object": "False",
    'object "default"/"llm-redis" not registered': "False",
}


@pytest.mark.parametrize("said", MOUNTS)
def test_a_mount_that_fails_only_while_a_kubelet_learns_of_a_pod_is_no_trouble(said: str) -> None:
    made = world()
    (name,) = (name for name in made.pods if name.startswith("llm-gateway"))
    made.pods[name]["status"]["phase"] = "Pending"
    found = told(made, warnings={Key("Pod", name): Warning("FailedMount", said)})
    assert conditions(found)["Degraded"][0] == MOUNTS[said]


@pytest.mark.parametrize("named", [True, False])
def test_a_default_image_that_cannot_be_pulled_says_how_another_is_taken(named: bool) -> None:
    made = world(image="registry.example.com/own:1" if named else None)
    (image,) = (
        live["metadata"]["annotations"][names.IMAGE]
        for key, live in made.live.items()
        if key.kind == "ControllerRevision"
    )
    made.rank_pods()[0]["status"]["containerStatuses"] = [
        waiting("ErrImagePull", "no such image") | {"image": image}
    ]
    assert ("restartedAt" in message(told(made), "Degraded")) is not named


def test_an_image_that_the_object_named_before_is_no_default() -> None:
    """A rollout to a bad image is taken back: its last pods still wait for it."""
    made = world()
    made.change(image="bad:1")
    made.operate()
    made.change(image=None)
    held = waiting("ErrImagePull", "no such image") | {"image": "bad:1"}
    made.rank_pods()[0]["status"]["containerStatuses"] = [held]
    text = message(told(made), "Degraded")
    assert "image bad:1: pod" in text and "restartedAt" not in text


def test_a_claim_that_one_node_only_may_mount_says_why() -> None:
    made = world(replicas=2)
    first, second = made.rank_pods()
    second["spec"]["nodeName"], second["status"]["phase"] = "n2", "Pending"
    for pod in (first, second):
        pod["spec"]["volumes"] = [{"persistentVolumeClaim": {"claimName": "models"}}]
    observed = replace(
        made.observe(), claims={"models": {"spec": {"accessModes": ["ReadWriteOnce"]}}}
    )
    found = status(observed, made.desired(observed))
    assert conditions(found)["Degraded"] == ("True", "VolumeUnavailable")
    text = message(found, "Degraded")
    assert "ReadWriteOnce" in text and "n1, n2" in text and "ReadWriteMany" in text


BUSES = [
    (Bus("ok"), ("True", "Answering")), (Bus("full"), ("False", "Full")),
    (Bus("auth-failed"), ("False", "AuthFailed")),
    (Bus("unreachable"), ("False", "Unreachable")),
    (Bus("not-observable"), ("Unknown", "NotObservable")),
]  # fmt: skip


@pytest.mark.parametrize(("bus", "expected"), BUSES)
def test_redis_ready(bus: Bus, expected: tuple[str, str]) -> None:
    found = conditions(told(world(), bus=bus))
    assert found["RedisReady"] == expected
    assert (found["Ready"] == ("False", "RedisUnavailable")) is (expected[0] == "False")


def test_an_operator_that_has_just_started_says_what_was_said_until_it_has_asked_redis() -> None:
    """Else each start of it would be an outage of every object."""
    made = world(replicas=2, parallelism={"tensor": 2})
    before = told(made)
    made.status = before
    assert told(made, bus=Bus("starting")) == before
    made.status = {}
    assert conditions(told(made, bus=Bus("starting")))["RedisReady"] == ("False", "Starting")


def test_a_redis_without_a_ready_pod_is_not_what_it_was() -> None:
    made = world()
    made.status = told(made)
    pods = tuple(pod for pod in made.observe().pods if "redis" not in pod["metadata"]["name"])
    found = conditions(told(made, bus=Bus("starting"), pods=pods))
    assert found["RedisReady"] == ("False", "Starting")


def hub(pods: list[dict[str, Any]], *, there: bool) -> dict[str, Any]:
    made = World(spec_of(model={"uri": "hf://org/model"}))
    made.operate()
    made.model_ready = there
    return told(made, pods=tuple(pods))


def download(role: str, state: dict[str, Any], place: str = "containerStatuses") -> dict[str, Any]:
    return {
        "metadata": {"name": "llm-model-1", "labels": {"app.kubernetes.io/component": role}},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", place: [{"name": "download", **state}]},
    }


def ended(code: int, text: str) -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": code, "message": text}}}


MODEL = {
    "there": ([], True, ("True", "Cached")),
    "nothing yet": ([], False, ("False", "Downloading")),
    "running": ([download("model", {"state": {"running": {}}})], False, ("False", "Downloading")),
    "no token": ([download("model", ended(3, "error: 401"))], False, ("False", "TokenRejected")),
    "disk full": ([download("model", ended(4, "no space"))], False, ("False", "NoSpace")),
    "broken off": ([download("model", ended(1, "reset"))], False, ("False", "DownloadFailed")),
    "an init container that fails": (
        [download("rank", ended(3, "401"), "initContainerStatuses")], True,
        ("False", "TokenRejected"),
    ),
    "an init container that is done": (
        [download("rank", ended(0, ""), "initContainerStatuses")], True, ("True", "Cached"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODEL)
def test_model_cached(case: str) -> None:
    pods, there, expected = MODEL[case]
    found = hub(pods, there=there)
    assert conditions(found)["ModelCached"] == expected
    if expected[0] == "False":
        assert conditions(found)["Ready"] == ("False", "ModelDownloading")


def test_a_model_is_not_being_fetched_by_a_pod_that_cannot_begin() -> None:
    held = {"image": "x:1", "state": {"waiting": {"reason": "ErrImagePull", "message": "no x"}}}
    found = hub([download("model", held)], there=False)
    assert conditions(found)["ModelCached"] == ("False", "Downloading")
    for kind in ("ModelCached", "Ready"):
        assert message(found, kind).startswith("hf://org/model is not being fetched: image x:1")
    running = hub([download("model", {"state": {"running": {}}})], there=False)
    assert message(running, "Ready") == "hf://org/model is being fetched in pod llm-model-1"


ROUTES: list[tuple[dict[str, Any], dict[Key, Any], tuple[str, str]]] = [
    ({"ingress": {"host": "h"}}, {}, ("False", "NotAdmitted")),
    (
        {"ingress": {"host": "h"}},
        {Key("Ingress", "llm"): {"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}]}}},
        ("True", "Admitted"),
    ),
    ({"httpRoute": {"parentRefs": [{"name": "g"}]}}, {}, ("False", "GatewayAPIMissing")),
]


@pytest.mark.parametrize(("spec", "live", "expected"), ROUTES)
def test_route_ready(spec: dict[str, Any], live: dict[Key, Any], expected: Any) -> None:
    made = world(**spec)
    held = {key: {"metadata": {"name": key.name}, "status": value} for key, value in live.items()}
    assert conditions(told(made, live={**made.live, **held}))["RouteReady"] == expected


def test_an_http_route_that_its_gateway_refuses_says_so() -> None:
    made = world(httpRoute={"parentRefs": [{"name": "g"}]})
    route = {
        "metadata": {"name": "llm"},
        "status": {"parents": [{"conditions": [
            {"type": "Accepted", "status": "False", "message": "no listener"}]}]},
    }  # fmt: skip
    settings = replace(made.observe().settings, gateway_api=True)
    live = {**made.live, Key("HTTPRoute", "llm"): route}
    found = told(made, live=live, settings=settings)
    assert conditions(found)["RouteReady"] == ("False", "NotAdmitted")
    assert "no listener" in message(found, "RouteReady")


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("", ("Unknown", "NotMeasured")),
        ("P2P", ("True", "Measured")),
        ("P2P, Socket between nodes", ("True", "Measured")),
        ("Socket between nodes", ("True", "Measured")),
        ("Socket", ("False", "SocketWithinNode")),
        ("SHM, Socket, IB between nodes", ("False", "SocketWithinNode")),
        ("P2P/CUMEM", ("True", "Measured")),
        ("P2P/CUMEM, SHM/direct, NET/IB/0/GDRDMA between nodes", ("True", "Measured")),
        ("P2P/IPC, NET/Socket/0 between nodes", ("True", "Measured")),
        ("NET/Socket/0", ("False", "SocketWithinNode")),
        ("gloo/10.0.0.1", ("True", "Measured")),
    ],
)
def test_fast_transport(transport: str, expected: tuple[str, str]) -> None:
    made = world(parallelism={"tensor": 2}, engine={"device": "cuda"})
    rank = Worker("rank", "g0-1/0", "llm-g0-1-0", 1, 0.0, transport=transport)
    assert conditions(told(made, bus=Bus("ok", workers=(rank,))))["FastTransport"] == expected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, "http://llm.ns.svc"),
        ({"ingress": {"host": "a.b"}}, "http://a.b"),
        ({"ingress": {"host": "a.b", "path": "/x/", "tlsSecretName": "t"}}, "https://a.b/x"),
        ({"httpRoute": {"parentRefs": [{"name": "g"}], "hostnames": ["*.b", "c.b"]}}, "http://c.b"),
        ({"httpRoute": {"parentRefs": [{"name": "g"}]}}, "http://llm.ns.svc"),
    ],
)
def test_url(spec: dict[str, Any], expected: str) -> None:
    assert url(object_of(spec_of(**spec))) == expected


def test_groups_in_trouble_come_first_and_at_most_64_are_listed() -> None:
    made = World(spec_of(replicas=100))
    for machine in made.machines.values():
        machine.places = 100
    made.run(220)
    assert made.status["readyReplicas"] == 100
    made.terminate(made.pods["llm-g90-1-0"])
    made.operate()
    assert made.status["groups"][0]["index"] == 90
    assert [g["index"] for g in made.status["groups"][1:]] == list(range(63))
    assert sum(made.status["groupPhases"].values()) == 100


def test_a_rank_that_is_silent_for_the_heartbeat_timeout_does_not_serve() -> None:
    made = world(parallelism={"tensor": 2})
    ranks = tuple(Worker("rank", f"g0-1/{i}", f"llm-g0-1-{i}", 1, 30.0 * i) for i in range(2))
    found = told(made, bus=Bus("ok", workers=ranks))
    assert found["readyReplicas"] == 0 and found["groups"][0]["readyRanks"] == 1


def test_who_is_ready_and_not_heard_on_a_bus_that_is_read_does_not_serve() -> None:
    """As after a change of the password, until the kubelets have brought it to the pods."""
    made = world(replicas=2)
    made.run(60)
    workers = made.observe().bus.workers
    for role, kind in (
        ("rank", "RanksReady"), ("gateway", "GatewayReady"), ("tokenizer", "TokenizersReady"),
    ):  # fmt: skip
        heard = tuple(w for w in workers if w.role != role)
        early = told(made, bus=Bus("ok", readable=5.0, workers=heard))
        assert conditions(early)["Ready"] == ("True", "Serving")
        found = told(made, bus=Bus("ok", readable=60.0, workers=heard))
        assert conditions(found)[kind] == ("False", "PodsNotReady")
        assert conditions(found)["Ready"][0] == "False"
        assert "heard" in message(found, kind) or "heard" in message(found, "Ready")
    bus = replace(made.observe().bus, readable=60.0)
    assert told(made, bus=bus) == told(made)


def test_a_container_beside_the_ranks_that_is_not_ready_is_named() -> None:
    made = world()
    (pod,) = made.rank_pods()
    set_condition(pod, "Ready", False, made.wall)
    pod["status"]["containerStatuses"] = [
        {"name": "rank", "ready": True, "state": {"running": {}}},
        {"name": "proxy", "ready": False, "state": {"running": {}}},
    ]
    name = pod["metadata"]["name"]
    assert f"container proxy of pod {name} is not ready" in message(told(made), "Ready")


def _documented() -> dict[str, set[str]]:
    """The reasons by type, as the description of `status.conditions` lists them."""
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    text = schema["properties"]["status"]["properties"]["conditions"]["description"]
    found: dict[str, set[str]] = {}
    for sentence in text.split("). "):
        kinds, _, rest = sentence.partition(" (")
        words = set(rest.replace(",", " ").replace(";", " ").replace(":", " ").split())
        for kind in kinds.split(", "):
            found[kind.split(". ")[-1]] = words
    return found


def test_every_reason_of_trouble_is_one_that_the_crd_lists() -> None:
    if not CRD.exists():
        pytest.skip("there is no chart yet")
    listed = _documented()
    assert set(TYPES) <= listed.keys()
    bad: list[tuple[str, str]] = []
    made = World(spec_of(image="bad:1", replicas=2, parallelism={"tensor": 2}),
                 broken_images={"bad:1"})  # fmt: skip
    for step in range(200):
        made.step()
        made.operate()
        if step == 100:
            made.power_off("n1")
        for c in made.status["conditions"]:
            trouble = c["status"] == ("True" if c["type"] == "Degraded" else "False")
            if c["type"] == "Progressing":
                trouble = True
            if trouble and c["reason"] not in listed[c["type"]]:
                bad.append((c["type"], c["reason"]))
    assert not bad


def test_an_empty_sight_has_a_status_too() -> None:
    made = World(spec_of())
    empty = Observed(made.obj, made.observe().settings, 0.0, made.wall)
    found = conditions(status(empty, made.desired(empty)))
    assert found["Ready"] == ("False", "RedisUnavailable")
    assert found["Progressing"] == ("True", "Scaling")
