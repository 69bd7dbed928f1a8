"""What kopf calls, and the tasks of all objects: every event only wakes an object's task.

No handler writes anything, so kopf keeps no finalizer, no annotation and no progress on objects.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import kopf
from kopf._cogs.clients.errors import APIError  # kopf exports it nowhere

from minisgl_operator import api, names
from minisgl_operator.cache import Cache
from minisgl_operator.kube import CHILDREN, WATCH_SECONDS, Api, ApiError
from minisgl_operator.metrics import Metrics
from minisgl_operator.missing import is_lack, missing
from minisgl_operator.observed import Manifest, Settings
from minisgl_operator.reconcile import Nodes, Task

log = logging.getLogger(__name__)

MANAGED = f"app.kubernetes.io/managed-by={names.MANAGER}"


POOL = 100
"""Connections for requests."""
ROUTES_SECONDS = 10.0
"""How often it is asked whether the cluster has HTTPRoute by now, while an object wants one."""


def connections(namespaces: Sequence[str]) -> int:
    """How many a `Manager` needs: each watch has one of its own beside those of requests."""
    each = len(CHILDREN) + 3  # pods, Events, objects
    return POOL + each * max(1, len(namespaces)) + 2  # nodes, Leases


class Manager:
    """All objects of this operator, and what is watched for them."""

    def __init__(
        self,
        kube: Api,
        settings: Settings,
        metrics: Metrics,
        namespaces: Sequence[str],
        watch_seconds: int,
    ) -> None:
        self._kube, self._settings, self._metrics = kube, settings, metrics
        self._tasks: dict[tuple[str, str], Task] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self.cache = Cache(kube, list(namespaces) or [None], self._changed, watch_seconds)
        self._nodes = Nodes(self.cache) if settings.can_read_nodes else None

    async def start(self) -> None:
        """Return when everything has been listed once. Raises `Missing`."""
        for kind in CHILDREN:
            if kind != "HTTPRoute" or self._settings.gateway_api:
                self.cache.follow(kind, labelSelector=MANAGED)
        self.cache.follow("Pod", labelSelector=MANAGED)
        self.cache.follow("Event", fieldSelector="type=Warning")
        if self._nodes is not None:
            self.cache.follow("Node")
            self.cache.follow("Lease", namespace="kube-node-lease")
        # Objects last: a task that saw its object before its children would make them again.
        await self.cache.begun()
        # kopf's watch tells nothing of what was deleted while it was broken off; this one does.
        self.cache.follow(api.KIND)
        await self.cache.begun()
        if not self._settings.gateway_api:
            self._looking = asyncio.create_task(self._look_for_routes(), name="HTTPRoute")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self.cache.close()
        await asyncio.gather(*(task.stop() for task in self._tasks.values()))

    async def _look_for_routes(self) -> None:
        """Return when the cluster has the Gateway API, and its routes are watched."""
        while not self._settings.gateway_api:
            await asyncio.sleep(ROUTES_SECONDS)
            if not any("httpRoute" in one["spec"] for one in self.cache.all(api.KIND)):
                continue
            with contextlib.suppress(ApiError):  # asked again
                known = await self._kube.knows("HTTPRoute")
                self._settings = replace(self._settings, gateway_api=known)
        self.cache.follow("HTTPRoute", labelSelector=MANAGED)
        await self.cache.synced()
        log.info("the cluster has HTTPRoute by now")
        for task in self._tasks.values():
            task.know(self._settings)

    def saw(self, found: Manifest) -> None:
        """An object is, or was, as in this event of another watch."""
        if not self.cache.knows(found):
            metadata = found["metadata"]
            self.wake(metadata.get("namespace", ""), metadata["name"])

    def wake(self, namespace: str, name: str) -> None:
        """Something happened to an object: its task looks."""
        if task := self._tasks.get((namespace, name)):
            task.wake()

    def silence(self) -> tuple[float, float]:
        """Seconds since the quietest watch was alive, and since the slowest task last looked."""
        now = time.monotonic()
        looked = max((now - task.last_look for task in self._tasks.values()), default=0.0)
        return self.cache.silence(), looked

    def _changed(self, kind: str, found: Manifest) -> None:
        metadata = found["metadata"]
        namespace = metadata.get("namespace", "")
        if kind == api.KIND:
            self._follow(namespace, metadata["name"])
        elif kind == "Event":
            about = found.get("involvedObject", {})
            child = self.cache.get(about.get("kind", ""), namespace, about.get("name", ""))
            if child is not None:  # else it wakes when it comes, if it is ours
                self._wake_owner(child)
        elif kind not in ("Node", "Lease"):  # those are looked at with each tick
            self._wake_owner(found)
            if self.cache.get(kind, namespace, metadata["name"]) is None:
                for (place, _), task in self._tasks.items():
                    if place == namespace:
                        task.freed(kind)

    def _wake_owner(self, child: Manifest) -> None:
        labels = child["metadata"].get("labels") or {}
        instance = labels.get("app.kubernetes.io/instance", "")
        self.wake(child["metadata"].get("namespace", ""), instance)

    def _follow(self, namespace: str, name: str) -> None:
        key = (namespace, name)
        if self.cache.get(api.KIND, namespace, name) is None:
            if gone := self._tasks.pop(key, None):
                stopping = asyncio.create_task(gone.stop())
                self._stopping.add(stopping)
                stopping.add_done_callback(self._stopping.discard)
        elif key in self._tasks:
            self._tasks[key].wake()
        else:
            self._tasks[key] = Task(
                namespace, name, self._kube, self.cache, self._nodes, self._settings, self._metrics
            )
        self._metrics.objects.set(len(self._tasks))


class _NoEssence(kopf.DiffBaseStorage):
    """What kopf compares an object with: nothing, as no handler asks what changed. Its own takes
    several copies of the object at each event."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing is essential."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        """Nothing was kept."""

    def store(self, **_: Any) -> None:
        """Nothing is kept."""


async def run_kopf(
    manager: Manager, namespaces: Sequence[str], take_signals: Callable[[], None]
) -> None:
    """Watch the objects until it is cancelled. Raises what ends kopf: `Missing`, `ApiError`.

    `take_signals`: kopf takes SIGTERM for itself, and would wait five seconds for objects' tasks.
    """
    registry = kopf.OperatorRegistry()
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False  # Events are the reconcile tasks' to post
    settings.peering.standalone = True  # there is a Lease
    settings.persistence.diffbase_storage = _NoEssence()
    settings.scanning.disabled = bool(namespaces)  # a namespaced operator may not look around
    settings.networking.error_backoffs = [1, 2, 5]
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = 1.25 * WATCH_SECONDS

    @kopf.on.login(registry=registry)
    def login(**given: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**given) or kopf.login_with_kubeconfig(**given)

    @kopf.on.startup(registry=registry)
    async def started(**_: Any) -> None:
        take_signals()

    @kopf.on.event(api.GROUP, api.VERSION, api.PLURAL, registry=registry)
    async def changed(event: kopf.RawEvent, **_: Any) -> None:
        manager.saw(dict(event["object"]))

    try:
        with contextlib.suppress(asyncio.CancelledError):
            await kopf.operator(
                registry=registry,
                settings=settings,
                standalone=True,
                clusterwide=not namespaces,
                namespaces=list(namespaces),
            )
    except APIError as error:  # 403 after several tries of its own
        refusal = ApiError(error.status, "", error.message or str(error) or "no words")
        raise missing([(api.KIND, refusal)]) if is_lack(refusal) else refusal from error
