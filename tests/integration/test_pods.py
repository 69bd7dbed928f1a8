"""The pods of an object, as processes: what the operator writes into them makes a service."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl_operator import names
from minisgl_operator.observed import Manifest
from tests.redis_server import free_port
from tests.support import wait_until
from tests.tiny import build_tiny
from tests.unit.operator.cases import child, main_container, rank_set
from tests.unit.operator.container import Container

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.alone]

PASSWORD, KEY = "of-redis", "of-a-client"
SPEC = {
    "model": {"uri": "file:///models/tiny", "servedName": "tiny"},
    "parallelism": {"tensor": 4, "gpusPerPod": 2},
    "engine": {"device": "cpu", "dtype": "float32", "extraArgs": ["--num-pages=4096"]},
    "failurePolicy": {"heartbeatTimeoutSeconds": 10},
    "gateway": {"apiKeysSecretRef": {"name": "keys"}, "terminationGracePeriodSeconds": 15},
    "ranks": {"terminationGracePeriodSeconds": 15},
    "ingress": {"host": "h", "path": "/prefix"},
}


class Node:
    """A machine that runs the pods of one object."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.redis_port, self.port = free_port(), free_port(26000)
        self.pods: dict[str, Container] = {}
        self.secrets = folder / "secrets"
        for name, text in (("redis/password", PASSWORD), ("keys/keys", f"{KEY}\n")):
            path = self.secrets / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
        self.model = build_tiny(folder / "tiny")

    def run(self, name: str, workload: Manifest, number: int = 0) -> None:
        """Start one pod of a Deployment or StatefulSet."""
        own = self.folder / name
        own.mkdir()
        replaced = {
            "/etc/minisgl": self.secrets,
            "/models/tiny": self.model,
            "qwen-redis.models.svc": "127.0.0.1",
            "6379": self.redis_port,
            "--port=8000": f"--port={self.port}",
            '"$cli" ': f'"$cli" -p {self.redis_port} ',
        }
        for index, path in enumerate(("/run/minisgl", "/run/redis", "/data", "/cache")):
            (own / str(index)).mkdir()
            replaced[path] = own / str(index)
        labels = {
            **workload["spec"]["template"]["metadata"]["labels"],
            names.POD_INDEX: str(number),
        }
        fields = {f"metadata.labels['{key}']": value for key, value in labels.items()}
        fields["metadata.name"] = name
        pod = Container(main_container(workload), own / "log", replaced, fields)
        pod.start()
        self.pods[name] = pod

    def await_ready(self, name: str) -> None:
        pod = self.pods[name]

        def ready() -> bool:
            assert pod.process is not None and pod.process.poll() is None, pod.tail()
            return pod.succeeds("startupProbe") and pod.succeeds("readinessProbe")

        wait_until(ready, 120, pod.tail)

    def ask(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "temperature": 0, **fields}
        return httpx.post(
            f"http://127.0.0.1:{self.port}/prefix/v1/completions",
            json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60,
        )  # fmt: skip


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    try:
        yield one
    finally:
        for pod in one.pods.values():
            pod.kill()


def answers(node: Node) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{node.port}/ready", timeout=10).status_code == 200
    return False


def test_the_pods_of_an_object_serve_answer_their_probes_and_end_in_peace(node: Node) -> None:
    node.run("redis", child(SPEC, "Deployment", "-redis"))
    for role in ("gateway", "tokenizer", "detokenizer"):
        node.run(role, child(SPEC, "Deployment", f"-{role}"))
    ranks = rank_set(SPEC, 2, 7)
    assert ranks["spec"]["replicas"] == 2
    for number in range(2):
        node.run(f"qwen-g2-7-{number}", ranks, number)
    for name in ("tokenizer", "detokenizer", "qwen-g2-7-0", "qwen-g2-7-1"):
        node.await_ready(name)
        assert node.pods[name].succeeds("livenessProbe")
    wait_until(lambda: answers(node), 60, node.pods["gateway"].tail)
    answer = node.ask()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 5

    # All pods get SIGTERM at once, as when the object is deleted; Redis has its preStop first.
    leaving = node.pods["redis"].exec(node.pods["redis"].container["lifecycle"]["preStop"])
    processes = [pod.process for name, pod in node.pods.items() if name != "redis"]
    for process in processes:
        assert process is not None
        process.terminate()
    codes = [process.wait(60) for process in processes if process is not None]
    assert codes == [0] * 5, [pod.tail() for pod in node.pods.values()]
    assert leaving.wait(60) == 0
    assert node.pods["redis"].terminate() == 0


def test_a_pod_whose_container_is_killed_is_not_ready_until_its_group_serves_again(
    node: Node,
) -> None:
    spec = {**SPEC, "parallelism": {"tensor": 1}}
    node.run("redis", child(spec, "Deployment", "-redis"))
    node.run("rank", rank_set(spec))
    node.await_ready("rank")
    node.pods["rank"].kill()
    node.pods["rank"].start()
    # It removes what the dead one left, long before it can serve itself.
    wait_until(lambda: not node.pods["rank"].succeeds("startupProbe"), 10, node.pods["rank"].tail)
    node.await_ready("rank")
