"""The cache of watched objects: that it goes on, and never falls behind what was written."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from minisgl_operator import kube, names
from minisgl_operator.kube import Cache
from minisgl_operator.observed import Manifest

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

    monkeypatch.setattr(kube, "RETRY_SECONDS", 0.0)
    server = Server()
    server.listed = fail_once
    cache = cache_of(server)
    cache.follow("Service")
    async with asyncio.timeout(20):
        await cache.synced()
    await cache.close()
