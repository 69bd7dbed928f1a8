"""A real API server takes all that the chart renders, and knows every field of it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.apiserver import ApiServer
from tests.cluster.kubectl import KubectlError
from tests.cluster.programs import find
from tests.operator.running import CHART

VALUES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "of some namespaces": {
        "watchNamespaces": ["{namespace}", "default"],
        "serviceMonitor": {"create": True},
    },
    "without rights over nodes": {"rbac": {"nodes": False}, "fullnameOverride": "models"},
    "with rights and an account of one's own": {
        "rbac": {"create": False},
        "serviceAccount": {"create": False, "name": "default"},
    },
    "observed": {
        "serviceMonitor": {"create": True, "interval": "30s", "labels": {"release": "prometheus"}},
        "dashboard": {"create": True},
    },
    "with all that a pod may ask for": {
        "operator": {
            "image": {"repository": "registry.example:5000/operator", "tag": "1.2-rc.3"},
            "imagePullSecrets": [{"name": "registry"}],
            "replicas": 2,
            "resources": {"requests": {"cpu": 1}, "limits": {"memory": "1Gi"}},
            "nodeSelector": {"kubernetes.io/arch": "arm64"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {
                                "matchLabels": {"app.kubernetes.io/name": "minisglang-operator"}
                            },
                        }
                    ]
                }
            },
            "priorityClassName": "system-cluster-critical",
            "podLabels": {"team": "models"},
            "podAnnotations": {"example.com/number": "1"},
        },
        "serviceAccount": {"name": "bot", "annotations": {"example.com/role": "models"}},
        "defaults": {"image": "registry.example/engine-{device}:2", "runtimeClassName": "nvidia"},
        "networkPolicy": {"nodeCIDRs": ["10.0.0.0/16", "fd00::/64"]},
        "test": {"image": "registry.example/python:3"},
    },
}


@pytest.fixture(autouse=True)
def restricted(foreign_types: ApiServer, namespace: str) -> None:
    """The namespace admits only pods of the restricted level, and warns of other templates."""
    level = [f"pod-security.kubernetes.io/{mode}=restricted" for mode in ("enforce", "warn")]
    foreign_types.kubectl("label", "namespace", namespace, *level)


def rendered(case: str, namespace: str, folder: Path) -> list[dict[str, Any]]:
    values = folder / "values.yaml"
    values.write_text(json.dumps(VALUES[case]).replace("{namespace}", namespace))
    done = subprocess.run(
        [find("helm")["helm"], "template", "release", str(CHART), f"--namespace={namespace}",
         f"--values={values}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def take(api: ApiServer, *objects: dict[str, Any]) -> None:
    """What the server says to objects before it would write them; raises `KubectlError`."""
    api.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict",
        "--warnings-as-errors", "-f", "-",
        stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
    )  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_the_server_takes_the_chart(
    foreign_types: ApiServer, namespace: str, case: str, tmp_path: Path
) -> None:
    take(foreign_types, *rendered(case, namespace, tmp_path))


def test_a_field_that_a_kind_does_not_have_is_refused(
    foreign_types: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """So the test before this one sees typing errors, in kinds of other projects as well."""
    kinds = set()
    for one in rendered("observed", namespace, tmp_path):
        place = one["spec"] if "spec" in one else one["metadata"]
        place["colour"] = "green"
        with pytest.raises(KubectlError, match="colour"):
            take(foreign_types, one)
        kinds.add(one["kind"])
    assert {"Deployment", "ClusterRole", "CustomResourceDefinition", "ServiceMonitor"} <= kinds


def test_a_pod_that_is_not_restricted_is_refused(
    foreign_types: ApiServer, namespace: str, tmp_path: Path
) -> None:
    """So the first test shows that the chart's pods are."""
    (deployment,) = (
        one for one in rendered("as it comes", namespace, tmp_path) if one["kind"] == "Deployment"
    )
    deployment["spec"]["template"]["spec"]["hostNetwork"] = True
    with pytest.raises(KubectlError, match="restricted"):
        take(foreign_types, deployment)


def test_a_release_of_some_namespaces_has_a_role_in_each_and_none_of_the_cluster(
    foreign_types: ApiServer, namespace: str, tmp_path: Path
) -> None:
    objects = rendered("of some namespaces", namespace, tmp_path)
    bound = {o["metadata"]["namespace"] for o in objects if o["kind"] == "RoleBinding"}
    assert bound == {namespace, "default"}
    (gateways,) = (
        one["spec"]["namespaceSelector"]["matchNames"]
        for one in objects
        if one["kind"] == "ServiceMonitor" and "namespaceSelector" in one["spec"]
    )
    assert gateways == [namespace, "default"]
    assert not [one for one in objects if one["kind"].startswith("ClusterRole")]
