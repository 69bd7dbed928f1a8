"""The Gateway API comes to a cluster in which the operator runs already."""

from pathlib import Path

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.programs import tools_dir
from tests.operator.objects import Object
from tests.operator.running import Operator, install_chart

ROUTES = tools_dir() / "gateway-api" / "gateway.networking.k8s.io_httproutes.yaml"


@pytest.fixture(scope="module")
def api_server(own_api_server: ApiServer) -> ApiServer:
    """In place of the one that tests share, which may know routes."""
    if not ROUTES.exists():
        pytest.skip(f"{ROUTES} missing: run `make cluster-tools`")
    return own_api_server


def test_a_route_is_made_and_watched_once_the_cluster_knows_routes(
    api_server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    install_chart(api_server)
    qwen = Object(api_server.kubectl, namespace)
    with Operator(api_server, tmp_path) as operator:
        qwen.apply(httpRoute={"parentRefs": [{"name": "public"}]})
        qwen.wait(lambda: qwen.condition("RouteReady").get("reason") == "GatewayAPIMissing")
        pid = operator.pid
        api_server.kubectl.apply(ROUTES)
        qwen.wait(lambda: qwen.condition("RouteReady").get("reason") == "NotAdmitted", 60)
        assert "HTTPRoute/qwen" in qwen.children("httproute")
        qwen.delete_child("httproute/qwen")
        qwen.wait(lambda: "HTTPRoute/qwen" in qwen.children("httproute"))
        assert operator.pid == pid
