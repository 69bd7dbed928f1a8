"""The chart on a cluster that exists already, such as kind: installed, asked, and gone again.

    MINISGL_TEST_KUBECONFIG=FILE [MINISGL_TEST_IMAGE=NAME] [MINISGL_TEST_OPERATOR_IMAGE=NAME]
    [MINISGL_TEST_MODEL_URI=URI] [MINISGL_TEST_HF_ENDPOINT=URL]
    .venv/bin/python -m pytest tests/cluster/test_existing.py

Images are found by name: the cluster pulls them, or has them (`kind load docker-image`). All goes
into a namespace of its own that is deleted in the end; the CRD stays, as it does in life. Where
pods cannot reach the model hub, the endpoint is that of a mirror which they can reach. The cluster
must have no release of the chart yet, since the CRD belongs to one.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.load import Endpoint
from tests.cluster.msgl import Msgl
from tests.cluster.product import CHART

KUBECONFIG = "MINISGL_TEST_KUBECONFIG"
MODEL_URI = os.environ.get("MINISGL_TEST_MODEL_URI", "hf://HuggingFaceTB/SmolLM2-135M-Instruct")
HF_ENDPOINT = os.environ.get("MINISGL_TEST_HF_ENDPOINT")
READY_SECONDS = 900.0
"""Images are pulled and a model is downloaded meanwhile."""

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        KUBECONFIG not in os.environ,
        reason=f"{KUBECONFIG} names no cluster to install the chart on",
    ),
]


@pytest.fixture
def kubectl() -> Kubectl:
    """Asks the cluster that was named."""
    return Kubectl(Path(os.environ[KUBECONFIG]).absolute())


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """A namespace with the chart's operator, which watches no other one."""
    name = f"minisgl-test-{secrets.token_hex(4)}"
    kubectl("create", "namespace", name)
    sets = [f"watchNamespaces={{{name}}}"]
    operator = os.environ.get("MINISGL_TEST_OPERATOR_IMAGE")
    if operator:
        repository, _, tag = operator.rpartition(":")
        sets += [f"operator.image.repository={repository}", f"operator.image.tag={tag}"]
    flags = [word for one in sets for word in ("--set", one)]
    try:
        _helm(kubectl, name, "install", name, str(CHART), *flags, "--wait", "--timeout=10m")
        yield name
    finally:
        # Objects first: nobody else takes their finalizers off, should they have any.
        kubectl("delete", "msgl", "--all", f"--namespace={name}", "--timeout=120s", seconds=150)
        subprocess.run(
            ["helm", "uninstall", name, f"--namespace={name}"], env=kubectl.env, check=False
        )
        kubectl("delete", "namespace", name, "--wait=false")


def test_an_object_serves_on_a_cluster_that_exists(kubectl: Kubectl, namespace: str) -> None:
    served = Msgl(kubectl, namespace, "smol")
    image = os.environ.get("MINISGL_TEST_IMAGE")
    model: dict[str, Any] = {"uri": MODEL_URI, "servedName": "smol"}
    if HF_ENDPOINT:
        env = [{"name": "HF_ENDPOINT", "value": HF_ENDPOINT}]
        container = {"name": "download", "env": env}
        model["download"] = {"podTemplate": {"spec": {"containers": [container]}}}
    served.apply(
        model=model,
        engine={"device": "cpu", "dtype": "float32", "extraArgs": ["--num-pages=8192"]},
        network={"hostNetwork": False},
        **({"image": image} if image else {}),
    )
    kubectl.wait_for(
        "the object is ready", lambda: served.condition("Ready")["status"] == "True",
        READY_SECONDS, f"msgl,pods,events --namespace={namespace}",
    )  # fmt: skip
    _helm(kubectl, namespace, "test", namespace, "--timeout=5m")
    with forwarded(kubectl, namespace, "service/smol", 80) as url:
        endpoint = Endpoint(url, "smol", "smol")
        answer = endpoint.stream(endpoint.body("rivers", 32))
    assert (answer.status, answer.finish, answer.error) == (200, "length", "")
    assert len(answer.text) > 32


@contextmanager
def forwarded(kubectl: Kubectl, namespace: str, target: str, port: int) -> Iterator[str]:
    """The URL of a port of the cluster, for as long as the context lasts."""
    process = subprocess.Popen(
        ["kubectl", "port-forward", f"--namespace={namespace}", target, f":{port}"],
        env=kubectl.env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # "Forwarding from 127.0.0.1:41234 -> 8000"
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert found, f"kubectl port-forward said {line!r}"
        url = f"http://127.0.0.1:{found[1]}"
        assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
        yield url
    finally:
        process.kill()
        process.wait()


def _helm(kubectl: Kubectl, namespace: str, *args: str) -> None:
    done = subprocess.run(
        ["helm", *args, f"--namespace={namespace}"], env=kubectl.env, capture_output=True,
        text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"helm {' '.join(args)}: {done.stderr}{done.stdout}"
