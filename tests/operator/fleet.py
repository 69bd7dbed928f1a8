"""Many objects on one API server, changes of them, and the child that shows each change."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kubernetes.aio import client, config

from minisgl_operator import api
from minisgl_operator.cache import Cache
from minisgl_operator.handlers import MANAGED
from minisgl_operator.kube import Api, path_of
from minisgl_operator.observed import Manifest

NAMESPACES = tuple(f"fleet-{number}" for number in range(4))
CHILDREN_SECONDS = 180.0
SHOWN_SECONDS = 60.0
_MERGE = "application/merge-patch+json"
_SHOWING = ("StatefulSet", "Deployment", "Ingress")


@dataclass(frozen=True, slots=True)
class Change:
    """One change of an object's spec, as a merge patch, and what a child is like that shows it."""

    kind: str
    spec: dict[str, Any]
    shown: Callable[[Manifest, bool], bool]
    """Takes a child and whether it is still wanted: neither gone nor being deleted."""
    subresource: str = ""


def _groups(obj: str, turn: int) -> Change:
    more = turn % 2 == 0

    def shown(child: Manifest, wanted: bool) -> bool:
        return child["metadata"]["name"].startswith(f"{obj}-g1-") and wanted == more

    return Change("scale up" if more else "scale down", {"replicas": 1 + more}, shown, "scale")


def _revision(obj: str, turn: int) -> Change:
    limit = 16 + turn

    def shown(child: Manifest, wanted: bool) -> bool:
        return (
            wanted
            and child["metadata"]["name"].startswith(f"{obj}-g0-")
            and f"--max-running-requests={limit}" in _arguments(child)
        )

    return Change("engine field", {"engine": {"maxRunningRequests": limit}}, shown)


def _gateways(obj: str, turn: int) -> Change:
    replicas = 2 + (turn + 1) % 2

    def shown(child: Manifest, wanted: bool) -> bool:
        return child["metadata"]["name"] == f"{obj}-gateway" and (
            child["spec"].get("replicas") == replicas
        )

    return Change("gateway replicas", {"gateway": {"replicas": replicas}}, shown)


def _label(obj: str, turn: int) -> Change:
    value = f"turn-{turn}"

    def shown(child: Manifest, wanted: bool) -> bool:
        if child["metadata"]["name"] != f"{obj}-tokenizer":
            return False
        labels: dict[str, str] = child["spec"]["template"]["metadata"]["labels"]
        return labels.get("turn") == value

    template = {"metadata": {"labels": {"turn": value}}}
    return Change("tokenizer label", {"tokenizer": {"podTemplate": template}}, shown)


def _host(obj: str, turn: int) -> Change:
    host = f"turn-{turn}.example.com"

    def shown(child: Manifest, wanted: bool) -> bool:
        rules = child["spec"].get("rules", [])
        return child["metadata"]["name"] == obj and [r.get("host") for r in rules] == [host]

    return Change("ingress host", {"ingress": {"host": host}}, shown)


CHANGES = (_groups, _gateways, _label, _host, _revision)
"""Each makes a change of an object's name and of how often it was asked for that object before."""


def _arguments(child: Manifest) -> list[str]:
    containers = child["spec"]["template"]["spec"]["containers"]
    return [word for one in containers for word in [*one.get("command", []), *one.get("args", [])]]


@dataclass(slots=True)
class _Awaited:
    change: Change
    shown_at: "asyncio.Future[float]" = field(default_factory=asyncio.Future)


class Fleet:
    """`count` objects in a few namespaces; a context, in which their children are watched.

    No controller runs beside the API server, so this plays the garbage collector: a set that was
    deleted in the foreground goes at once.
    """

    def __init__(self, kube: Api, count: int) -> None:
        self._kube = kube
        self._cache = Cache(kube, [None], self._changed)
        self._objects = [
            (NAMESPACES[number % len(NAMESPACES)], f"m{number}") for number in range(count)
        ]
        self._turns: Counter[tuple[int, int]] = Counter()
        self._awaited: dict[tuple[str, str], list[_Awaited]] = {}
        self._collecting: set[asyncio.Task[Manifest]] = set()

    @classmethod
    async def connect(cls, kubeconfig: Path, count: int) -> "Fleet":
        """A fleet on the server that a kubeconfig names."""
        configuration = client.Configuration()
        await config.load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        return cls(Api(configuration), count)

    async def __aenter__(self) -> "Fleet":
        for kind in (*_SHOWING, "Service", "PodDisruptionBudget"):
            self._cache.follow(kind, labelSelector=MANAGED)
        await self._cache.synced()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._cache.close()
        await asyncio.gather(*self._collecting, return_exceptions=True)
        await self._kube.close()

    async def create(self) -> float:
        """Create all objects, and wait until each has its children; seconds that it took."""
        began = time.monotonic()
        for name in NAMESPACES:
            await self._kube.request(
                "POST", "/api/v1/namespaces", body={"metadata": {"name": name}}
            )
        for namespace, name in self._objects:
            await self._kube.create(
                {
                    "apiVersion": api.API_VERSION,
                    "kind": api.KIND,
                    "metadata": {"namespace": namespace, "name": name},
                    "spec": {
                        "model": {"uri": "pvc://models/m"},
                        "engine": {"device": "cpu"},
                        "gateway": {"replicas": 2},
                        "ingress": {"host": "llm.example.com"},
                    },
                }
            )
        while missing := [key for one in self._objects for key in self._missing(*one)]:
            if time.monotonic() - began > CHILDREN_SECONDS:
                raise AssertionError(f"{len(missing)} children were not made: {missing[:5]}")
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    def _missing(self, namespace: str, name: str) -> Iterable[str]:
        wanted = {
            "Deployment": ("-gateway", "-tokenizer", "-detokenizer", "-redis"),
            "StatefulSet": ("-g0-1",),
            "Service": ("", "-ranks", "-redis"),
            "PodDisruptionBudget": ("-gateway",),
            "Ingress": ("",),
        }
        for kind, suffixes in wanted.items():
            for suffix in suffixes:
                if self._cache.get(kind, namespace, name + suffix) is None:
                    yield f"{kind} {namespace}/{name}{suffix}"

    async def change(self, number: int) -> tuple[str, float]:
        """Make change `number` and wait for it: its kind, and the seconds from the request that
        made it to the event of the child that shows it.

        The objects take turns, and each gets one kind of change after the other.
        """
        index, visit = number % len(self._objects), number // len(self._objects)
        which = (index + visit) % len(CHANGES)
        namespace, name = self._objects[index]
        change = CHANGES[which](name, self._turns[index, which])
        self._turns[index, which] += 1
        awaited = _Awaited(change)
        self._awaited.setdefault((namespace, name), []).append(awaited)
        path = path_of(api.KIND, namespace, name)
        if change.subresource:
            path += f"/{change.subresource}"
        began = time.monotonic()
        try:
            body = {"spec": change.spec}
            await self._kube.request("PATCH", path, body=body, content_type=_MERGE)
            async with asyncio.timeout(SHOWN_SECONDS):
                return change.kind, await awaited.shown_at - began
        except TimeoutError:
            raise AssertionError(
                f"no child of {namespace}/{name} shows {change.kind} {change.spec}"
            ) from None
        finally:
            self._awaited[namespace, name].remove(awaited)

    async def changes(self, count: int, rate: float) -> list[tuple[str, float]]:
        """Begin `rate` changes each second, and wait for all of them."""
        began = time.monotonic()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
                tasks.append(group.create_task(self.change(number)))
        return [task.result() for task in tasks]

    def _changed(self, kind: str, child: Manifest) -> None:
        metadata = child["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        there = self._cache.get(kind, namespace, name) is not None
        wanted = there and "deletionTimestamp" not in metadata
        if there and not wanted and "foregroundDeletion" in metadata.get("finalizers", []):
            self._collect(kind, namespace, name)
        if kind not in _SHOWING:
            return
        instance = metadata["labels"]["app.kubernetes.io/instance"]
        for awaited in self._awaited.get((namespace, instance), ()):
            if not awaited.shown_at.done() and awaited.change.shown(child, wanted):
                awaited.shown_at.set_result(time.monotonic())

    def _collect(self, kind: str, namespace: str, name: str) -> None:
        path, body = path_of(kind, namespace, name), {"metadata": {"finalizers": None}}
        task = asyncio.create_task(
            self._kube.request("PATCH", path, body=body, content_type=_MERGE)
        )
        self._collecting.add(task)
        task.add_done_callback(self._collecting.discard)
