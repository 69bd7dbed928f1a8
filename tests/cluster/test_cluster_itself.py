"""The test cluster does what clusters do."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.programs import Unavailable
from tests.support import wait_until

NAMESPACE = "itself"
BACKEND = Path(__file__).with_name("backend.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def named(name: str) -> dict[str, str]:
    return {"name": name, "namespace": NAMESPACE}


def pod_on(node: str, image: str) -> dict[str, Any]:
    """A pod `on-NODE` with the backend and the models' claim."""
    container = {
        "name": "backend",
        "image": image,
        "command": ["python3", "-c", BACKEND.read_text()],
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    }
    spec = {
        "nodeName": node,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    }
    metadata = {**named(f"on-{node}"), "labels": {"app": "backend", "node": node}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def is_ready(kubectl: Kubectl, pod: str) -> bool:
    conditions = kubectl.get("pod", pod, f"--namespace={NAMESPACE}")["status"]["conditions"]
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@contextmanager
def backends(cluster: Cluster) -> Iterator[list[str]]:
    """A backend on each node, and a Service of both; the names of the pods."""
    kubectl = cluster.kubectl
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.claim_models(NAMESPACE)
    service = {"selector": {"app": "backend"}, "ports": [{"port": 80, "targetPort": 8000}]}
    kubectl.wait_for(
        "the namespace has its ServiceAccount",
        lambda: kubectl.get("serviceaccount", "default", f"--namespace={NAMESPACE}"),
        30,
    )
    names = [f"on-{node.name}" for node in cluster.nodes]
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": named("backend"), "spec": service},
        *(pod_on(node.name, cluster.base_image) for node in cluster.nodes),
    )
    kubectl.wait_for(
        "the backends are ready",
        lambda: all(is_ready(kubectl, name) for name in names),
        60,
        f"pods --namespace={NAMESPACE}",
    )
    yield names
    kubectl("delete", "pods", "--all", "--force", "--grace-period=0", f"--namespace={NAMESPACE}")
    kubectl("delete", "ingress,httproute", "--all", f"--namespace={NAMESPACE}")


@pytest.fixture
def pods(cluster: Cluster) -> Iterator[list[str]]:
    with backends(cluster) as names:
        yield names


def addresses(kubectl: Kubectl, pods: list[str]) -> list[str]:
    found = [kubectl.get("pod", pod, f"--namespace={NAMESPACE}") for pod in pods]
    return [pod["status"]["podIP"] for pod in found]


def inside(kubectl: Kubectl, pod: str, *argv: str) -> str:
    return kubectl("exec", f"--namespace={NAMESPACE}", pod, "--", *argv)


def route(kubectl: Kubectl, kind: str, host: str) -> None:
    """Lead a host name to the Service, by an Ingress or by an HTTPRoute."""
    if kind == "Ingress":
        backend = {"service": {"name": "backend", "port": {"number": 80}}}
        path = {"path": "/", "pathType": "Prefix", "backend": backend}
        spec: dict[str, Any] = {"rules": [{"host": host, "http": {"paths": [path]}}]}
        api = "networking.k8s.io/v1"
    else:
        spec = {
            "parentRefs": [{"name": "traefik", "namespace": "traefik"}],
            "hostnames": [host],
            "rules": [{"backendRefs": [{"name": "backend", "port": 80}]}],
        }
        api = "gateway.networking.k8s.io/v1"
    kubectl.apply({"apiVersion": api, "kind": kind, "metadata": named("backend"), "spec": spec})


def answer(url: str, host: str) -> int:
    """The status with which the ingress answers; 0 if it does not."""
    try:
        return httpx.get(url, headers={"Host": host}, timeout=5).status_code
    except httpx.HTTPError:
        return 0


def test_all_nodes_are_ready_and_know_their_names(cluster: Cluster) -> None:
    items = cluster.kubectl.get("nodes")["items"]
    assert [item["metadata"]["name"] for item in items] == ["n1", "n2"]
    assert all(cluster.is_ready(node.name) for node in cluster.nodes)
    assert [node.run("hostname").strip() for node in cluster.nodes] == ["n1", "n2"]


def test_pods_of_both_nodes_find_a_service_by_name(cluster: Cluster, pods: list[str]) -> None:
    fetch = f"import urllib.request as u; print(u.urlopen('http://backend.{NAMESPACE}').read())"
    for pod in pods:
        answers = {inside(cluster.kubectl, pod, "python3", "-c", fetch) for _ in range(20)}
        # Both: one of them is on the other node.
        assert len(answers) == 2


def test_a_pod_reaches_this_machine(cluster: Cluster, pods: list[str]) -> None:
    with socket.create_server(("10.240.0.1", 0)) as server:
        address = server.getsockname()
        inside(
            cluster.kubectl, pods[1], "python3", "-c",
            f"import socket; socket.create_connection({address!r}, 5)",
        )  # fmt: skip


def test_the_claim_shows_the_models_read_only(cluster: Cluster, pods: list[str]) -> None:
    for pod in pods:
        listed = inside(cluster.kubectl, pod, "ls", "/models").split()
        assert listed == sorted(os.listdir(cluster.models))
        mounts = inside(cluster.kubectl, pod, "cat", "/proc/mounts").splitlines()
        (options,) = (line.split()[3] for line in mounts if line.split()[1] == "/models")
        assert "ro" in options.split(",")


@pytest.mark.parametrize("kind", ["Ingress", "HTTPRoute"])
def test_events_come_through_the_ingress_one_by_one(
    cluster: Cluster, pods: list[str], kind: str
) -> None:
    host = f"{kind.lower()}.example.com"
    assert answer(cluster.ingress, host) == 404
    route(cluster.kubectl, kind, host)
    wait_until(lambda: answer(cluster.ingress, host) == 200, 30, lambda: "the route is not there")
    urls = [f"http://{address}:8000" for address in addresses(cluster.kubectl, pods)]
    seen = []
    with httpx.stream("GET", f"{cluster.ingress}/events", headers={"Host": host}) as response:
        for line in response.iter_lines():
            if line:
                seen.append(line)
                # Without this the backend sends no further one.
                for url in urls:
                    httpx.get(f"{url}/next")
    assert seen == [f"data: {number}" for number in range(10)]


def test_each_node_serves_the_ingress(cluster: Cluster, pods: list[str]) -> None:
    route(cluster.kubectl, "Ingress", "each.example.com")
    for node in cluster.nodes:
        wait_until(
            lambda url=f"http://{node.address}": answer(url, "each.example.com") == 200,
            30,
            lambda: "a node does not serve it",
        )


def test_a_second_cluster_is_refused_with_the_way_out(cluster: Cluster) -> None:
    with pytest.raises(Unavailable, match="make cluster-down"):
        Cluster()
