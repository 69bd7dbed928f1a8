"""One real API server for all tests of the operator in this process, with a namespace for each."""

import itertools
from collections.abc import Iterator

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.programs import Unavailable, tools_dir

_numbers = itertools.count()


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """The API and nothing that acts on it: the test plays scheduler, kubelet and controllers."""
    try:
        server = ApiServer()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with server:
        yield server


@pytest.fixture(scope="session")
def foreign_types(api_server: ApiServer) -> ApiServer:
    """The API, which knows the types of other projects: Gateway API, KEDA, Prometheus Operator."""
    files = [
        tools_dir() / "gateway-api" / "gateway.networking.k8s.io_httproutes.yaml",
        tools_dir() / "keda" / "keda.sh_scaledobjects.yaml",
        tools_dir() / "prometheus-operator" / "monitoring.coreos.com_servicemonitors.yaml",
    ]
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: run `make cluster-tools`")
    api_server.kubectl.apply(*files)
    for file in files:
        api_server.kubectl("wait", "--for=condition=Established", "-f", str(file))
    return api_server


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A namespace that no other test has."""
    name = f"test-{next(_numbers)}"
    api_server.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name
