"""The Kubernetes API: requests, lists and watches. The only module that talks to it.

Objects stay plain dicts, as the server sends them. Of the kubernetes package this takes what is
hard to get right (configuration, TLS, rotated tokens); paths and bodies are written here, because
server-side apply wants exactly the fields that we mean and no model's defaults.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec
from kubernetes.aio import client, config

from minisgl_operator import api, names
from minisgl_operator.observed import Manifest

REQUEST_SECONDS = 20.0
_SURROGATES = frozenset(map(chr, range(0xD800, 0xE000)))
_NOT_AS_THEY_ARE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
WATCH_SECONDS = 60
"""The server ends a watch after this; the next one goes on from its resource version. One that
outlasts it by a quarter is given up: what lies between may have dropped it without a word."""


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
            body=yaml_of(manifest),
            # With a parameter, which the server drops: else the client would make JSON of it.
            content_type="application/apply-patch+yaml; charset=utf-8",
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


def yaml_of(manifest: Manifest) -> bytes:
    """JSON that is YAML too: the server reads no other for server-side apply.

    Where they differ, YAML knows no pairs of surrogates, which JSON writes for an emoji; as they
    are, it takes some characters for the end of a line, and bears others not at all."""
    text = _NOT_AS_THEY_ARE.sub(_escaped, json.dumps(manifest, ensure_ascii=False))
    return text.encode()


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\u{0xFFFD if character in _SURROGATES else ord(character):04x}"


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
