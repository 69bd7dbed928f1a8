"""Writing answers: one JSON object, or server-sent events while tokens come."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.gateway.answers import Output, Wording
from minisgl.gateway.calls import Call, ClientLeft
from minisgl.gateway.errors import ApiError
from minisgl.gateway.request import News

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """The answer to a call. `close` is called at its end, whatever that is.

    A client that reads slowly holds up only its own writer; `limit` seconds end that too.
    Raises `ApiError` for an error that comes before the first byte.
    """

    def __init__(
        self,
        call: Call,
        wording: Wording,
        *,
        stream: bool,
        limit: float,
        close: Callable[[], None],
    ) -> None:
        super().__init__()
        self._call = call
        self._wording = wording
        self._stream = stream
        self._limit = limit
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            with contextlib.suppress(ClientLeft):
                async with asyncio.timeout(self._limit):
                    await (self._send_stream if self._stream else self._send_whole)(send)
        except TimeoutError:
            log.info("gave up a client that reads too slowly", extra={"call": self._call.id})
        finally:
            watcher.cancel()
            self._close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.leave()

    async def _send_whole(self, send: Send) -> None:
        outputs = [Output() for _ in self._call.requests]
        while self._call.open:
            for news in await self._call.next():
                if news.error is not None:
                    raise ApiError.of(news.error)
                output = outputs[news.request.index]
                rows = self._wording.rows(news)
                if rows is not None:
                    output.rows = (output.rows or []) + rows
                output.texts.append(news.text)
                output.finish = news.finish
        body = self._wording.whole(outputs)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        batch = await self._call.next(KEEP_ALIVE_SECONDS)
        for news in batch:
            if news.error is not None:
                raise ApiError.of(news.error)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        while True:
            data, ended = self._events(batch) if batch else (KEEP_ALIVE, False)
            if data or ended:
                await send({"type": "http.response.body", "body": data, "more_body": not ended})
            if ended:
                return
            batch = await self._call.next(KEEP_ALIVE_SECONDS)

    def _events(self, batch: list[News]) -> tuple[bytes, bool]:
        """The events of a batch, and whether they are the last ones."""
        events = []
        for news in batch:
            if news.error is not None:
                events.append(b"data: " + ApiError.of(news.error).encoded() + b"\n\n")
                return b"".join(events), True
            events.append(self._wording.chunks(news))
        if self._call.open:
            return b"".join(events), False
        return b"".join([*events, self._wording.usage_chunk(), DONE]), True
