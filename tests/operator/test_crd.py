"""The CRD as users meet it: what it refuses, what it explains, and how it outlives its chart."""

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from tests.cluster.apiserver import ApiServer
from tests.cluster.programs import find
from tests.operator.running import CHART, RELEASE_NAMESPACE, install_chart

URI = "hf://org/model"

TAKEN: dict[str, dict[str, Any]] = {
    "a model alone": {},
    "four ranks in two pods": {"parallelism": {"tensor": 4, "gpusPerPod": 2}},
    "no group": {"replicas": 0},
    "an ingress": {"ingress": {"host": "a.example"}},
    "amounts as numbers and as text": {
        "engine": {"memoryRatio": "0.9"},
        "redis": {
            "managed": {
                "maxMemory": 1073741824,
                "storage": {"size": "4Gi"},
                "resources": {"limits": {"memory": "1.5G", "cpu": 1}},
            }
        },
        "ranks": {"sharedMemorySize": ".5Gi", "gpuResourceName": "nvidia.com/mig-3g.40gb"},
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ranks that fill no pod": (
        {"parallelism": {"tensor": 3, "gpusPerPod": 2}},
        "tensor must be a multiple of gpusPerPod",
    ),
    "an ingress and a route": (
        {"ingress": {"host": "a.example"}, "httpRoute": {"parentRefs": [{"name": "g"}]}},
        "mutually exclusive",
    ),
    "a negative number of groups": ({"replicas": -1}, "spec.replicas"),
    "a source of models that is none": ({"model": {"uri": "ftp://model"}}, "spec.model.uri"),
    "a flag and its value with a space between": (
        {"engine": {"extraArgs": ["--num-pages 16"]}},
        "extraArgs must hold each flag as one text, --flag=value",
    ),
    "a ratio above one": (
        {"engine": {"memoryRatio": "1.5"}},
        'memoryRatio must be text from "0.0" to "1.0"',
    ),
    "a ratio in percent": ({"engine": {"memoryRatio": "85%"}}, 'such as "0.85"'),
    "memory of Redis with a space": (
        {"redis": {"managed": {"maxMemory": "1 Gi"}}},
        'spec.redis.managed.maxMemory: Invalid value: "1 Gi": must be a quantity',
    ),
    "memory of Redis that is less than none": (
        {"redis": {"managed": {"maxMemory": -1}}},
        "must be a quantity: a number and a unit without a space, such as 512Mi or 40Gi",
    ),
    "memory of Redis that no limit can be compared with": (
        {"redis": {"managed": {"maxMemory": "1GB", "resources": {"limits": {"memory": "2Gi"}}}}},
        "must be a quantity",
    ),
    "a claim of no size": (
        {"redis": {"managed": {"storage": {"size": "large"}}}},
        'spec.redis.managed.storage.size: Invalid value: "large": must be a quantity',
    ),
    "shared memory with a comma": (
        {"ranks": {"sharedMemorySize": "1,5Gi"}},
        'spec.ranks.sharedMemorySize: Invalid value: "1,5Gi": must be a quantity',
    ),
    "an ingress by its URL": (
        {"ingress": {"host": "https://a.example"}},
        "host must be a host name alone: without scheme, port, path and spaces",
    ),
    "an ingress below no root": (
        {"ingress": {"host": "a.example", "path": "v1"}},
        "path must begin with /",
    ),
    "a backend with a space": (
        {"engine": {"attentionBackend": "fa, mini"}},
        "attentionBackend must be one name, or two with a comma",
    ),
    "a resource of GPUs without a domain": (
        {"ranks": {"gpuResourceName": "gpu"}},
        "must be an extended resource: DOMAIN/NAME",
    ),
    "a folder of nodes that is not absolute": (
        {"model": {"uri": URI, "cache": {"hostPath": {"path": "models"}}}},
        "path must be absolute",
    ),
    "an unknown device": ({"engine": {"device": "abacus"}}, "spec.engine.device"),
}


def kubectl(
    api: ApiServer, *words: str, obj: dict[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [find("kubectl")["kubectl"], *words], input=json.dumps(obj) if obj else None,
        env=api.kubectl.env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def minisglang(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "minisglang.io/v1alpha1",
        "kind": "MiniSGLang",
        "metadata": {"name": "qwen"},
        "spec": {"model": {"uri": URI}} | spec,
    }


def create(
    api: ApiServer, namespace: str, spec: dict[str, Any], *flags: str
) -> subprocess.CompletedProcess[str]:
    return kubectl(api, "create", *flags, "-n", namespace, "-f", "-", obj=minisglang(spec))


@pytest.fixture
def crd(api_server: ApiServer) -> ApiServer:
    install_chart(api_server)
    return api_server


@pytest.mark.parametrize("case", TAKEN)
def test_the_schema_takes(crd: ApiServer, namespace: str, case: str) -> None:
    done = create(crd, namespace, TAKEN[case], "--dry-run=server")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses_and_names_the_reason(crd: ApiServer, namespace: str, case: str) -> None:
    spec, reason = REFUSED[case]
    done = create(crd, namespace, spec, "--dry-run=server")
    assert done.returncode != 0
    assert " is invalid: " in done.stderr
    assert reason in done.stderr
    assert "should match" not in done.stderr  # a regular expression is no sentence


@pytest.mark.parametrize(
    ("name", "reason"),
    [("q" * 41, "name must be at most 40 characters"), ("7b", "must be a DNS-1035 label")],
)
def test_h58_a_name_that_children_cannot_have_is_refused(
    crd: ApiServer, namespace: str, name: str, reason: str
) -> None:
    one = minisglang({}) | {"metadata": {"name": name}}
    done = kubectl(crd, "create", "--dry-run=server", "-n", namespace, "-f", "-", obj=one)
    assert done.returncode != 0
    assert reason in done.stderr


def test_h59_objects_are_taken_refused_and_deleted_without_a_webhook_or_an_operator(
    crd: ApiServer, namespace: str
) -> None:
    hooks = "validatingwebhookconfigurations,mutatingwebhookconfigurations"
    assert crd.kubectl.get(hooks)["items"] == []
    types = crd.kubectl.get("crd", "minisglangs.minisglang.io")
    assert types["spec"]["conversion"] == {"strategy": "None"}
    assert create(crd, namespace, {}).returncode == 0
    assert create(crd, namespace, {"replicas": -1}).returncode != 0
    assert kubectl(crd, "delete", "minisglang", "qwen", "-n", namespace).returncode == 0


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object below a path with the fields it has, that of a list's items included."""
    properties = schema.get("items", schema).get("properties", {})
    if properties:
        yield path, properties
    for name, below in properties.items():
        yield from fields(below, f"{path}.{name}")


@pytest.mark.parametrize("part", ["spec", "status"])
def test_kubectl_explain_says_of_every_field_what_the_contract_says(
    crd: ApiServer, part: str
) -> None:
    contract = yaml.safe_load((CHART / "templates" / "crd.yaml").read_text())
    (version,) = contract["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]["properties"][part]
    found = dict(fields(schema, f"minisglang.{part}"))
    with ThreadPoolExecutor(4) as threads:
        explain = list(threads.map(lambda path: kubectl(crd, "explain", path).stdout, found))
    for (path, properties), told in zip(found.items(), explain, strict=True):
        text = " ".join(told.split())
        for name, field in properties.items():
            described = " ".join(field["description"].split())
            assert len(described) > 4 and described.lower() != f"{name.lower()}."
            head = rf" {re.escape(name)} <\S+>( -required-)? (enum: \S+(, \S+)* )?"
            assert re.search(head + re.escape(described), text), f"{path}.{name}: {described}"


def test_kubectl_explain_shows_the_whole_tree_of_the_spec(crd: ApiServer) -> None:
    contract = yaml.safe_load((CHART / "templates" / "crd.yaml").read_text())
    schema = contract["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    wanted = [name for _, properties in fields(schema, "spec") for name in properties]
    told = kubectl(crd, "explain", "minisglang.spec", "--recursive").stdout
    shown = re.findall(r"^ +(\w+)\t<", told, re.MULTILINE)
    assert sorted(shown) == sorted(wanted)


def test_an_object_outlives_the_chart_and_a_reinstall_adopts_its_crd(
    crd: ApiServer, namespace: str
) -> None:
    made = create(crd, namespace, {})
    assert made.returncode == 0, made.stderr
    uid = ("get", "minisglang", "qwen", "-n", namespace, "-o", "jsonpath={.metadata.uid}")
    before = crd.kubectl(*uid)
    subprocess.run(
        [find("helm")["helm"], "uninstall", "release", f"--namespace={RELEASE_NAMESPACE}"],
        env=crd.kubectl.env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert crd.kubectl(*uid) == before
    install_chart(crd)
    assert crd.kubectl(*uid) == before
    install_chart(crd, "operator.replicas=2")
    assert crd.kubectl(*uid) == before
    crd.kubectl("delete", "minisglang", "qwen", "-n", namespace)
