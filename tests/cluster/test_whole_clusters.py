"""Clusters of other shapes: one that finds a lost node in seconds, and one for a person at a shell.

They end the one that other tests share, so their file is the last one.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster import cgroups
from tests.cluster.cluster import Cluster, folder, missing
from tests.cluster.conftest import Clusters
from tests.cluster.kubectl import Kubectl
from tests.cluster.programs import Unavailable
from tests.cluster.test_cluster_itself import NAMESPACE, addresses, answer, backends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def quick(clusters: Clusters) -> Cluster:
    """Two nodes whose loss is found in seconds."""
    try:
        return clusters.get(quick_loss=True)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def pods(quick: Cluster) -> Iterator[list[str]]:
    with backends(quick) as names:
        yield names


def is_terminating(kubectl: Kubectl, pod: str) -> bool:
    return "deletionTimestamp" in kubectl.get("pod", pod, f"--namespace={NAMESPACE}")["metadata"]


@pytest.mark.long
def test_a_node_without_power_is_not_ready_and_comes_back(quick: Cluster, pods: list[str]) -> None:
    kubectl, lost = quick.kubectl, quick.nodes[1]
    url = f"http://{addresses(kubectl, pods)[1]}:8000"
    assert answer(url, "pod") == 200
    lost.power_cut()
    assert answer(url, "pod") == 0
    kubectl.wait_for("n2 is lost", lambda: not quick.is_ready("n2"), 60, "nodes")
    kubectl.wait_for(
        "the pod on it is to be deleted",
        lambda: is_terminating(kubectl, pods[1]),
        60,
        "pods -A",
    )
    lost.power_on()
    quick.wait_until_ready()


@pytest.mark.long
def test_pods_outlive_kubelet_and_containerd(quick: Cluster, pods: list[str]) -> None:
    kubectl, hurt = quick.kubectl, quick.nodes[1]
    url = f"http://{addresses(kubectl, pods)[1]}:8000"
    hurt.kill_agents()
    kubectl.wait_for("n2 is lost", lambda: not quick.is_ready("n2"), 60, "nodes")
    assert answer(url, "pod") == 200
    hurt.start_agents()
    quick.wait_until_ready()


def leftovers() -> dict[str, set[str]]:
    """What a cluster could leave in the kernel and on this machine."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True)
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True)
    return {
        "mounts": set(mounts),
        "links": {line.split(":")[1] for line in links.stdout.splitlines()},
        "routes": set(routes.stdout.splitlines()),
        "control groups": {
            str(path) for root, _ in cgroups.hierarchies() for path in root.glob("msgl-*")
        },
        "hosts": set(Path("/etc/hosts").read_text().splitlines()),
        "places": {
            path
            for path in ("/run/netns", "/run/containerd", "/var/lib/containerd", "/var/lib/kubelet")
            if Path(path).exists()
        },
        "processes": {
            path.parent.name
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if f"{folder()}/".encode() in read(path)
        },
    }


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_up_prints_what_to_export_and_down_leaves_nothing(clusters: Clusters) -> None:
    clusters.stop()
    before = leftovers()
    if missing():
        pytest.skip(f"a cluster needs {', '.join(missing())}")
    command = [sys.executable, "-m", "tests.cluster"]
    try:
        up = subprocess.run([*command, "up", "--nodes=1"], capture_output=True, text=True)
        assert up.returncode == 0, up.stderr
        lines = dict(line.split("=", 1) for line in up.stdout.splitlines())
        assert list(lines) == ["KUBECONFIG", "PATH", "INGRESS"]
        env = {"KUBECONFIG": lines["KUBECONFIG"], "PATH": lines["PATH"], "HOME": "/"}
        for question in (["kubectl", "get", "nodes"], ["helm", "list"]):
            subprocess.run(question, env=env, check=True, capture_output=True)
        # The name resolves, and the ingress knows no such path yet.
        assert httpx.get(lines["INGRESS"]).status_code == 404
    finally:
        subprocess.run([*command, "down"], check=True)
    assert leftovers() == before
    assert not before["processes"] | before["control groups"] | before["places"]
