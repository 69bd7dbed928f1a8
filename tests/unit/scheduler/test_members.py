"""Where the ranks of a group listen, and with which address; needs redis-server."""

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.bus.network import Network, Nic
from minisgl.bus.rendezvous import Meeting, Rendezvous
from minisgl.config import EngineConfig, RankConfig, StartError
from minisgl.distributed import gloo
from minisgl.scheduler import cluster
from minisgl.scheduler.cluster import RedisMembers
from minisgl.scheduler.feed import PubSubFeed
from minisgl.scheduler.watchdog import FORMING_CODE
from tests.redis_server import RedisServer, free_port

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks tell NCCL and Gloo here ends with the test."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")


def members(
    server: RedisServer, group: str, rank: int, network: Network | None = None, **fields: Any
) -> RedisMembers:
    config = RankConfig(
        bus=server.url,
        model="m",
        service="svc",
        engine=EngineConfig(model="m", tensor_parallel_size=2),
        group=group,
        tp_rank=rank,
        **fields,
    )
    return RedisMembers(config, boot=rank + 1, network=network)


def test_h01_h02_groups_that_start_at_once_on_one_host_listen_on_other_ports_of_the_range(
    server: RedisServer,
) -> None:
    first = free_port()
    made: list[Any] = []
    failed: list[BaseException] = []

    def meet(group: str, rank: int) -> None:
        try:
            one = members(server, group, rank, port_range=f"{first}-{first + 30}")
            comm, feed = one.meet(incarnation=7)
            made.extend([PubSubFeed(comm, feed, 20), comm, one])
        except BaseException as error:
            failed.append(error)

    groups = ["g0", "g1", "g2"]
    threads = [
        threading.Thread(target=meet, args=(group, rank), daemon=True)
        for group in groups
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    try:
        assert failed == [] and len(made) == 3 * len(threads), "every rank has met its group"
        keys = [f"minisgl:{{svc}}:rdzv:{group}" for group in groups]
        held: list[Any] = [server.client().hgetall(key) for key in keys]
        ports = [int(one[key]) for one in held for key in (b"store_port", b"feed_port")]
        assert len(set(ports)) == 6
        assert all(first <= port <= first + 30 for port in ports)
        for port in ports:
            socket.create_connection(("127.0.0.1", port), 5).close()
    finally:
        for one in made:
            one.close()


@pytest.mark.parametrize(
    ("rank", "fields", "name", "address"),
    [
        (1, {}, "eth0", "10.0.0.7"),
        (1, {"interface": "lo"}, "lo", "127.0.0.1"),
        (0, {}, "lo", "127.0.0.1"),
    ],
)
def test_h05_gloo_gets_the_address_of_the_way_to_rank_0_or_of_the_interface(
    server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    fields: dict[str, str],
    name: str,
    address: str,
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(gloo, "GlooCommunicator", lambda *_, **named: given.update(named))
    one = members(server, "g5", rank, network=HOST, **fields)
    monkeypatch.setattr(one, "_join", lambda: Meeting(7, "10.0.3.9", 20000, 20001))
    one.meet(incarnation=8)
    one.close()
    assert given["host"] == address
    assert os.environ["GLOO_SOCKET_IFNAME"] == name
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={name}"


def test_h05_a_rank_elsewhere_does_not_join_a_rank_0_that_gave_its_loopback_address(
    server: RedisServer,
) -> None:
    here = Rendezvous(server.url, "svc", "g6", size=2, revision="", silence=4)
    assert here.open(Meeting(7, "127.0.0.1", 20000, 20001), 1)
    far = Network(HOST.nics, lambda *_: "10.0.0.7")
    joins = Rendezvous(server.url, "svc", "g6", size=2, revision="", silence=4, network=far)
    with pytest.raises(StartError, match="gave 127.0.0.1, which is its host's own: give it"):
        joins.join(1, 2, seconds=0.5)


def test_a_rank_that_never_comes_ends_the_forming_with_its_number(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[tuple[int, str]] = []
    monkeypatch.setattr(cluster, "leave", lambda code, why: ends.append((code, why)))
    monkeypatch.setattr(gloo, "GlooCommunicator", lambda *_, **__: None)
    first = members(server, "g7", 0)
    first.meet(incarnation=7)
    try:
        first.each_second()
        assert ends == []
        monkeypatch.setattr(cluster, "START_SECONDS", -1.0)
        first.each_second()
        assert ends == [(FORMING_CODE, "rank 1 has not come within -1 s")]
        other = Rendezvous(server.url, "svc", "g7", size=2, revision="", silence=4)
        other.join(1, 2, seconds=5)
        first.each_second()
        assert len(ends) == 1
    finally:
        first.close()


def _source(host: str, _: int) -> str:
    ways = {"127.": "127.0.0.1", "172.17.": "172.17.0.1", "10.": "10.0.0.7"}
    return next(here for start, here in ways.items() if host.startswith(start))


HOST = Network(
    (Nic("lo", "127.0.0.1"), Nic("docker0", "172.17.0.1"), Nic("eth0", "10.0.0.7")), _source
)
"""Routes of a host with a bridge of containers beside its network."""
