"""H50: the way to the API server breaks without a word."""

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.apiserver import ApiServer
from tests.operator.objects import Object
from tests.operator.proxy import Proxy
from tests.operator.running import Operator, install_chart
from tests.support import wait_until


@pytest.fixture(scope="module")
def api_server(own_api_server: ApiServer) -> ApiServer:
    """In place of the one that tests share."""
    return own_api_server


class Distant(Operator):
    """An operator with the API server behind a proxy."""

    def __init__(self, api: ApiServer, folder: Path, proxy: Proxy, *flags: str) -> None:
        super().__init__(api, folder)
        config = Path(self._env["KUBECONFIG"])
        config.write_text(config.read_text().replace(api.url, proxy.url))
        self._command += flags

    def livez(self) -> int:
        """The status of its answer; 0: there is none."""
        try:
            url = f"http://127.0.0.1:{self.port}/livez"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def __enter__(self) -> "Distant":
        self.start()
        return self


@pytest.fixture
def proxy(api_server: ApiServer) -> Iterator[Proxy]:
    install_chart(api_server)
    api_server.kubectl("wait", "--for=condition=Established", "crd/minisglangs.minisglang.io")
    with Proxy(api_server) as between:
        yield between


@pytest.fixture
def qwen(api_server: ApiServer, namespace: str) -> Object:
    return Object(api_server.kubectl, namespace)


def test_watches_that_were_dropped_are_opened_anew(
    api_server: ApiServer, proxy: Proxy, qwen: Object, tmp_path: Path
) -> None:
    with Distant(api_server, tmp_path, proxy, "--watch-seconds=4") as operator:
        qwen.apply()
        qwen.wait_children("Service/qwen")
        proxy.freeze()
        qwen.delete_child("Service/qwen")
        wait_until(lambda: "Service/qwen" in qwen.children(), 90, operator.log)
        assert operator.ended() is None


def test_an_operator_that_hears_nothing_says_so_and_sees_all_once_it_is_back(
    api_server: ApiServer, proxy: Proxy, qwen: Object, tmp_path: Path
) -> None:
    with Distant(api_server, tmp_path, proxy, "--watch-seconds=2") as operator:
        qwen.apply()
        qwen.wait_children("Service/qwen")
        assert operator.livez() == 200
        proxy.freeze(also_new=True)
        qwen.delete_child("Service/qwen")
        wait_until(lambda: operator.livez() == 500, 30, operator.log)
        # Another may act by then: it cannot renew its Lease.
        wait_until(lambda: operator.ended() == 1, 30, operator.log)
        operator.start(acts=False)  # as its kubelet does
        proxy.heal()
        wait_until(lambda: "Service/qwen" in qwen.children(), 90, operator.log)
        assert operator.livez() == 200


def test_a_server_that_starts_again_is_followed(
    api_server: ApiServer, proxy: Proxy, qwen: Object, tmp_path: Path
) -> None:
    with Distant(api_server, tmp_path, proxy) as operator:
        qwen.apply()
        qwen.wait_children("Service/qwen")
        api_server.server.stop(signal.SIGKILL)
        api_server.server.start()
        wait_until(api_server.ready, 60, api_server.server.tail)
        qwen.delete_child("Service/qwen")

        def back() -> bool:
            if operator.ended() is not None:  # it took so long that the Lease was lost
                operator.start(acts=False)
            return "Service/qwen" in qwen.children()

        wait_until(back, 90, operator.log)
