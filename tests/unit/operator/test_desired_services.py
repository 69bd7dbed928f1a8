"""The gateway, the tokenizer and the detokenizer."""

from typing import Any

import pytest

from minisgl_operator import names
from minisgl_operator.observed import Manifest
from tests.unit.operator.cases import (
    CASES,
    COMMIT,
    HUB,
    child,
    main_container,
    of,
    pod,
    rank_set,
    settled,
    want,
)

ROLES = ("gateway", "tokenizer", "detokenizer")


def deployment(spec: dict[str, Any], role: str) -> Manifest:
    return child(spec, "Deployment", f"-{role}")


def args(spec: dict[str, Any], role: str) -> dict[str, str]:
    words = main_container(deployment(spec, role))["args"]
    assert words[0] == role
    return dict(word.removeprefix("--").partition("=")[::2] for word in words[1:])


@pytest.mark.parametrize("role", ROLES)
def test_h29_a_new_pod_is_ready_before_an_old_one_leaves(role: str) -> None:
    made = deployment({"model": HUB}, role)
    assert made["spec"]["strategy"] == {
        "type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }  # fmt: skip
    assert "readinessProbe" in main_container(made)


def test_h29_a_gateway_takes_requests_for_a_while_after_it_is_to_leave() -> None:
    made = deployment({"model": HUB}, "gateway")
    container = main_container(made)
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    grace = pod(made)["terminationGracePeriodSeconds"]
    drain = int(args({"model": HUB}, "gateway")["drain-seconds"])
    assert grace == 300 and 5 + drain < grace


@pytest.mark.parametrize("grace", [1, 2, 9, 10, 11, 4000])
def test_h31_the_grace_of_the_gateway_passes_through_and_holds_all_of_its_end(grace: int) -> None:
    spec = {"model": HUB, "gateway": {"terminationGracePeriodSeconds": grace}}
    made = deployment(spec, "gateway")
    assert pod(made)["terminationGracePeriodSeconds"] == grace
    leave = int(main_container(made)["lifecycle"]["preStop"]["exec"]["command"][1])
    assert leave + int(args(spec, "gateway")["drain-seconds"]) <= grace


def test_a_detokenizer_outlives_the_ranks_that_drain() -> None:
    spec = {"model": HUB, "ranks": {"terminationGracePeriodSeconds": 200}}
    assert pod(deployment(spec, "detokenizer"))["terminationGracePeriodSeconds"] > 200


def test_without_a_group_a_gateway_is_still_the_one_that_answers() -> None:
    container = main_container(deployment({"model": HUB, "replicas": 0}, "gateway"))
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert deployment({"model": HUB, "replicas": 0}, "gateway")["spec"]["replicas"] == 1


def test_a_gateway_gets_its_part_of_the_queue_and_what_the_spec_says_of_requests() -> None:
    gateway = {"replicas": 3, "maxQueuedRequests": 100, "requestTimeoutSeconds": 60}
    given = args({"model": HUB, "gateway": gateway}, "gateway")
    assert given["max-queued-requests"] == "34" and given["request-timeout-seconds"] == "60"
    assert given["max-attempts"] == "3" and given["port"] == "8000"


def test_no_gateway_pod_at_all_may_be_wanted() -> None:
    made = deployment({"model": HUB, "gateway": {"replicas": 0}}, "gateway")
    assert made["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (HUB, "Qwen/Qwen3-8B"),
        ({**HUB, "servedName": "chat"}, "chat"),
        ({"uri": "pvc://models/x"}, "qwen"),
    ],
)
def test_the_model_is_called_as_its_repository_unless_it_has_a_name(model: Any, name: str) -> None:
    assert args({"model": model}, "gateway")["served-model-name"] == name


@pytest.mark.parametrize(
    ("route", "root"),
    [
        ({}, None),
        ({"ingress": {"host": "h"}}, None),
        ({"ingress": {"host": "h", "path": "/a/b"}}, "/a/b"),
        ({"httpRoute": {"parentRefs": [{"name": "g"}], "path": "/c"}}, "/c"),
    ],
)
def test_the_gateway_takes_the_prefix_of_its_route_off(route: Any, root: str | None) -> None:
    assert args({"model": HUB, **route}, "gateway").get("root-path") == root


def test_h43_api_keys_are_a_mounted_file_that_changes_with_its_secret() -> None:
    spec = {"model": HUB, "gateway": {"apiKeysSecretRef": {"name": "keys", "key": "list"}}}
    made = deployment(spec, "gateway")
    assert args(spec, "gateway")["api-keys-file"] == "/etc/minisgl/keys/keys"
    (volume,) = [v for v in pod(made)["volumes"] if v["name"] == "api-keys"]
    assert volume["secret"]["secretName"] == "keys"
    assert volume["secret"]["items"] == [{"key": "list", "path": "keys"}]
    (mount,) = [m for m in main_container(made)["volumeMounts"] if m["name"] == "api-keys"]
    assert "subPath" not in mount, "a file mounted so is never updated"


@pytest.mark.parametrize("role", ["gateway", "tokenizer", "detokenizer", "rank"])
def test_h43_the_password_and_ca_of_redis_are_mounted_files(role: str) -> None:
    if role == "rank":
        template = child(CASES["external-redis"], "ControllerRevision")["data"]["spec"]["template"]
        made: Manifest = {"spec": {"template": template}}
    else:
        made = deployment(CASES["external-redis"], role)
    words = main_container(made)["args"]
    assert "--bus=rediss://team%20a@[2001:db8::1]:6380/3" in words
    files = {"password": ("bus", "pass"), "ca": ("bus-ca", "ca.crt")}
    for name, (secret, key) in files.items():
        (volume,) = [v for v in pod(made)["volumes"] if v["name"] == f"redis-{name}"]
        assert volume["secret"]["secretName"] == secret
        assert [one["key"] for one in volume["secret"]["items"]] == [key]
        (mount,) = [m for m in main_container(made)["volumeMounts"] if m["name"] == f"redis-{name}"]
        assert "subPath" not in mount
        assert any(word.startswith(f"--bus-{name}-file={mount['mountPath']}/") for word in words)


def test_an_external_redis_without_a_password_is_reached_without_one() -> None:
    spec = {"model": HUB, "redis": {"external": {"address": "cache.example.com:6379"}}}
    given = args(spec, "tokenizer")
    assert given["bus"] == "redis://cache.example.com:6379/0"
    assert "bus-password-file" not in given and "bus-ca-file" not in given


@pytest.mark.parametrize("role", ROLES)
def test_each_worker_is_known_by_the_name_of_its_pod(role: str) -> None:
    given = args({"model": HUB}, role)
    assert given["id"] == given["pod"] == "$(POD_NAME)"


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_computes_nothing_sees_no_gpu_of_its_node(role: str) -> None:
    environment = main_container(deployment({"model": HUB}, role))["env"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in environment
    ranks = main_container(rank_set({"model": HUB}))["env"]
    assert "NVIDIA_VISIBLE_DEVICES" not in {one["name"] for one in ranks}


@pytest.mark.parametrize("role", ROLES)
def test_services_leave_a_node_that_does_not_answer_after_ten_seconds(role: str) -> None:
    tolerations = pod(deployment({"model": HUB}, role))["tolerations"]
    assert [t["tolerationSeconds"] for t in tolerations] == [10, 10]


@pytest.mark.parametrize("role", ROLES)
def test_pods_of_a_role_spread_over_nodes(role: str) -> None:
    (spread,) = pod(deployment({"model": HUB}, role))["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"][names.COMPONENT] == role


def test_the_endpoint_inside_the_cluster_is_port_80_of_the_objects_name() -> None:
    made = child({"model": HUB}, "Service", "qwen")
    assert made["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]


def test_a_suspended_object_keeps_services_secrets_claims_and_routes_but_no_pod() -> None:
    spec = {
        "model": HUB,
        "ingress": {"host": "h"},
        "redis": {"managed": {"storage": {"size": "1Gi"}}},
    }
    before = settled(spec)
    after = want({**spec, "suspend": True}, before.live.values()).children
    kinds = [one["kind"] for one in after]
    assert kinds.count("Service") == 3
    assert {"Secret", "PersistentVolumeClaim", "Ingress", "ControllerRevision"} <= set(kinds)
    deployments = [one for one in after if one["kind"] == "Deployment"]
    assert len(deployments) == 4 and {one["spec"]["replicas"] for one in deployments} == {0}
    assert "Job" not in kinds


def test_while_a_new_commit_is_not_known_services_run_on_as_they_are() -> None:
    before = settled({"model": HUB})
    spec = {"model": {"uri": "hf://Other/Model"}, "gateway": {"replicas": 2}}
    found = want(spec, before.live.values())
    assert not found.model_ready
    after = of(found.children, "Deployment", "-gateway")
    old = of(before.live.values(), "Deployment", "-gateway")
    assert after["spec"]["template"] == old["spec"]["template"] and COMMIT in str(after)
    assert after["spec"]["replicas"] == 2
    assert after["metadata"] == old["metadata"]


def test_before_there_is_anything_to_run_there_are_no_services() -> None:
    found = want({"model": {"uri": "hf://Other/Model"}})
    assert [one["metadata"]["name"] for one in found.children if one["kind"] == "Deployment"] == [
        "qwen-redis"
    ]
