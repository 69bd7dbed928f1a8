"""A cache of watched objects, as fresh as their watches.

Watches go on from where they ended; all is listed again only where the server has forgotten that
place, or fails again and again.
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minisgl_operator import names
from minisgl_operator.kube import RESOURCES, WATCH_SECONDS, Api, ApiError
from minisgl_operator.missing import TRIES, is_lack, missing
from minisgl_operator.observed import Key, Manifest, Warning

log = logging.getLogger(__name__)

RETRY_FIRST, RETRY_MOST = 1.0, 10.0
"""Waits before a watch that failed is opened anew: each up to twice as long as the one before."""
RELIST_FAILURES = 4
"""After so many in a row that the server itself tells of, everything is listed again: it may be the
version that it cannot go on from, as after a restored backup."""
KEPT_WARNINGS = 10_000
"""Latest Warning Events kept, of all objects; the oldest go first."""


@dataclass(slots=True)
class _Feed:
    """One kind in one namespace (or in all), and when it was last known to be alive."""

    kind: str
    namespace: str | None
    query: tuple[tuple[str, str], ...] = ()
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    lacks: ApiError | None = None
    """Why it could not be listed even once, for so many tries that it is believed."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """It is synced, or lacks what it needs for that."""
    heard: float = field(default_factory=time.monotonic)
    failures: int = 0
    """In a row."""


Changed = Callable[[str, Manifest], None]
"""Called with the kind and the object (the last known one, if it was deleted)."""


class Cache:
    """Watched objects, as fresh as their watches. Read from the event loop's thread alone."""

    def __init__(
        self,
        api_: Api,
        namespaces: Sequence[str | None],
        changed: Changed,
        watch_seconds: int = WATCH_SECONDS,
    ) -> None:
        """`namespaces`: those to watch; [None] for all."""
        self._api, self._watch_seconds = api_, watch_seconds
        self._namespaces = namespaces
        self._changed = changed
        self._feeds: list[_Feed] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._objects: dict[str, dict[tuple[str, str], Manifest]] = {}
        self._by_instance: dict[tuple[str, str], set[tuple[str, str]]] = {}
        """(namespace, object's name) -> (kind, name) of what carries its label."""
        self._warnings: OrderedDict[tuple[str, str, str], tuple[int, Warning]] = OrderedDict()
        """With the version of its Event: a list has them in another order than they came in."""

    def follow(self, kind: str, *, namespace: str | None = None, **query: str) -> None:
        """Keep objects of a kind here, such as those with `labelSelector`."""
        everywhere = self._namespaces if RESOURCES[kind].namespaced else [None]
        for one in [namespace] if namespace else everywhere:
            feed = _Feed(kind, one, tuple(query.items()))
            self._feeds.append(feed)
            self._tasks.append(asyncio.create_task(self._run(feed), name=f"watch {kind}"))

    async def synced(self) -> None:
        """Return when every list has been read once."""
        for feed in list(self._feeds):
            await feed.synced.wait()

    async def begun(self) -> None:
        """As `synced`, at the start: raises `Missing` for kinds that the server does not know, or
        does not show."""
        for feed in list(self._feeds):
            await feed.decided.wait()
        if lacking := [(f.kind, f.lacks) for f in self._feeds if f.lacks is not None]:
            raise missing(lacking)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def silence(self) -> float:
        """Seconds since the quietest watch was known to be alive."""
        now = time.monotonic()
        return max((now - feed.heard for feed in self._feeds), default=0.0)

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._objects.get(kind, {}).get((namespace, name))

    def all(self, kind: str) -> Sequence[Manifest]:
        return list(self._objects.get(kind, {}).values())

    def of_instance(self, namespace: str, instance: str) -> list[Manifest]:
        """Children and pods that carry the label of this object's name."""
        keys = self._by_instance.get((namespace, instance), ())
        found = (self._objects[kind].get((namespace, name)) for kind, name in keys)
        return [one for one in found if one is not None]

    def warning(self, namespace: str, key: Key) -> Warning | None:
        """The latest Warning Event about a child or pod."""
        held = self._warnings.get((namespace, key.kind, key.name))
        return held[1] if held else None

    def put(self, manifest: Manifest, *, tell: bool = True) -> None:
        """Take what a write answered, so that the next look does not see the state before it.

        `tell`: whether that is worth another look.
        """
        self._store(manifest["kind"], manifest, tell)

    def knows(self, manifest: Manifest) -> bool:
        """Whether this or a newer state of an object is here."""
        namespace, name = _place(manifest)
        held = self.get(manifest["kind"], namespace, name)
        return held is not None and _version(held) >= _version(manifest)

    async def _run(self, feed: _Feed) -> None:
        version = ""
        while True:
            try:
                if not version:
                    version = await self._relist(feed)
                opened, heard = time.monotonic(), False
                async for kind, found in self._api.watch(
                    feed.kind, feed.namespace, feed.query, version, self._watch_seconds
                ):
                    feed.heard, feed.failures, heard = time.monotonic(), 0, True
                    version = found.get("metadata", {}).get("resourceVersion", version)
                    if kind in ("ADDED", "MODIFIED"):
                        self._store(feed.kind, found)
                    elif kind == "DELETED":
                        self._drop(feed.kind, found)
                feed.heard = time.monotonic()
                if not heard and feed.heard - opened < RETRY_FIRST:
                    raise ApiError(0, "Closed", "the server ended it at once")
                feed.failures = 0
            except ApiError as error:
                version = await self._failed(feed, error, version)
            except Exception:  # a watch that ended would show its last state for ever
                log.exception("watch of %s", feed.kind)
                feed.failures += 1
                version = ""
                await asyncio.sleep(_pause(feed.failures))

    async def _failed(self, feed: _Feed, error: ApiError, version: str) -> str:
        """Wait as long as a failure asks for; the version to go on from, empty for none.

        A server that is overloaded or away has forgotten nothing: to list everything again would
        be what it can bear least, from all watches at once least of all."""
        feed.failures += 1
        if error.status == 410:
            if feed.failures > 1:
                await asyncio.sleep(_pause(feed.failures - 1))
            return ""
        log.warning("watch of %s: %s", feed.kind, error.message)
        if is_lack(error) and not feed.synced.is_set() and feed.failures >= TRIES:
            feed.lacks = error
            feed.decided.set()
        await asyncio.sleep(_pause(feed.failures))
        if error.status == 0:
            return version
        busy = error.status == 429 or error.status >= 500
        return version if busy and feed.failures % RELIST_FAILURES else ""

    async def _relist(self, feed: _Feed) -> str:
        items, version = await self._api.list(feed.kind, feed.namespace, feed.query)
        there = set()
        for item in items:
            item |= {"kind": feed.kind, "apiVersion": RESOURCES[feed.kind].version}
            there.add(_place(item))
            self._store(feed.kind, item)
        for place, held in list(self._objects.get(feed.kind, {}).items()):
            older = _version(held) <= (int(version) if version.isdigit() else 0)
            if place not in there and older and feed.namespace in (None, place[0]):
                self._drop(feed.kind, held)  # a newer one was written since: the watch tells
        feed.heard = time.monotonic()
        feed.lacks = None
        feed.synced.set()
        feed.decided.set()
        return version

    def _store(self, kind: str, found: Manifest, tell: bool = True) -> None:
        if kind == "Event":
            self._note(found)
        else:
            held = self._objects.setdefault(kind, {})
            place = _place(found)
            old = held.get(place)
            if old is not None and _version(found) <= _version(old):
                return  # our own write was answered before the watch came to it
            held[place] = found
            instance = _instance(found)
            if instance is not None:
                self._by_instance.setdefault(instance, set()).add((kind, place[1]))
        if tell:
            self._changed(kind, found)

    def _drop(self, kind: str, found: Manifest) -> None:
        if kind == "Event":
            return
        place = _place(found)
        held = self.get(kind, *place)
        if held is not None and _version(held) > _version(found):
            return  # another of this name, which our own write brought before this
        self._objects.get(kind, {}).pop(place, None)
        instance = _instance(found)
        if instance is not None:
            named = self._by_instance.get(instance, set())
            named.discard((kind, place[1]))
            if not named:
                self._by_instance.pop(instance, None)
        self._warnings.pop((place[0], kind, place[1]), None)
        self._changed(kind, found)

    def _note(self, event: Manifest) -> None:
        about = event.get("involvedObject", {})
        key = (about.get("namespace", ""), about.get("kind", ""), about.get("name", ""))
        version = _version(event)
        if key in self._warnings and self._warnings[key][0] > version:
            return
        self._warnings[key] = version, Warning(event.get("reason", ""), event.get("message", ""))
        self._warnings.move_to_end(key)
        if len(self._warnings) > KEPT_WARNINGS:
            self._warnings.popitem(last=False)


def _pause(failures: int) -> float:
    """Seconds to wait after so many failures: not all watches at the same moment."""
    most = min(RETRY_MOST, RETRY_FIRST * 2 ** min(failures - 1, 10))
    return most * random.uniform(0.5, 1.0)


def _place(found: Manifest) -> tuple[str, str]:
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(found: Manifest) -> int:
    """Kubernetes 1.35 and later promise that versions of one kind compare as numbers; earlier ones
    kept to it."""
    version = found["metadata"].get("resourceVersion", "0")
    return int(version) if version.isdigit() else 0


def _instance(found: Manifest) -> tuple[str, str] | None:
    labels = found["metadata"].get("labels") or {}
    if labels.get("app.kubernetes.io/managed-by") != names.MANAGER:
        return None
    instance = labels.get("app.kubernetes.io/instance")
    return (found["metadata"].get("namespace", ""), instance) if instance else None
