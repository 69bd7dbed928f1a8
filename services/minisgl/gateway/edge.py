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
TOKEN_PATHS = frozenset({"/tokenize", "/detokenize"})
"""What the gateway itself encodes and decodes."""
TOKEN_SHARE = 8
"""Of the largest body: the part that such a request may have. The library that encodes takes 150
bytes for a byte of text."""
OPEN_BODIES = 16
"""So many of the largest bodies may be open at once: what clients can make a gateway hold."""
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

    def __init__(self, app: App, keys: Keys, root_path: str, max_body_bytes: int) -> None:
        self._app = app
        self.max_body_bytes = max_body_bytes
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
        limit = self.max_body_bytes
        if scope["path"] in TOKEN_PATHS:
            limit //= TOKEN_SHARE
        error = self._refusal(scope["path"], headers, limit)
        body = _Body(self, receive, limit)
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

    def _refusal(self, path: str, headers: dict[bytes, bytes], limit: int) -> ApiError | None:
        if path not in OPEN_PATHS and not self._keys.allow(headers.get(b"authorization")):
            return ApiError(
                401,
                "The API key is missing or wrong: send it as `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get(b"content-length", b"0")
        # int() of very many digits is an error of its own.
        too_large = length.isdigit() and (len(length) > 18 or int(length) > limit)
        return self.too_large(limit) if too_large else None

    def too_large(self, limit: int) -> ApiError:
        """The error for a body over `limit` bytes."""
        share = "" if limit == self.max_body_bytes else f", an eighth of {self.max_body_bytes}"
        return ApiError(
            413,
            f"The body is larger than {limit} bytes{share}, the limit that --max-body-bytes sets: "
            "send less, or have the server started with a higher one.",
            code="body_too_large",
            headers=CLOSE,
        )


class _Body:
    """The body of one request: its size, its time, and its share of the memory are limited."""

    def __init__(self, edge: Edge, receive: Receive, limit: int) -> None:
        self.taken = 0
        """Bytes so far."""
        self._edge = edge
        self._receive = receive
        self._limit = limit
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
            if self.taken > self._limit:
                raise self._edge.too_large(self._limit)
            most = OPEN_BODIES * self._edge.max_body_bytes
            if self._edge.open_bytes > most:
                raise ApiError(
                    429,
                    f"The open requests hold more than {most} bytes: try later.",
                    code="queue_full",
                    headers=CLOSE,
                )
        return event
