"""Routes, network policies, disruption budgets, and podTemplate."""

from typing import Any

import pytest

from minisgl_operator import names
from minisgl_operator.api import PodTemplate, TemplateMetadata
from minisgl_operator.desired.overlay import lay_over
from minisgl_operator.observed import Manifest, Settings
from tests.unit.operator.cases import (
    CASES,
    HUB,
    SETTINGS,
    child,
    main_container,
    of,
    pod,
    rank_set,
    settled,
    want,
)

# --- routes -------------------------------------------------------------------------------------


def test_h46_an_ingress_lets_streams_through_unbuffered_for_as_long_as_a_request_may_take() -> None:
    spec = {"model": HUB, "ingress": {"host": "h"}, "gateway": {"requestTimeoutSeconds": 900}}
    notes = child(spec, "Ingress")["metadata"]["annotations"]
    nginx = "nginx.ingress.kubernetes.io"
    assert notes[f"{nginx}/proxy-buffering"] == "off"
    assert notes[f"{nginx}/proxy-read-timeout"] == notes[f"{nginx}/proxy-send-timeout"] == "900"
    assert notes[f"{nginx}/proxy-body-size"] == "16m"


def test_the_users_annotations_win_over_the_operators() -> None:
    own = {"nginx.ingress.kubernetes.io/proxy-read-timeout": "5", "a/b": "c"}
    spec = {"model": HUB, "ingress": {"host": "h", "annotations": own}}
    assert own.items() <= child(spec, "Ingress")["metadata"]["annotations"].items()


def test_an_ingress_leads_its_host_and_path_to_the_gateways() -> None:
    ingress = {"host": "h", "path": "/q", "className": "nginx", "tlsSecretName": "cert"}
    spec = child({"model": HUB, "ingress": ingress}, "Ingress")["spec"]
    assert spec["ingressClassName"] == "nginx"
    assert spec["tls"] == [{"hosts": ["h"], "secretName": "cert"}]
    (rule,) = spec["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"], path["pathType"]) == ("h", "/q", "Prefix")
    assert path["backend"]["service"] == {"name": "qwen", "port": {"name": "http"}}


def test_a_route_of_the_gateway_api_has_the_time_limit_of_a_request() -> None:
    route = {"parentRefs": [{"name": "public", "namespace": "edge", "sectionName": "https"}]}
    made = child({"model": HUB, "httpRoute": {**route, "path": "/q"}}, "HTTPRoute")
    (parent,) = made["spec"]["parentRefs"]
    assert (parent["name"], parent["namespace"], parent["sectionName"]) == (
        "public",
        "edge",
        "https",
    )
    (rule,) = made["spec"]["rules"]
    assert rule["timeouts"] == {"request": "3600s"}
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/q"}}]
    assert rule["backendRefs"][0]["name"] == "qwen" and rule["backendRefs"][0]["port"] == 80


def test_without_the_gateway_api_in_the_cluster_no_route_is_made() -> None:
    settings = Settings(image="i", redis_image="r", gateway_api=False)
    found = want(CASES["two-nodes"], settings=settings).children
    assert "HTTPRoute" not in [one["kind"] for one in found]


# --- network policies ---------------------------------------------------------------------------


def sources(spec: dict[str, Any], name: str, settings: Settings = SETTINGS) -> Any:
    """(ports, peers) of the one rule of a policy; None for either: any."""
    found = of(want(spec, settings=settings).children, "NetworkPolicy", name)["spec"]
    assert found["policyTypes"] == ["Ingress"]
    if "ingress" not in found:
        return None
    (rule,) = found["ingress"]
    ports = [port["port"] for port in rule["ports"]] if "ports" in rule else None
    return ports, rule.get("from")


def test_h10_redis_admits_the_objects_pods_the_operator_and_the_nodes_that_the_chart_names() -> (
    None
):
    settings = Settings(
        image="i", redis_image="r", operator_namespace="ops", node_cidrs=("10.0.0.0/8", "fd00::/8")
    )
    ports, peers = sources({"model": HUB}, "-redis", settings)
    assert ports == [6379]
    own, operator, *nodes = peers
    labels = own["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/instance"] == "qwen" and names.COMPONENT not in labels
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "ops"}
    assert [node["ipBlock"]["cidr"] for node in nodes] == ["10.0.0.0/8", "fd00::/8"]


def test_h10_without_the_nodes_addresses_ranks_on_their_network_must_still_reach_redis() -> None:
    assert sources({"model": HUB}, "-redis") == ([6379], None)


def test_h10_ranks_of_the_pod_network_are_pods_like_others() -> None:
    _, peers = sources({"model": HUB, "network": {"hostNetwork": False}}, "-redis")
    assert len(peers) == 2 and not any("ipBlock" in peer for peer in peers)


def test_gateways_are_open_on_one_port_and_ranks_to_their_object() -> None:
    assert sources({"model": HUB}, "-gateway") == ([8000], None)
    ports, peers = sources({"model": HUB}, "-ranks")
    assert ports is None and [list(peer) for peer in peers] == [["podSelector"]]


def test_nobody_connects_to_the_other_pods() -> None:
    assert sources({"model": HUB}, "-closed") is None
    found = of(want({"model": HUB}).children, "NetworkPolicy", "-closed")["spec"]["podSelector"]
    (which,) = found["matchExpressions"]
    assert set(which["values"]) == {"tokenizer", "detokenizer", "model"}


def test_an_external_redis_has_no_policy_of_ours() -> None:
    policies = [
        one for one in want(CASES["external-redis"]).children if one["kind"] == "NetworkPolicy"
    ]
    assert not any("redis" in one["metadata"]["name"] for one in policies)


# --- disruption budgets -------------------------------------------------------------------------


def served(index: int, epoch: int, spec: dict[str, Any], **metadata: Any) -> Manifest:
    made = rank_set(spec, index, epoch)
    notes = {**made["metadata"]["annotations"], names.HAS_SERVED: "true"}
    return {**made, "metadata": {**made["metadata"], "annotations": notes, **metadata}}


def budget(spec: dict[str, Any], *sets: Manifest) -> Any:
    live = [*settled(spec).live.values(), *sets]
    return of(want(spec, live).children, "PodDisruptionBudget", "-ranks")["spec"]


def test_of_the_pods_of_groups_that_have_served_all_but_one_must_be_there() -> None:
    spec = {"model": HUB, "replicas": 3, "parallelism": {"tensor": 4}}
    sets = [served(0, 1, spec), served(1, 3, spec), rank_set(spec, 2, 1)]
    found = budget(spec, *sets)
    assert found["minAvailable"] == 7
    assert found["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_group_between_two_lives_counts_once_and_one_that_leaves_not_at_all() -> None:
    spec = {"model": HUB, "replicas": 2, "parallelism": {"tensor": 2}}
    gone = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    sets = [served(0, 1, spec, **gone), served(0, 2, spec), served(1, 1, spec, **gone)]
    assert budget(spec, *sets)["minAvailable"] == 1


def test_groups_of_two_sizes_count_with_their_own_pods() -> None:
    wide = {"model": HUB, "replicas": 2, "parallelism": {"tensor": 4}}
    narrow = {"model": HUB, "replicas": 2}
    assert budget(narrow, served(0, 1, wide), served(1, 2, narrow))["minAvailable"] == 4


def test_before_any_group_has_served_evictions_are_free() -> None:
    assert budget({"model": HUB, "replicas": 2})["minAvailable"] == 0


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_single_group_has_no_budget(replicas: int) -> None:
    found = want({"model": HUB, "replicas": replicas}).children
    assert "PodDisruptionBudget" not in [one["kind"] for one in found]


@pytest.mark.parametrize("role", ["gateway", "tokenizer", "detokenizer"])
def test_from_two_pods_on_a_role_loses_one_at_a_time(role: str) -> None:
    found = want({"model": HUB, role: {"replicas": 3}}).children
    made = of(found, "PodDisruptionBudget")
    assert made["metadata"]["name"] == f"qwen-{role}" and made["spec"]["minAvailable"] == 2


# --- podTemplate --------------------------------------------------------------------------------

OURS: Manifest = {
    "metadata": {"labels": {"app": "ours"}, "annotations": {"a": "1"}},
    "spec": {
        "containers": [
            {
                "name": "main",
                "image": "i",
                "args": ["x"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            }
        ],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "tolerations": [{"key": "t"}],
        "imagePullSecrets": [{"name": "s"}],
        "securityContext": {"runAsUser": 1000},
    },
}


def laid(spec: dict[str, Any], **metadata: Any) -> Manifest:
    return lay_over(OURS, PodTemplate(metadata=TemplateMetadata(**metadata), spec=spec))


def test_labels_and_annotations_are_added_and_our_labels_stay() -> None:
    metadata = laid({}, labels={"app": "x", "team": "y"}, annotations={"a": "2"})["metadata"]
    assert metadata == {"labels": {"app": "ours", "team": "y"}, "annotations": {"a": "2"}}


def test_containers_merge_by_name_their_env_by_name_and_their_mounts_by_path() -> None:
    theirs = {
        "name": "main",
        "image": "j",
        "env": [{"name": "B", "valueFrom": {"x": 1}}, {"name": "C", "value": "3"}],
        "volumeMounts": [{"name": "w", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}],
    }
    (main,) = laid({"containers": [theirs]})["spec"]["containers"]
    assert main["image"] == "j" and main["args"] == ["x"]
    assert main["env"] == [
        {"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"x": 1}},
        {"name": "C", "value": "3"},
    ]  # fmt: skip
    assert main["volumeMounts"] == theirs["volumeMounts"]


def test_another_name_is_a_sidecar() -> None:
    found = laid({"containers": [{"name": "side"}], "initContainers": [{"name": "first"}]})["spec"]
    assert [one["name"] for one in found["containers"]] == ["main", "side"]
    assert found["initContainers"] == [{"name": "first"}]


def test_a_volume_of_the_same_name_is_another_source_not_two() -> None:
    found = laid({"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]})["spec"]["volumes"]
    assert found == [{"name": "v", "hostPath": {"path": "/x"}}]


def test_tolerations_and_pull_secrets_are_appended_and_all_else_replaces() -> None:
    found = laid(
        {
            "tolerations": [{"key": "u"}],
            "imagePullSecrets": [{"name": "s"}, {"name": "z"}],
            "securityContext": {"fsGroup": 1},
        }
    )["spec"]
    assert found["tolerations"] == [{"key": "t"}, {"key": "u"}]
    assert found["imagePullSecrets"] == [{"name": "s"}, {"name": "z"}]
    assert found["securityContext"] == {"fsGroup": 1}


def test_what_is_laid_over_leaves_the_original_as_it_was() -> None:
    before = repr(OURS)
    laid({"containers": [{"name": "main", "image": "j"}]}, labels={"x": "y"})
    assert repr(OURS) == before


def test_every_role_has_its_pod_template() -> None:
    user = {"metadata": {"annotations": {"mine": "1"}}}
    spec = {
        "model": {
            **HUB,
            "cache": {"persistentVolumeClaim": {"claimName": "c"}},
            "download": {"podTemplate": user},
        },
        "redis": {"managed": {"podTemplate": user}},
        **{
            role: {"podTemplate": user} for role in ("gateway", "tokenizer", "detokenizer", "ranks")
        },
    }
    workloads = [one for one in settled(spec).live.values() if one["kind"] in ("Deployment", "Job")]
    assert len(workloads) == 5
    for one in [*workloads, rank_set(spec)]:
        assert one["spec"]["template"]["metadata"]["annotations"]["mine"] == "1"


def test_the_downloads_container_is_the_users_in_a_pod_that_downloads_for_itself_too() -> None:
    container = {"name": "download", "env": [{"name": "HF_ENDPOINT", "value": "http://hub"}]}
    user = {"spec": {"containers": [container], "nodeSelector": {"disk": "big"}}}
    spec = {"model": {**HUB, "download": {"podTemplate": user}}}
    for workload in (rank_set(spec), child(spec, "Deployment", "-gateway")):
        (init,) = pod(workload)["initContainers"]
        assert container["env"][0] in init["env"] and "nodeSelector" not in pod(workload)
    assert container["env"][0] not in main_container(rank_set(spec))["env"]


def test_an_invalid_entry_is_passed_on_for_the_server_to_refuse() -> None:
    found = laid({"volumes": [{"emptyDir": {}}, {"emptyDir": {}}]})["spec"]["volumes"]
    assert found[1:] == [{"emptyDir": {}}, {"emptyDir": {}}]


@pytest.mark.parametrize("odd", [1, True, "x", {"a": 1}, [1], ["x"], [None], [[]], [{"name": {}}]])
@pytest.mark.parametrize("field", ["tolerations", "imagePullSecrets", "env", "volumeMounts"])
def test_what_the_crd_does_not_know_to_be_wrong_reaches_the_server(field: str, odd: Any) -> None:
    """It refuses the child that holds it, and says why: no other child is kept from being made."""
    user = {"spec": {field: odd}}
    if field in ("env", "volumeMounts"):
        user = {"spec": {"containers": [{"name": "tokenizer", field: odd}]}}
    found = settled({"model": HUB, "tokenizer": {"podTemplate": user}}).live.values()
    (tokenizer,) = (one for one in found if one["metadata"]["name"] == "qwen-tokenizer")
    made = pod(tokenizer) if field in pod(tokenizer) else main_container(tokenizer)
    last = odd[-1] if isinstance(odd, list) else odd
    assert (made[field][-1] if isinstance(odd, list) else made[field]) == last


@pytest.mark.parametrize("odd", [1, "x", [1], {"required": 1}])
def test_an_affinity_that_is_none_reaches_the_server_also_where_a_node_is_avoided(odd: Any) -> None:
    if isinstance(odd, dict):
        odd = {"requiredDuringSchedulingIgnoredDuringExecution": 1}
    for field in ("podAffinity", "nodeAffinity"):
        affinity = {"affinity": {field: odd}}
        spec = {"model": HUB, "parallelism": {"tensor": 2}, "ranks": affinity}
        made = pod(rank_set(spec, avoided=["n1"]))["affinity"][field]
        assert made == odd or (isinstance(made, dict) and odd.items() <= made.items())
