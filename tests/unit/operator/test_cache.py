"""The cache of watched objects: that it goes on, and never falls behind what was written."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from minisgl_operator import cache as module
from minisgl_operator import names
from minisgl_operator.cache import Cache
from minisgl_operator.kube import ApiError
from minisgl_operator.observed import Key, Manifest

LABELS = {"app.kubernetes.io/managed-by": names.MANAGER, "app.kubernetes.io/instance": "llm"}


def service(version: int, name: str = "llm") -> Manifest:
    metadata = {"namespace": "ns", "name": name, "resourceVersion": str(version), "labels": LABELS}
    return {"kind": "Service", "metadata": metadata}


class Server:
    """Lists nothing, as of version 5, then tells of `events` and falls silent."""

    def __init__(self, *events: tuple[str, Manifest]) -> None:
        self.events = events
        self.listed: Callable[[], None] = lambda: None

    async def list(self, *_: object) -> tuple[list[Manifest], str]:
        self.listed()
        return [], "5"

    async def watch(self, *_: object) -> AsyncIterator[tuple[str, Manifest]]:
        for event in self.events:
            yield event
        await asyncio.Event().wait()


def cache_of(server: Server) -> Cache:
    return Cache(server, [None], lambda kind, found: None)  # type: ignore[arg-type]


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.005)


async def test_the_end_of_an_object_does_not_end_a_newer_one_of_its_name() -> None:
    end = ("DELETED", service(6)), ("ADDED", service(8, "last"))
    cache = cache_of(Server(*end))
    cache.put(service(7))
    cache.follow("Service")
    await until(lambda: cache.get("Service", "ns", "last") is not None)
    assert cache.get("Service", "ns", "llm") is not None
    assert len(cache.of_instance("ns", "llm")) == 2
    await cache.close()


async def test_the_end_of_an_object_takes_it_away() -> None:
    cache = cache_of(Server(("DELETED", service(8))))
    cache.put(service(7))
    cache.follow("Service")
    await until(lambda: cache.get("Service", "ns", "llm") is None)
    assert cache.of_instance("ns", "llm") == []
    await cache.close()


async def test_a_list_takes_away_what_is_older_and_not_in_it() -> None:
    cache = cache_of(Server())
    cache.put(service(4, "gone"))
    cache.put(service(6, "written since"))
    cache.follow("Service")
    await cache.synced()
    assert [one["metadata"]["name"] for one in cache.all("Service")] == ["written since"]
    await cache.close()


async def test_a_watch_goes_on_after_an_error_of_whatever_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_once() -> None:
        server.listed = lambda: None
        raise KeyError("metadata")

    monkeypatch.setattr(module, "RETRY_FIRST", 0.0)
    server = Server()
    server.listed = fail_once
    cache = cache_of(server)
    cache.follow("Service")
    async with asyncio.timeout(20):
        await cache.synced()
    await cache.close()


class Failing(Server):
    """Ends each watch with the next of `ends`: an error, an event and then an error, or at once."""

    def __init__(self, *ends: ApiError | tuple[str, Manifest] | None) -> None:
        super().__init__()
        self.ends = list(ends)
        self.lists = 0
        self.listed = self._count

    def _count(self) -> None:
        self.lists += 1

    async def watch(self, *_: object) -> AsyncIterator[tuple[str, Manifest]]:
        if not self.ends:
            await asyncio.Event().wait()
        end = self.ends.pop(0)
        if isinstance(end, ApiError):
            raise end
        if end is not None:
            yield end
            raise UNAVAILABLE


UNAVAILABLE = ApiError(503, "ServiceUnavailable", "apiserver not ready")
AWAY = ApiError(0, "NoAnswer", "connection refused")
EXPIRED = ApiError(410, "Expired", "too old resource version")


async def waits_after(
    monkeypatch: pytest.MonkeyPatch, *ends: ApiError | tuple[str, Manifest] | None
) -> tuple[list[float], int]:
    """How long a watch waits after each of these, as if it always took the longest, and how often
    it lists."""
    waits: list[float] = []
    pause = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds > 0.1:
            waits.append(seconds)
            seconds = 0
        await pause(seconds)

    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    server = Failing(*ends)
    cache = cache_of(server)
    cache.follow("Service")
    async with asyncio.timeout(20):
        while server.ends:
            await pause(0.001)
        await pause(0.01)
    await cache.close()
    return waits, server.lists


@pytest.mark.parametrize("failure", [UNAVAILABLE, ApiError(429, "Busy", ""), AWAY], ids=str)
async def test_a_server_that_fails_is_asked_ever_more_seldom_and_for_no_list(
    monkeypatch: pytest.MonkeyPatch, failure: ApiError
) -> None:
    waits, lists = await waits_after(monkeypatch, *[failure] * 3)
    assert (waits, lists) == ([1.0, 2.0, 4.0], 1)


async def test_a_server_that_is_back_after_long_has_forgotten_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, lists = await waits_after(monkeypatch, *[AWAY] * 8)
    assert (waits[3:], lists) == ([8.0, 10.0, 10.0, 10.0, 10.0], 1)


async def test_a_server_that_fails_again_and_again_is_listed_at_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, lists = await waits_after(monkeypatch, *[UNAVAILABLE] * 8)
    assert (waits[3:], lists) == ([8.0, 10.0, 10.0, 10.0, 10.0], 3)


async def test_an_event_makes_the_next_wait_short_again(monkeypatch: pytest.MonkeyPatch) -> None:
    event = ("ADDED", service(6))
    waits, lists = await waits_after(monkeypatch, UNAVAILABLE, UNAVAILABLE, event, UNAVAILABLE)
    assert (waits, lists) == ([1.0, 2.0, 1.0, 2.0], 1)


async def test_a_version_that_is_too_old_is_listed_at_once_and_then_with_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, lists = await waits_after(monkeypatch, *[EXPIRED] * 3)
    assert (waits, lists) == ([1.0, 2.0], 4)


async def test_a_server_that_ends_each_watch_at_once_is_not_asked_in_a_circle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, _ = await waits_after(monkeypatch, None, None, None)
    assert waits == [1.0, 2.0, 4.0]


def test_watches_that_failed_together_come_back_one_by_one() -> None:
    assert len({module._pause(3) for _ in range(20)}) > 10
    assert all(2.0 <= module._pause(3) <= 4.0 for _ in range(20))


async def test_the_latest_warning_counts_whatever_the_order_of_a_list() -> None:
    def event(version: int, message: str) -> Manifest:
        about = {"namespace": "ns", "kind": "Pod", "name": "p"}
        metadata = {"namespace": "ns", "name": message, "resourceVersion": str(version)}
        return {
            "metadata": metadata, "involvedObject": about, "reason": "Failed", "message": message,
        }  # fmt: skip

    cache = cache_of(Server())
    for version, message in ((7, "new"), (6, "old")):
        cache.put(event(version, message) | {"kind": "Event"})
    held = cache.warning("ns", Key("Pod", "p"))
    assert held is not None and held.message == "new"
