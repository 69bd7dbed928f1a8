"""The Kubernetes API: requests, and a cache of watched objects. The only module that talks to it.

Objects stay plain dicts, as the server sends them. Of the kubernetes package this takes what is
hard to get right (configuration, TLS, rotated tokens); paths and bodies are written here, because
server-side apply wants exactly the fields that we mean and no model's defaults.
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec
from kubernetes.aio import client, config

from minisgl_operator import api, names
from minisgl_operator.observed import Key, Manifest, Warning

log = logging.getLogger(__name__)

REQUEST_SECONDS = 20.0
WATCH_SECONDS = 60
"""The server ends a watch after this; the next one goes on from its resource version. One that
outlasts it by a quarter is given up: what lies between may have dropped it without a word."""
RETRY_FIRST, RETRY_MOST = 1.0, 10.0
"""Waits before a watch that failed is opened anew: each up to twice as long as the one before."""
RELIST_FAILURES = 4
"""After so many in a row that the server itself tells of, everything is listed again: it may be the
version that it cannot go on from, as after a restored backup."""
KEPT_WARNINGS = 10_000
"""Latest Warning Events kept, of all objects; the oldest go first."""


class Resource(NamedTuple):
    """Where a kind lives in the API."""

    prefix: str
    plural: str
    namespaced: bool = True

    @property
    def version(self) -> str:
        """apiVersion of its objects."""
        return self.prefix.removeprefix("/apis/").removeprefix("/api/")


RESOURCES: Mapping[str, Resource] = {
    api.KIND: Resource(f"/apis/{api.API_VERSION}", api.PLURAL),
    "Pod": Resource("/api/v1", "pods"),
    "Service": Resource("/api/v1", "services"),
    "Secret": Resource("/api/v1", "secrets"),
    "Event": Resource("/api/v1", "events"),
    "Node": Resource("/api/v1", "nodes", namespaced=False),
    "PersistentVolumeClaim": Resource("/api/v1", "persistentvolumeclaims"),
    "Lease": Resource("/apis/coordination.k8s.io/v1", "leases"),
    "ControllerRevision": Resource("/apis/apps/v1", "controllerrevisions"),
    "Deployment": Resource("/apis/apps/v1", "deployments"),
    "StatefulSet": Resource("/apis/apps/v1", "statefulsets"),
    "Job": Resource("/apis/batch/v1", "jobs"),
    "Ingress": Resource("/apis/networking.k8s.io/v1", "ingresses"),
    "NetworkPolicy": Resource("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": Resource("/apis/policy/v1", "poddisruptionbudgets"),
    "HTTPRoute": Resource("/apis/gateway.networking.k8s.io/v1", "httproutes"),
}
CHILDREN = (
    "StatefulSet", "Deployment", "Service", "Job", "ControllerRevision", "Ingress",
    "NetworkPolicy", "PodDisruptionBudget", "PersistentVolumeClaim", "HTTPRoute",
)  # fmt: skip
"""Kinds of children that are watched. Secrets are not: they are read by name alone."""


class ApiError(Exception):
    """The server's refusal, or (status 0) no answer."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


class Api:
    """Requests to the API server. Every method raises `ApiError`."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._client = client.ApiClient(configuration)
        self.writes = 0
        """Requests that may have changed something, Leases left out."""

    @classmethod
    async def connect(cls, connections: int) -> "Api":
        """In a pod its service account, elsewhere the kubeconfig; so many connections at most."""
        configuration = client.Configuration(connection_pool_maxsize=connections)
        try:
            config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        return cls(configuration)

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Any = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
    ) -> Manifest:
        """One call; the decoded answer."""
        response = await self._send(method, path, query, body, content_type, seconds)
        try:
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, "NoAnswer", f"{type(error).__name__}: {error}") from error
        finally:
            response.release()
        answer = _decoded(data)
        if response.status >= 400:
            raise _refusal(response.status, answer, data)
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: Any,
        content_type: str,
        seconds: float,
    ) -> aiohttp.ClientResponse:
        # Without the body: it is made of JSON's types, and to look for others in it takes longer
        # than all else that this process does for a request.
        verb, url, headers, _, _ = await self._client.param_serialize(
            method=method,
            resource_path=path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._client.call_api(
                verb, url, header_params=headers, body=body, _request_timeout=seconds
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ApiError(0, "NoAnswer", f"{type(error).__name__}: {error}") from error
        response: aiohttp.ClientResponse = answer.response
        return response

    # --- objects -------------------------------------------------------------------------------

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """One object; None if there is none."""
        try:
            return await self.request("GET", path_of(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def apply(self, manifest: Manifest, *, subresource: str = "") -> Manifest:
        """Server-side apply of what the operator wants of an object; the object as it is then.

        `subresource`: such as `status`, of which the manifest then says all.
        """
        self.writes += 1
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata["namespace"], metadata["name"])
        return await self.request(
            "PATCH",
            f"{path}/{subresource}" if subresource else path,
            query=[("fieldManager", names.MANAGER), ("force", "true")],
            body=manifest,
            content_type="application/apply-patch+yaml",
        )

    async def delete(
        self, kind: str, namespace: str, name: str, uid: str, *, foreground: bool = False
    ) -> None:
        """Delete an object if it still has this UID; one that is gone is no error."""
        self.writes += 1
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Foreground" if foreground else "Background",
        }
        try:
            await self.request("DELETE", path_of(kind, namespace, name), body=body)
        except ApiError as error:
            # 409: the name is another object's by now.
            if error.status not in (404, 409):
                raise

    async def create(self, manifest: Manifest) -> Manifest:
        self.writes += 1
        metadata = manifest["metadata"]
        return await self.request(
            "POST", path_of(manifest["kind"], metadata["namespace"]), body=manifest
        )

    async def knows(self, kind: str) -> bool:
        """Whether the server has this kind."""
        resource = RESOURCES[kind]
        try:
            answer = await self.request("GET", resource.prefix)
        except ApiError as error:
            if error.status in (403, 404):
                return False
            raise
        return any(r.get("name") == resource.plural for r in answer.get("resources", []))

    async def minor_version(self) -> int:
        """The server's minor version, such as 36."""
        answer = await self.request("GET", "/version")
        digits = "".join(c for c in str(answer.get("minor", "")) if c.isdigit())
        return int(digits or 0)

    # --- lists and watches ---------------------------------------------------------------------

    async def list(
        self, kind: str, namespace: str | None, query: Sequence[tuple[str, str]]
    ) -> tuple[list[Manifest], str]:
        """All objects in pages, and the resource version to watch from."""
        items: list[Manifest] = []
        page: list[tuple[str, str]] = [("limit", "500")]
        while True:
            answer = await self.request(
                "GET", path_of(kind, namespace), query=[*query, *page], seconds=60
            )
            items += answer.get("items", [])
            metadata = answer.get("metadata", {})
            if not metadata.get("continue"):
                return items, metadata.get("resourceVersion", "")
            page = [("limit", "500"), ("continue", metadata["continue"])]

    async def watch(
        self,
        kind: str,
        namespace: str | None,
        query: Sequence[tuple[str, str]],
        version: str,
        seconds: int = WATCH_SECONDS,
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """(ADDED, MODIFIED, DELETED or BOOKMARK, object) from `version` on, for so many seconds.

        `ApiError` 410: `version` is too old, list again; 0: the server does not end it.
        """
        response = await self._send(
            "GET",
            path_of(kind, namespace),
            [
                *query,
                ("watch", "true"),
                ("allowWatchBookmarks", "true"),
                ("resourceVersion", version),
                ("timeoutSeconds", str(seconds)),
            ],
            None,
            "application/json",
            1.25 * seconds,
        )
        try:
            if response.status >= 400:
                data = await response.read()
                raise _refusal(response.status, _decoded(data), data)
            pending = b""
            async for chunk in response.content.iter_any():
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    event = _decoded(line)
                    found = event.get("object", {})
                    if event.get("type") == "ERROR":
                        raise _refusal(int(found.get("code", 500)), found, line)
                    yield event.get("type", ""), found
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, "NoAnswer", f"{type(error).__name__}: {error}") from error
        finally:
            response.close()


def path_of(kind: str, namespace: str | None, name: str | None = None) -> str:
    """The path of an object, or (without a name) of all; of all namespaces if none is given."""
    resource = RESOURCES[kind]
    middle = f"/namespaces/{namespace}" if resource.namespaced and namespace else ""
    return f"{resource.prefix}{middle}/{resource.plural}" + (f"/{name}" if name else "")


def _decoded(data: bytes) -> Manifest:
    try:
        answer = msgspec.json.decode(data)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _refusal(status: int, answer: Manifest, data: bytes) -> ApiError:
    message = answer.get("message") or data.decode("utf-8", "replace")[:1000]
    return ApiError(status, str(answer.get("reason") or status), str(message))


# --- the cache ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Feed:
    """One kind in one namespace (or in all), and when it was last known to be alive."""

    kind: str
    namespace: str | None
    query: tuple[tuple[str, str], ...] = ()
    synced: asyncio.Event = field(default_factory=asyncio.Event)
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
        feed.synced.set()
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
