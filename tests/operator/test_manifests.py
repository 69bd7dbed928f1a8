"""The API server takes every child as it is, and reads it as it was meant."""

import json

import pytest

from minisgl_operator import api
from minisgl_operator.drift import differs
from minisgl_operator.observed import Manifest
from tests.cluster.apiserver import ApiServer
from tests.cluster.kubectl import KubectlError
from tests.unit.operator.cases import CASES, all_of, observe

pytestmark = pytest.mark.usefixtures("foreign_types")


def children(case: str, namespace: str) -> list[Manifest]:
    """All children of an object in this namespace."""
    found = all_of(CASES[case])
    return [{**one, "metadata": {**one["metadata"], "namespace": namespace}} for one in found]


def listed(manifests: list[Manifest]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})


def live(api: ApiServer, manifests: list[Manifest]) -> list[Manifest]:
    found = json.loads(api.kubectl("get", "-f", "-", "-o", "json", stdin=listed(manifests)))
    items: list[Manifest] = found["items"]
    return items


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_every_child_and_a_second_time_changes_nothing(
    api_server: ApiServer, namespace: str, case: str
) -> None:
    wanted = children(case, namespace)
    api_server.kubectl.apply(*wanted)
    first = live(api_server, wanted)
    differing = [differs(one, held) for one, held in zip(wanted, first, strict=True)]
    assert not any(differing), differing
    api_server.kubectl.apply(*wanted)
    for before, after in zip(first, live(api_server, wanted), strict=True):
        if before["kind"] != "PersistentVolumeClaim":  # any apply counts as a write of these
            assert before == after


@pytest.mark.parametrize("case", CASES)
def test_the_types_have_the_defaults_of_the_schema(
    installed: ApiServer, namespace: str, case: str
) -> None:
    kubectl = installed.kubectl
    metadata = {"name": "qwen", "namespace": namespace}
    written = {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": metadata}
    kubectl.apply({**written, "spec": CASES[case]})
    stored = api.parse(kubectl.get("msgl", "qwen", "--namespace", namespace))
    assert stored.spec == observe(CASES[case]).obj.spec


@pytest.mark.parametrize("case", CASES)
def test_only_ranks_with_the_network_or_the_disk_of_the_node_need_a_privileged_namespace(
    api_server: ApiServer, namespace: str, case: str
) -> None:
    level = "pod-security.kubernetes.io/enforce=restricted"
    api_server.kubectl("label", "namespace", namespace, level)
    for one in children(case, namespace):
        if one["kind"] not in ("Deployment", "StatefulSet", "Job"):
            continue
        template = one["spec"]["template"]
        metadata = {**template["metadata"], "name": "pod", "namespace": namespace}
        other = ("priorityClassName", "runtimeClassName")  # which this cluster does not have
        spec = {k: v for k, v in template["spec"].items() if k not in other}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        refused = ""
        try:
            api_server.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        except KubectlError as error:
            refused = str(error)
            assert "violates PodSecurity" in refused
        of_the_node = spec.get("hostNetwork") or any("hostPath" in v for v in spec["volumes"])
        assert bool(refused) == bool(one["kind"] == "StatefulSet" and of_the_node), refused
