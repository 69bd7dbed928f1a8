"""What all children have in common, whatever the object: golden manifests and properties."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.cli.download import add_arguments as add_download
from minisgl.cli.flags import Parser
from minisgl.cli.services import add_detokenizer, add_engine, add_gateway, add_tokenizer
from minisgl_operator import names
from minisgl_operator.observed import Manifest
from tests.unit.operator.cases import (
    CASES,
    CLAIM,
    GOLDEN,
    GOLDEN_CASES,
    HUB,
    UID,
    all_of,
    golden,
    pod,
    settled,
    want,
)

COMMANDS = {
    "gateway": add_gateway,
    "tokenizer": add_tokenizer,
    "detokenizer": add_detokenizer,
    "engine": add_engine,
    "download": add_download,
}
WORKLOADS = ("Deployment", "StatefulSet", "Job")

replicas = st.integers(0, 5)
specs = st.fixed_dictionaries(
    {
        "model": st.sampled_from([case["model"] for case in CASES.values()]),
        "replicas": replicas,
        "suspend": st.booleans(),
        "parallelism": st.sampled_from(
            [{"tensor": 1}, {"tensor": 8, "gpusPerPod": 2}, {"tensor": 64, "gpusPerPod": 16}]
        ),
        "engine": st.sampled_from([{"device": "cuda"}, {"device": "cpu", "maxSeqLen": 4096}]),
        "network": st.fixed_dictionaries({"hostNetwork": st.booleans()}),
        "redis": st.sampled_from(
            [
                {"managed": {}},
                {"managed": {"tlsSecretName": "tls", "storage": {"size": 1}}},
                {"external": {"address": "r:6379", "passwordSecretRef": {"name": "p", "key": "k"}}},
            ]
        ),
        "gateway": st.fixed_dictionaries(
            {"replicas": replicas, "terminationGracePeriodSeconds": st.integers(1, 900)}
        ),
        "ranks": st.fixed_dictionaries(
            {
                "sharedMemory": st.sampled_from(["Auto", "HostPath", "EmptyDir"]),
                "terminationGracePeriodSeconds": st.integers(1, 900),
            }
        ),
    }
)  # fmt: skip


def containers(manifest: Manifest) -> Iterator[Manifest]:
    yield from pod(manifest).get("initContainers", [])
    yield from pod(manifest)["containers"]


def workloads(spec: dict[str, Any]) -> list[Manifest]:
    return [one for one in all_of(spec) if one["kind"] in WORKLOADS]


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_the_manifests_are_those_that_were_reviewed(case: str) -> None:
    reviewed = (GOLDEN / f"{case}.yaml").read_text()
    assert golden(CASES[case]) == reviewed, "python -m tests.unit.operator.cases writes them anew"


@pytest.mark.parametrize("case", CASES)
def test_h58_every_name_starts_with_the_objects_and_is_short_enough_for_the_longest_object(
    case: str,
) -> None:
    for one in all_of(CASES[case]):
        name = one["metadata"]["name"]
        assert re.fullmatch("qwen(-[a-z0-9-]+)?", name)
        # 40 characters is the longest name of an object; a Service's may have 63.
        assert len(name) - len("qwen") + 40 <= 63
        if one["kind"] == "StatefulSet":
            assert len(name) - len("qwen") + 40 <= 52


@pytest.mark.parametrize("case", CASES)
def test_every_child_belongs_to_the_object_and_no_two_have_one_name(case: str) -> None:
    children = all_of(CASES[case])
    for one in children:
        (owner,) = one["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "minisglang.io/v1alpha1", "kind": "MiniSGLang", "name": "qwen",
            "uid": UID, "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        labels = one["metadata"]["labels"]
        assert labels[names.OBJECT_UID] == UID
        assert labels["app.kubernetes.io/managed-by"] == names.MANAGER
        assert one["metadata"]["namespace"] == "models"
    keys = [(one["kind"], one["metadata"]["name"]) for one in children]
    assert len(set(keys)) == len(keys)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(specs)
def test_every_pod_is_restricted_but_for_the_network_and_disk_of_the_node(
    spec: dict[str, Any],
) -> None:
    for one in workloads(spec):
        shape = pod(one)
        assert shape["automountServiceAccountToken"] is False
        assert shape["securityContext"]["runAsNonRoot"] is True
        assert shape["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "hostPID" not in shape and "hostIPC" not in shape
        if one["kind"] != "StatefulSet":
            assert "hostNetwork" not in shape
            assert not any("hostPath" in volume for volume in shape["volumes"])
        for container in containers(one):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in container.get("ports", []))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(specs)
def test_what_is_mounted_is_a_volume_of_the_pod_and_all_volumes_are_mounted(
    spec: dict[str, Any],
) -> None:
    for one in workloads(spec):
        volumes = [volume["name"] for volume in pod(one)["volumes"]]
        assert len(set(volumes)) == len(volumes)
        mounted = set()
        for container in containers(one):
            places = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(places)) == len(places)
            mounted |= {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == set(volumes)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(specs)
def test_selectors_pick_the_pods_that_they_mean_and_no_others(spec: dict[str, Any]) -> None:
    children = all_of(spec)
    templates = {
        (one["kind"], one["metadata"]["name"]): one["spec"]["template"]["metadata"]["labels"]
        for one in children
        if one["kind"] in WORKLOADS
    }
    for one in children:
        if one["kind"] in ("Deployment", "StatefulSet"):
            selector = one["spec"]["selector"]["matchLabels"]
            picked = {
                key for key, labels in templates.items() if selector.items() <= labels.items()
            }
            assert picked == {(one["kind"], one["metadata"]["name"])}
        if one["kind"] in ("Service", "PodDisruptionBudget"):
            selector = one["spec"]["selector"]
            selector = selector.get("matchLabels", selector)
            role = one["metadata"]["labels"][names.COMPONENT]
            assert selector == {
                "app.kubernetes.io/name": "minisglang",
                "app.kubernetes.io/instance": "qwen",
                names.COMPONENT: role,
            }


@settings(deadline=None, max_examples=60, derandomize=True)
@given(specs)
def test_what_is_wanted_of_an_object_that_has_all_is_what_it_has(spec: dict[str, Any]) -> None:
    observed = settled(spec)
    again = want(spec, observed.live.values()).children
    assert {k: v for k, v in observed.live.items() if k.kind != "Job"} == {
        (one["kind"], one["metadata"]["name"]): one for one in again if one["kind"] != "Job"
    }


@pytest.mark.parametrize("case", CASES)
def test_only_documented_flags_are_passed_and_each_command_takes_them(case: str) -> None:
    seen = 0
    for one in workloads(CASES[case]):
        for container in containers(one):
            words = container.get("args", [])
            if container.get("command") == ["timeout"]:
                assert int(words[0]) > 0 and words[1] == "minisgl"
                words = words[2:]
            elif "minisgl" not in container.get("command", []):
                continue
            shell = "$model" in " ".join(container["command"])
            words = [
                re.sub(r"\$\([A-Z_]+\)", "1", word)
                for word in [*words, *(["--model=/models"] if shell else [])]
            ]
            parser = Parser(prog="minisgl")
            COMMANDS[words[0]](parser)
            parser.parse_args(words[1:])  # exits with a code for a flag that it does not know
            shown = parser.format_help()
            for word in words[1:]:
                if word.startswith("--"):
                    assert word.partition("=")[0] in shown
            seen += 1
    assert seen


@pytest.mark.parametrize("case", CASES)
def test_no_secret_is_in_a_manifest_but_in_the_secret_itself(case: str) -> None:
    for one in all_of(CASES[case]):
        if one["kind"] != "Secret":
            assert "not-a-secret" not in str(one)
        for container in containers(one) if one["kind"] in WORKLOADS else ():
            for variable in container.get("env", []):
                assert "secretKeyRef" not in str(variable)


def test_h44_whatever_writes_a_cache_writes_it_on_a_volume() -> None:
    for one in workloads({"model": HUB, "parallelism": {"tensor": 2}}):
        for container in containers(one):
            if container["name"] == "redis":
                continue
            places = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
            assert {"/cache", "/tmp"} <= places
            env = {v["name"]: v.get("value", "") for v in container["env"]}
            caches = ["HOME", "HF_HOME", "XDG_CACHE_HOME"]
            if container["name"] == "rank":
                caches += ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"]
            for name in caches:
                assert env[name].startswith("/cache")


def test_pull_secrets_reach_every_pod() -> None:
    spec = {"model": CLAIM, "imagePullSecrets": [{"name": "registry"}]}
    found = workloads(spec)
    assert {one["kind"] for one in found} == set(WORKLOADS)
    assert all(pod(one)["imagePullSecrets"] == [{"name": "registry"}] for one in found)
