"""One real API server for all tests of the operator in this process, with a namespace for each."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.programs import tools_dir
from tests.operator.running import Operator, install_chart

_numbers = itertools.count()


@pytest.fixture(scope="module")
def installed(api_server: ApiServer) -> ApiServer:
    """The API with the chart's release, whose operator does not run as a pod."""
    install_chart(api_server)
    return api_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the module's operators."""
    return tmp_path_factory.mktemp("operator")


@pytest.fixture(scope="module")
def operator(installed: ApiServer, folder: Path) -> Iterator[Operator]:
    """One operator for all tests of a module."""
    with Operator(installed, folder) as running:
        yield running


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
