"""The API server of the tests: what it keeps, and what it tells."""

import signal

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.kubectl import KubectlError
from tests.support import wait_until


def config_map(name: str, value: str) -> dict[str, object]:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": value}}


def test_objects_survive_the_death_of_server_and_etcd(api_server: ApiServer) -> None:
    api_server.kubectl.apply(config_map("kept", "1"))
    api_server.server.stop(signal.SIGKILL)
    api_server.etcd.stop(signal.SIGKILL)
    api_server.etcd.start()
    api_server.server.start()
    wait_until(api_server.ready, 60, api_server.server.tail)
    assert api_server.kubectl.get("configmap", "kept")["data"] == {"a": "1"}


def test_the_audit_log_tells_writes_and_no_reads(api_server: ApiServer) -> None:
    api_server.kubectl.apply(config_map("told", "1"))
    before = len(api_server.writes("default"))
    api_server.kubectl.get("configmap", "told")
    assert len(api_server.writes("default")) == before
    api_server.kubectl.apply(config_map("told", "2"))
    (write,) = api_server.writes("default")[before:]
    assert (write.verb, write.resource, write.name, write.code) == (
        "patch", "configmaps", "told", 200,
    )  # fmt: skip


def test_what_the_server_refuses_is_an_error_with_its_words(api_server: ApiServer) -> None:
    with pytest.raises(KubectlError, match="Invalid value"):
        api_server.kubectl.apply(config_map("Not A Name", "1"))
    with pytest.raises(KubectlError, match="NotFound"):
        api_server.kubectl.get("configmap", "absent")


def test_a_pod_needs_no_service_account(api_server: ApiServer) -> None:
    spec = {"containers": [{"name": "one", "image": "any"}]}
    metadata = {"name": "played", "namespace": "default"}
    api_server.kubectl.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    )
    api_server.kubectl.set_status("pod", "played", "default", phase="Running")
    assert api_server.kubectl.get("pod", "played")["status"]["phase"] == "Running"
