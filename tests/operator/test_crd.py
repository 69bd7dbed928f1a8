"""The CRD as users meet it: what it refuses, what it explains, and how it outlives its chart."""

import json
import subprocess
from typing import Any

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.programs import find
from tests.operator.running import RELEASE_NAMESPACE, install_chart

URI = "hf://org/model"

TAKEN: dict[str, dict[str, Any]] = {
    "a model alone": {},
    "four ranks in two pods": {"parallelism": {"tensor": 4, "gpusPerPod": 2}},
    "no group": {"replicas": 0},
    "an ingress": {"ingress": {"host": "a.example"}},
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
    api_server.kubectl("wait", "--for=condition=Established", "crd/minisglangs.minisglang.io")
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


def test_kubectl_explain_describes_every_field_of_the_spec(crd: ApiServer) -> None:
    crd_object = json.loads(crd.kubectl("get", "crd", "minisglangs.minisglang.io", "-o", "json"))
    (version,) = crd_object["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    told = kubectl(crd, "explain", "minisglang.spec").stdout
    for field, schema in spec["properties"].items():
        assert f"  {field}\t" in told
        assert schema["description"].split()[0] in told


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
