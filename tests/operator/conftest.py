"""One real API server for all tests of the operator in this process, with a namespace for each."""

import itertools
from collections.abc import Iterator

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.programs import Unavailable

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


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A namespace that no other test has."""
    name = f"test-{next(_numbers)}"
    api_server.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name
