"""The chart comes and goes in several versions, and a live object lives on."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.apiserver import ApiServer
from tests.cluster.kubectl import KubectlError
from tests.cluster.programs import find
from tests.operator.running import ACCOUNT, CHART, RELEASE_NAMESPACE, Operator, install_chart
from tests.support import wait_until

CRD = "crd/minisglangs.minisglang.io"
OURS = "app.kubernetes.io/managed-by=minisgl-operator"
KINDS = "deployment,statefulset,service,networkpolicy,poddisruptionbudget,controllerrevision,secret"
OLD = "0.0.9"


def helm(api: ApiServer, *words: str) -> None:
    subprocess.run(
        [find("helm")["helm"], *words, f"--namespace={RELEASE_NAMESPACE}"],
        env=api.kubectl.env, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def api_server(own_api_server: ApiServer) -> ApiServer:
    """In place of the one that tests share."""
    return own_api_server


@pytest.fixture
def older_chart(tmp_path: Path) -> Path:
    """The package of a version whose types lack a field and a column, with another image."""
    chart = tmp_path / "minisglang"
    shutil.copytree(CHART, chart)
    file = chart / "templates" / "crd.yaml"
    crd = yaml.safe_load(file.read_text())
    (version,) = crd["spec"]["versions"]
    version["additionalPrinterColumns"].pop(0)
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["restartedAt"]
    file.write_text(yaml.safe_dump(crd))
    subprocess.run(
        [find("helm")["helm"], "package", str(chart), f"--version={OLD}", f"--app-version={OLD}",
         f"--destination={tmp_path}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return tmp_path / f"minisglang-{OLD}.tgz"


def default_image(api: ApiServer) -> str:
    """What the chart tells the operator to give to objects that name no image."""
    config = api.kubectl.get("configmap", ACCOUNT, "-n", RELEASE_NAMESPACE)["data"]["config.yaml"]
    image: str = yaml.safe_load(config)["image"]
    return image


class Qwen:
    """An object without an image of its own, and its children."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self._kubectl, self._namespace = api.kubectl, namespace

    def manifest(self, tokenizers: int, **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "minisglang.io/v1alpha1",
            "kind": "MiniSGLang",
            "metadata": {"name": "qwen", "namespace": self._namespace},
            "spec": {
                "model": {"uri": "pvc://models/m"},
                "engine": {"device": "cpu"},
                "tokenizer": {"replicas": tokenizers},
            }
            | spec,
        }

    def scale_tokenizers(self, count: int) -> None:
        """Have the operator look at all of the object, and wait until it has done so."""
        self._kubectl.apply(self.manifest(count))

        def done() -> bool:
            live = self._kubectl.get("msgl", "qwen", "-n", self._namespace)
            seen = live.get("status", {}).get("observedGeneration")
            tokenizers = self.children().get("Deployment/qwen-tokenizer", {"spec": {"replicas": 0}})
            return bool(
                seen == live["metadata"]["generation"]
                and tokenizers["spec"]["replicas"] == count
                and "StatefulSet/qwen-g0-1" in self.children()
            )

        wait_until(done, 60, lambda: str(self.children().keys()))

    def children(self) -> dict[str, dict[str, Any]]:
        found = self._kubectl.get(KINDS, "-n", self._namespace, "-l", OURS)["items"]
        return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}

    def uids(self) -> dict[str, str]:
        """Of the object and its children."""
        live = self._kubectl.get("msgl", "qwen", "-n", self._namespace)
        return {"MiniSGLang/qwen": live["metadata"]["uid"]} | {
            key: one["metadata"]["uid"] for key, one in self.children().items()
        }

    def pods(self) -> dict[str, Any]:
        """What pods of each child are made of: one that differs restarts them."""
        return {
            key: one["spec"]["template"]
            for key, one in self.children().items()
            if "template" in one.get("spec", {})
        }


def test_an_upgrade_and_a_reinstall_of_the_chart_replace_no_object_and_no_pod(
    api_server: ApiServer, namespace: str, older_chart: Path, tmp_path: Path
) -> None:
    install_chart(api_server)  # its release may be there from other tests or not
    helm(api_server, "uninstall", "release")
    helm(api_server, "install", "release", str(older_chart), "--create-namespace")
    older = default_image(api_server)
    assert older.endswith(f":{OLD}")
    qwen = Qwen(api_server, namespace)

    def act(name: str, tokenizers: int) -> None:
        with Operator(api_server, tmp_path, name, default_image(api_server)):
            qwen.scale_tokenizers(tokenizers)

    act("older", 2)
    uids, pods = qwen.uids(), qwen.pods()
    assert f"minisglang-engine-cpu:{OLD}" in json.dumps(pods["StatefulSet/qwen-g0-1"])
    strict = json.dumps(qwen.manifest(1, restartedAt="2026-01-02T03:04:05Z"))
    dry_run = ("apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-")
    with pytest.raises(KubectlError, match="restartedAt"):
        api_server.kubectl(*dry_run, stdin=strict)

    install_chart(api_server)
    assert default_image(api_server) != older
    (version,) = api_server.kubectl.get(CRD)["spec"]["versions"]
    assert version["additionalPrinterColumns"][0]["name"] == "Model"
    wait_until(lambda: "restartedAt" in api_server.kubectl("explain", "msgl.spec"), 30, str)
    api_server.kubectl(*dry_run, stdin=strict)
    act("newer", 3)
    assert (qwen.uids(), qwen.pods()) == (uids, pods)

    helm(api_server, "uninstall", "release")
    assert (qwen.uids(), qwen.pods()) == (uids, pods)
    install_chart(api_server)
    act("again", 1)
    found, wanted = qwen.uids(), dict(uids)
    # With one tokenizer there is nothing for its budget to guard.
    wanted.pop("PodDisruptionBudget/qwen-tokenizer")
    assert (found, qwen.pods()) == (wanted, pods)
