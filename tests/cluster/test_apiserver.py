"""The API server of the tests: what it keeps, and what it tells."""

import signal
from collections.abc import Iterator

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.kubectl import KubectlError
from tests.cluster.programs import Unavailable
from tests.support import wait_until


@pytest.fixture(scope="module")
def api() -> Iterator[ApiServer]:
    try:
        server = ApiServer()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with server:
        yield server


def config_map(name: str, value: str) -> dict[str, object]:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": value}}


def test_objects_survive_the_death_of_server_and_etcd(api: ApiServer) -> None:
    api.kubectl.apply(config_map("kept", "1"))
    api.server.stop(signal.SIGKILL)
    api.etcd.stop(signal.SIGKILL)
    api.etcd.start()
    api.server.start()
    wait_until(api.ready, 60, api.server.tail)
    assert api.kubectl.get("configmap", "kept")["data"] == {"a": "1"}


def test_the_audit_log_tells_writes_and_no_reads(api: ApiServer) -> None:
    api.kubectl.apply(config_map("told", "1"))
    before = len(api.writes("default"))
    api.kubectl.get("configmap", "told")
    assert len(api.writes("default")) == before
    api.kubectl.apply(config_map("told", "2"))
    (write,) = api.writes("default")[before:]
    assert (write.verb, write.resource, write.name, write.code) == (
        "patch", "configmaps", "told", 200,
    )  # fmt: skip


def test_what_the_server_refuses_is_an_error_with_its_words(api: ApiServer) -> None:
    with pytest.raises(KubectlError, match="Invalid value"):
        api.kubectl.apply(config_map("Not A Name", "1"))
    with pytest.raises(KubectlError, match="NotFound"):
        api.kubectl.get("configmap", "absent")


def test_a_pod_needs_no_service_account(api: ApiServer) -> None:
    spec = {"containers": [{"name": "one", "image": "any"}]}
    metadata = {"name": "played", "namespace": "default"}
    api.kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    api.kubectl.set_status("pod", "played", "default", phase="Running")
    assert api.kubectl.get("pod", "played")["status"]["phase"] == "Running"
