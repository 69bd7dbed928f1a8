"""One streamed answer on a connection of its own, read at the least cost for each event.

A client that is slow is late with its requests and its clock, and takes the processor from the
server that it measures. A library for HTTP needs about ten times as long for a chunk as this, which
knows only what a streamed completion needs.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec

CONNECT_SECONDS = 30.0


class ResponseReader:
    """The bytes of one HTTP/1.1 answer in, its server-sent events out."""

    def __init__(self) -> None:
        self.status = 0
        """0: the head is not complete yet."""
        self.ended = False
        self.text = b""
        """The body of an answer that is no stream; of a stream what is no whole event yet."""
        self._raw = b""
        self._chunked = False
        self._left: int | None = None
        """Bytes of the body that are still to come; None: not told."""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that these bytes complete. Raises `ValueError` for what is no HTTP."""
        self._raw += data
        if not self.status and not self._read_head():
            return []
        if self._chunked:
            self.text += self._take_chunks()
        else:
            body, self._raw = self._raw, b""
            self.text += body
            if self._left is not None:
                self._left -= len(body)
                self.ended = self._left <= 0
        if self.status != 200:
            return []
        *events, self.text = self.text.split(b"\n\n")
        return events

    def _read_head(self) -> bool:
        head, found, rest = self._raw.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = head.split(b"\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise ValueError(f"no HTTP answer: {first[:80]!r}")
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (x.partition(b":") for x in lines)
        }
        self.status = int(words[1])
        self._chunked = fields.get(b"transfer-encoding", b"").lower() == b"chunked"
        if b"content-length" in fields:
            self._left = int(fields[b"content-length"])
        self._raw = rest
        return True

    def _take_chunks(self) -> bytes:
        parts, at, raw = [], 0, self._raw
        while (line := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:line].partition(b";")[0], 16)
            if size <= 0:
                self.ended = True
                break
            end = line + 2 + size
            if len(raw) < end + 2:
                break
            parts.append(raw[line + 2 : end])
            at = end + 2
        self._raw = raw[at:]
        return b"".join(parts)


class Exchange(asyncio.Protocol):
    """Sends one request, and hands over the events of its answer as they come."""

    def __init__(self, request: bytes, on_events: Callable[[list[bytes]], bool]) -> None:
        """`on_events` also gets to know that the answer begins; it says whether it wants more."""
        self.reader = ResponseReader()
        self.heard = time.monotonic()
        """When something came last."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the answer is over, given up or broken off; an exception says why."""
        self._request = request
        self._on_events = on_events
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        try:
            events = self.reader.feed(data)
            wanted = self.reader.status != 200 or self._on_events(events)
        except (ValueError, msgspec.DecodeError) as error:
            self._finish(error)
            return
        if self.reader.ended or not wanted:
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None) if error is None else self.over.set_exception(error)
        if self._transport is not None:
            self._transport.abort()


class Endpoint:
    """Where completions are asked for."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._name = parts.hostname or ""
        self._address = (self._name, parts.port or (443 if self._tls else 80))
        lines = [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join(
            [
                f"POST {parts.path}/v1/completions HTTP/1.1",
                f"host: {parts.netloc.rpartition('@')[2]}",
                "connection: close",
                "accept: text/event-stream",
                "content-type: application/json",
                *lines,
            ]
        )

    async def find(self) -> None:
        """Look the name up once, and not for each request."""
        with contextlib.suppress(OSError):  # the requests will say what is wrong
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(asyncio.Protocol, *self._address)
            self._address = transport.get_extra_info("peername")[:2]
            transport.abort()

    def request(self, body: object) -> bytes:
        """The bytes of a request with this body."""
        data = msgspec.json.encode(body)
        return f"{self._head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data

    async def exchange(
        self, request: bytes, on_events: Callable[[list[bytes]], bool], silence: float
    ) -> ResponseReader:
        """Send a request and read its answer to the end, or as far as `on_events` wants.

        Raises `OSError` for a connection that fails, `TimeoutError` when nothing came for `silence`
        seconds, and `ValueError` or `msgspec.DecodeError` for what cannot be read.
        """
        loop = asyncio.get_running_loop()
        exchange = Exchange(request, on_events)
        name = self._name if self._tls else None
        async with asyncio.timeout(CONNECT_SECONDS):
            await loop.create_connection(
                lambda: exchange, *self._address, ssl=self._tls, server_hostname=name
            )
        try:
            while not exchange.over.done():
                left = exchange.heard + silence - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"nothing came for {silence:g} seconds")
                await asyncio.wait({exchange.over}, timeout=left)
            exchange.over.result()
        finally:
            exchange.connection_lost(None)
        return exchange.reader
