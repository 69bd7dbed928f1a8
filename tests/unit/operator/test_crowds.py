"""What keeps many objects from costing many times as much, or from holding each other up."""

import asyncio
import socket
import threading
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisGone
from redis.exceptions import TimeoutError as RedisTimeout

from minisgl_operator import names
from minisgl_operator.bus import SAID_SECONDS, Address, Reader
from minisgl_operator.cache import Cache
from minisgl_operator.loop import Loop
from minisgl_operator.observed import Manifest
from minisgl_operator.reconcile import NODES_SECONDS, Nodes

ADDRESS = ("127.0.0.1", 80)


class Clock:
    """A clock that stands until it is set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def child(version: int) -> Manifest:
    labels = {
        "app.kubernetes.io/managed-by": names.MANAGER,
        "app.kubernetes.io/instance": "llm",
    }
    metadata = {"namespace": "ns", "name": "llm", "resourceVersion": str(version), "labels": labels}
    return {"kind": "Service", "metadata": metadata}


class Told(list[str]):
    """The kinds that a cache told of."""

    def __call__(self, kind: str, found: Manifest) -> None:
        self.append(kind)


def cache_of(told: Told) -> Cache:
    return Cache(None, [None], told)  # type: ignore[arg-type]


def test_an_answer_that_the_watch_repeats_is_told_once() -> None:
    told = Told()
    cache = cache_of(told)
    cache.put(child(7))
    cache.put(child(7))
    cache.put(child(6))
    assert told == ["Service"]
    cache.put(child(8))
    assert told == ["Service", "Service"]


def test_what_is_worth_no_look_is_stored_and_not_told() -> None:
    told = Told()
    cache = cache_of(told)
    cache.put(child(7), tell=False)
    assert told == []
    assert cache.knows(child(7))
    assert not cache.knows(child(8))


def test_tasks_share_what_one_of_them_found_out_about_nodes() -> None:
    cache = cache_of(Told())
    nodes = Nodes(cache)
    cache.put({"kind": "Node", "metadata": {"name": "n1"}})
    first = nodes.look(100.0)
    assert first.keys() == {"n1"}
    assert nodes.look(100.0 + NODES_SECONDS / 2) is first
    cache.put({"kind": "Node", "metadata": {"name": "n2"}})
    assert nodes.look(100.0 + NODES_SECONDS).keys() == {"n1", "n2"}


async def reader_at(clock: Clock) -> Reader:
    reader = Reader(Address("127.0.0.1", 1, "ns.llm.1"), lambda: None, clock=clock)
    await reader.close()  # the test fails in its place
    return reader


async def test_a_time_out_does_not_replace_what_a_failure_said() -> None:
    clock = Clock()
    reader = await reader_at(clock)
    reader.fail(RedisGone("refused"))
    clock.now += 10 * SAID_SECONDS
    reader.fail(RedisTimeout("slow"))
    assert reader.bus.message == "refused"


async def test_another_sentence_is_shown_once_it_is_the_only_one() -> None:
    clock = Clock()
    reader = await reader_at(clock)
    for said in ("one", "two", "one", "two"):
        clock.now += SAID_SECONDS / 2
        reader.fail(RedisGone(said))
        assert reader.bus.message == "one"
    clock.now += SAID_SECONDS / 2
    reader.fail(RedisGone("two"))
    assert reader.bus.message == "two"


def test_a_name_server_that_does_not_answer_holds_up_no_other_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, asked = threading.Event(), []

    def slow(host: str, *_: Any) -> list[Any]:
        asked.append(host)
        answer.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ADDRESS)]

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        waiting = [
            asyncio.create_task(loop.getaddrinfo(f"host-{number % 50}", 80))
            for number in range(100)
        ]
        assert await asyncio.wait_for(asyncio.to_thread(int, "7"), 20) == 7
        assert sorted(asked) == sorted(f"host-{number}" for number in range(50))
        waiting[0].cancel()
        answer.set()
        found = await asyncio.gather(*waiting[1:])
        assert all(one[0][4] == ADDRESS for one in found)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(ask())


def test_a_name_that_is_not_known_is_an_error_for_all_who_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: Any) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        asks = (loop.getaddrinfo("nobody", 80) for _ in range(3))
        found = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(one) for one in found] == [socket.gaierror] * 3

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(ask())


async def look_up(name: str) -> Any:
    async with asyncio.timeout(20):
        return await asyncio.get_running_loop().getaddrinfo(name, 80)


def test_what_cannot_be_a_name_is_an_error() -> None:
    with asyncio.Runner(loop_factory=Loop) as runner, pytest.raises(UnicodeError):
        runner.run(look_up("a" * 64 + ".example"))


def test_a_name_is_looked_up_again_after_no_thread_could_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(thread: threading.Thread) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    with asyncio.Runner(loop_factory=Loop) as runner:
        monkeypatch.setattr(threading.Thread, "start", full)
        with pytest.raises(RuntimeError, match="thread"):
            runner.run(look_up("127.0.0.1"))
        assert runner.run(look_up("127.0.0.1"))[0][4] == ADDRESS
