"""What the chart renders, without a cluster."""

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from minisgl.gateway.metrics import Metrics as GatewayMetrics
from minisgl_operator.main import read_settings
from minisgl_operator.metrics import Metrics as OperatorMetrics
from tests.cluster.programs import Unavailable, find
from tests.unit.operator.cases import CASES, all_of

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "minisglang"


@pytest.fixture(scope="module")
def helm() -> str:
    try:
        return find("helm")["helm"]
    except Unavailable as reason:
        pytest.skip(str(reason))


def template(helm: str, *sets: str) -> list[dict[str, Any]]:
    flags = [word for one in sets for word in ("--set", one)]
    done = subprocess.run(
        [helm, "template", "release", str(CHART), "--namespace=system", *flags],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of_kind(rendered: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in rendered if one["kind"] == kind]


def pods(rendered: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from (one["spec"] for one in of_kind(rendered, "Pod"))
    yield from (one["spec"]["template"]["spec"] for one in of_kind(rendered, "Deployment"))


@pytest.mark.parametrize("sets", [(), ("watchNamespaces={a,b}",), ("rbac.nodes=false",)])
def test_no_role_has_a_wildcard_or_lists_secrets(helm: str, sets: tuple[str, ...]) -> None:
    rendered = template(helm, *sets)
    rules = [
        rule
        for kind in ("Role", "ClusterRole")
        for role in of_kind(rendered, kind)
        for rule in role["rules"]
    ]
    assert rules
    for rule in rules:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if "secrets" in rule["resources"]:
            assert not {"list", "watch", "deletecollection"} & set(rule["verbs"])


def test_an_operator_of_some_namespaces_has_no_right_in_others(helm: str) -> None:
    rendered = template(helm, "watchNamespaces={a,b}")
    assert not of_kind(rendered, "ClusterRole")
    assert {role["metadata"]["namespace"] for role in of_kind(rendered, "Role")} == {
        "a", "b", "system",
    }  # fmt: skip
    (deployment,) = of_kind(rendered, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[:4] == ["run", "--namespace", "a", "b"]


def test_the_operator_reads_the_configuration_that_the_chart_writes(
    helm: str, tmp_path: Path
) -> None:
    rendered = template(
        helm, "networkPolicy.nodeCIDRs={10.0.0.0/16}", "defaults.runtimeClassName=nvidia"
    )
    (config,) = of_kind(rendered, "ConfigMap")
    file = tmp_path / "config.yaml"
    file.write_text(config["data"]["config.yaml"])
    settings = read_settings(str(file))
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert settings.image == f"ghcr.io/minisglang/minisglang-engine-{{device}}:{version}"
    assert settings.node_cidrs == ("10.0.0.0/16",)
    assert settings.runtime_class_name == "nvidia"
    assert settings.can_read_nodes


def test_another_configuration_starts_other_pods(helm: str) -> None:
    first, second = (
        of_kind(template(helm, f"defaults.runtimeClassName={name}"), "Deployment")[0]
        for name in ("a", "b")
    )
    assert first["spec"]["template"] != second["spec"]["template"]


def test_every_pod_of_the_chart_is_restricted(helm: str) -> None:
    found = list(pods(template(helm)))
    assert len(found) == 2
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_types_outlive_an_uninstall(helm: str) -> None:
    (crd,) = of_kind(template(helm), "CustomResourceDefinition")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_chart_templates_nothing_that_an_autoscaler_or_the_operator_owns(helm: str) -> None:
    kinds = {one["kind"] for one in template(helm)}
    assert "MiniSGLang" not in kinds


@pytest.mark.parametrize("case", CASES)
def test_prometheus_finds_the_gateways_of_every_object(helm: str, case: str) -> None:
    monitors = of_kind(template(helm, "serviceMonitor.create=true"), "ServiceMonitor")
    (spec,) = (one["spec"] for one in monitors if one["metadata"]["name"].endswith("-gateways"))
    wanted = spec["selector"]["matchLabels"].items()
    services = of_kind(all_of(CASES[case]), "Service")
    (found,) = (one for one in services if wanted <= one["metadata"]["labels"].items())
    assert spec["endpoints"][0]["port"] in [port["name"] for port in found["spec"]["ports"]]


def test_every_metric_of_dashboard_and_examples_exists(helm: str) -> None:
    board = (CHART / "dashboard.json").read_text()
    scaler = (ROOT / "examples" / "07-keda" / "minisglang.yaml").read_text()
    asked = set(re.findall(r"\b(minisgl_\w+)", json.dumps(json.loads(board)) + scaler))
    text = GatewayMetrics(list, lambda: 0, lambda: [("rank", "g0/0", 0)]).exposition()
    text += OperatorMetrics().text()
    there = {line.split("{")[0].split(" ")[0] for line in text.decode().splitlines()}
    assert asked and asked <= there


def test_no_query_adds_up_objects_of_one_name_in_two_namespaces() -> None:
    file = ROOT / "examples" / "07-keda" / "minisglang.yaml"
    model, scaler = yaml.safe_load_all(file.read_text())
    place = {"namespace": model["metadata"]["namespace"], "service": model["metadata"]["name"]}
    assert scaler["metadata"]["namespace"] == place["namespace"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == place["service"]
    query = scaler["spec"]["triggers"][0]["metadata"]["query"]
    selectors = re.findall(r"minisgl_\w+({[^}]*})?", query)
    assert len(selectors) == 2
    for selector in selectors:
        assert dict(re.findall(r'(\w+)="([^"]*)"', selector)) == place
    board = json.loads((CHART / "dashboard.json").read_text())
    for expr in re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', json.dumps(board)):
        if "minisgl_operator_" not in expr:
            assert expr.count("namespace=~") == len(re.findall(r"minisgl_\w+", expr))
            assert all("namespace" in by for by in re.findall(r"by \(([^)]*)\)", expr))


def test_a_value_that_is_unknown_or_wrong_is_refused_by_name(helm: str) -> None:
    for value, named in [
        ("operator.replica=2", "replica"),
        ("networkPolicy.nodeCIDRs={10.0.0.1}", "nodeCIDRs"),
        ("operator.logFormat=xml", "logFormat"),
    ]:
        done = subprocess.run(
            [helm, "template", "release", str(CHART), "--set", value],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode and named in done.stderr


def test_every_value_has_a_comment() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r" *\w+: *\S", line) and not before.lstrip().startswith("#"):
            # Neighbours that one comment is about.
            assert re.match(r" *(podAnnotations|limits|requests):", line), line


def test_the_pod_of_helm_test_is_no_pod_of_the_operator(helm: str) -> None:
    """Or its Service would send to it, and its Deployment would count it."""
    rendered = template(helm)
    (test,) = of_kind(rendered, "Pod")
    selectors = [one["spec"]["selector"] for one in of_kind(rendered, "Service")]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(rendered, "Deployment")]
    assert selectors
    for selector in selectors:
        assert not selector.items() <= test["metadata"]["labels"].items()
