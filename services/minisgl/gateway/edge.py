"""What happens to every HTTP request before a route sees it: id, prefix, key, size limit."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from minisgl.gateway.auth import Keys
from minisgl.gateway.errors import ApiError

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Probes and scrapers need no key."""
MAX_BODY_BYTES = 16 << 20
"""Several times the text of the longest context that models have."""
MAX_OPEN_BYTES = 256 << 20
"""Of the bodies of all requests that are open: what clients can make a gateway hold."""
BODY_SECONDS = 120.0
"""For a whole body, from its headers on."""
SHOWN = 200
"""Most characters of a path or an id in the log."""
REQUEST_ID = b"x-request-id"
CLOSE = {"Connection": "close"}
"""For answers to what was not read to its end."""


class Edge:
    """ASGI middleware. Answers what it refuses itself, and puts `x-request-id` on every answer.

    Each answer is one line of the log, at its end; those to probes and scrapers are none.
    """

    def __init__(self, app: App, keys: Keys, root_path: str) -> None:
        self._app = app
        self._keys = keys
        self._root_path = "/" + root_path.strip("/") if root_path.strip("/") else ""
        self.open_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(REQUEST_ID) or secrets.token_hex(16).encode()

        started, status = time.monotonic(), 0

        async def send_with_id(event: Event) -> None:
            nonlocal status
            if event["type"] == "http.response.start":
                status = event["status"]
                event["headers"] = [*event.get("headers", ()), (REQUEST_ID, request_id)]
            await send(event)

        scope = self._without_prefix(scope)
        error = self._refusal(scope["path"], headers)
        body = _Body(self, receive)
        try:
            if error is not None:
                await error.response()(scope, receive, send_with_id)
            else:
                await self._app(scope, body.receive, send_with_id)
        finally:
            self.open_bytes -= body.taken
            if scope["path"] not in OPEN_PATHS:
                log.info(
                    "answered",
                    extra={
                        "method": scope["method"],
                        "path": scope["path"][:SHOWN],
                        "status": status or "none",  # none: the client left before
                        "seconds": round(time.monotonic() - started, 3),
                        "request_id": request_id[:SHOWN].decode("latin-1"),
                    },
                )

    def _without_prefix(self, scope: Scope) -> Scope:
        """A proxy leaves its prefix on; probes come without it."""
        root, path = self._root_path, scope["path"]
        if root and (path == root or path.startswith(root + "/")):
            raw = scope.get("raw_path")
            path = path.removeprefix(root) or "/"
            scope = {**scope, "path": path}
            if raw is not None:
                scope["raw_path"] = raw.removeprefix(root.encode()) or b"/"
        return scope

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if path not in OPEN_PATHS and not self._keys.allow(headers.get(b"authorization")):
            return ApiError(
                401,
                "The API key is missing or wrong: send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get(b"content-length", b"0")
        return _too_large() if length.isdigit() and int(length) > MAX_BODY_BYTES else None


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {MAX_BODY_BYTES >> 20} MiB.",
        code="body_too_large",
        headers=CLOSE,
    )


class _Body:
    """The body of one request: its size, its time, and its share of the memory are limited."""

    def __init__(self, edge: Edge, receive: Receive) -> None:
        self.taken = 0
        """Bytes so far."""
        self._edge = edge
        self._receive = receive
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._whole = False

    async def receive(self) -> Event:
        """The next event. Raises `ApiError` where a limit is met, with what is not read unread."""
        if self._whole:
            return await self._receive()  # waits for the client to leave
        try:
            async with asyncio.timeout_at(self._deadline):
                event = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, f"The body did not come within {BODY_SECONDS:g} s.", headers=CLOSE
            ) from None
        if event["type"] == "http.request":
            size = len(event.get("body", b""))
            self.taken += size
            self._edge.open_bytes += size
            self._whole = not event.get("more_body", False)
            if self.taken > MAX_BODY_BYTES:
                raise _too_large()
            if self._edge.open_bytes > MAX_OPEN_BYTES:
                raise ApiError(
                    429,
                    f"The open requests hold more than {MAX_OPEN_BYTES >> 20} MiB: try later.",
                    code="queue_full",
                    headers=CLOSE,
                )
        return event
