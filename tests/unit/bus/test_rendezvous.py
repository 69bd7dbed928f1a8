"""How ranks find each other through Redis; needs redis-server."""

import socket
import threading
from collections.abc import Iterator

import pytest
import redis

from minisgl.bus.base import BusError, ReplacedError
from minisgl.bus.rendezvous import Meeting, Rendezvous, listeners
from minisgl.config import StartError, UsageError
from minisgl.messages import WorkerState, encode_state
from tests.redis_server import RedisServer

KEY = "minisgl:{svc}:rdzv:g0"
HERE = Meeting(incarnation=7, host="127.0.0.1", store_port=1, feed_port=2)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(server: RedisServer) -> None:
    server.client().flushall()


def rendezvous(server: RedisServer, size: int = 2, revision: str = "r1") -> Rendezvous:
    return Rendezvous(server.url, "svc", "g0", size=size, revision=revision, silence=4)


pytestmark = pytest.mark.redis


def test_a_rank_joins_the_incarnation_that_rank_0_opens_later(server: RedisServer) -> None:
    found: list[Meeting] = []
    joins = threading.Thread(
        target=lambda: found.append(rendezvous(server).join(1, 21, seconds=20))
    )
    joins.start()
    first = rendezvous(server)
    assert first.open(HERE, 20)
    joins.join(20)
    assert found == [HERE] and not rendezvous(server).replaced(7)
    held = server.client().hgetall(KEY)
    assert held[b"boot.1"] == b"%016x" % 21 and held[b"phase"] == b"forming"
    first.formed()
    assert server.client().hget(KEY, "phase") == b"formed"
    assert 0 < server.client().ttl(KEY) <= 40


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"revision": "r0"}, "revision 'r0', not 'r1'"),
        ({"phase": "formed"}, "formed already"),
        ({"boot.1": "1"}, "another process has joined as rank 1"),
        ({"host": ""}, "empty address"),
    ],
)
def test_a_rank_stays_outside_of_what_is_not_its_group_and_says_why(
    server: RedisServer, change: dict[str, str], why: str
) -> None:
    assert rendezvous(server).open(HERE, 20)
    server.client().hset(KEY, mapping=change)  # type: ignore[arg-type]
    with pytest.raises(StartError, match=why):
        rendezvous(server).join(1, 21, seconds=0.5)


def test_a_newer_rank_0_takes_over_and_the_older_one_learns_it(server: RedisServer) -> None:
    old, new = rendezvous(server), rendezvous(server)
    assert old.open(HERE, 20)
    assert new.open(Meeting(8, "127.0.0.1", 3, 4), 30)
    with pytest.raises(ReplacedError):
        old.keep()
    new.keep()
    assert not new.replaced(8) and new.replaced(7)


def test_of_two_rank_0_that_open_at_once_one_fails(server: RedisServer) -> None:
    results = []
    barrier = threading.Barrier(8)

    def open_one(number: int) -> None:
        mine = rendezvous(server)
        held = mine._read()
        barrier.wait(10)
        mine._read = lambda: held  # type: ignore[method-assign]
        results.append(mine.open(Meeting(number, "127.0.0.1", 3, 4), number))

    threads = [threading.Thread(target=open_one, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == [False] * 7 + [True]


def test_a_flush_brings_the_incarnation_back_within_a_second(server: RedisServer) -> None:
    first = rendezvous(server)
    assert first.open(HERE, 20)
    first.formed()
    server.client().flushall()
    first.keep()
    assert server.client().hmget(KEY, "phase", "incarnation") == [b"formed", b"%016x" % 7]


def test_a_flush_right_before_the_group_is_formed_leaves_it_whole(server: RedisServer) -> None:
    first = rendezvous(server)
    assert first.open(HERE, 20)
    server.client().flushall()
    first.formed()
    first.keep()
    assert server.client().hmget(KEY, "phase", "incarnation") == [b"formed", b"%016x" % 7]


def test_a_rank_that_joined_before_a_flush_cannot_be_started_anew_unseen(
    server: RedisServer,
) -> None:
    first = rendezvous(server)
    assert first.open(HERE, 20)
    rendezvous(server).join(1, 21, seconds=5)
    first.keep()
    server.client().flushall()
    first.keep()
    with pytest.raises(StartError, match="another process has joined as rank 1"):
        rendezvous(server).join(1, 22, seconds=0.5)


def test_neither_side_is_stuck_where_the_answer_to_its_script_was_lost(
    server: RedisServer,
) -> None:
    first, second = rendezvous(server), rendezvous(server)
    loses_an_answer(first)
    with pytest.raises(BusError, match="lost"):
        first.open(HERE, 20)
    loses_an_answer(second)
    assert second.join(1, 21, seconds=5) == HERE
    assert first.open(HERE, 20)
    assert server.client().hget(KEY, "boot.1") == b"%016x" % 21, "who has joined stays"


def loses_an_answer(one: Rendezvous) -> None:
    """Redis does the next script, but its connection ends before it can say so."""
    real = one._client.eval

    def once(*arguments: object) -> object:
        one._client.eval = real  # type: ignore[method-assign]
        real(*arguments)  # type: ignore[arg-type]
        raise redis.ConnectionError("lost")

    one._client.eval = once  # type: ignore[method-assign]


def test_a_rank_that_was_started_anew_while_the_group_forms_is_named(server: RedisServer) -> None:
    first = rendezvous(server)
    assert first.open(HERE, 20)
    assert rendezvous(server).join(1, 21, seconds=5) == HERE
    key = "minisgl:{svc}:state:rank:g0/1"
    for boot, want in ((21, []), (22, [1])):
        shown = WorkerState(role="rank", id="g0/1", boot=boot, beat=1)
        server.client().set(key, encode_state(shown))
        assert first.started_anew() == want


def test_ports_come_from_the_range_and_are_held_from_the_start() -> None:
    """H01: what one group has, another one of the host passes over."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        held = [listeners("127.0.0.1", f"{port}-{port + 40}", 2) for _ in range(2)]
        ports = [one.getsockname()[1] for pair in held for one in pair]
        assert len(set(ports)) == 4 and all(port < p <= port + 40 for p in ports)
        for number in ports:
            socket.create_connection(("127.0.0.1", number), 5).close()
        with pytest.raises(UsageError, match="no 1 free ports"):
            listeners("127.0.0.1", f"{port}-{port}", 1)
    anywhere = listeners("127.0.0.1", None, 2)
    for one in [*held[0], *held[1], *anywhere]:
        one.close()
    for wrong in ("many", "0-9", "2000-1000", "70000-70001", "20000"):
        with pytest.raises(UsageError, match="must be A-B"):
            listeners("127.0.0.1", wrong, 1)
    with pytest.raises(UsageError, match=r"on 192\.0\.2\.1: Cannot assign"):
        listeners("192.0.2.1", None, 1)


def test_the_address_is_that_of_the_interface_or_of_the_way(server: RedisServer) -> None:
    mine = rendezvous(server)
    assert mine.nic("lo").address == mine.nic(None).address == "127.0.0.1"
    assert mine.nic(None, ("127.0.0.9", 1)).address == "127.0.0.1"
    with pytest.raises(UsageError, match=r"there are: .*lo"):
        mine.nic("nosuch0")


def test_a_redis_whose_name_is_none_yet_is_waited_for() -> None:
    early = Rendezvous(
        "redis://no.such.host.invalid:6379/0", "svc", "g0", size=2, revision="", silence=4
    )
    with pytest.raises(BusError):
        early.nic(None)
