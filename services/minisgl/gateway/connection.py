"""A client's connection: uvicorn's, with the limits that its parser does not have.

Before a route is known nobody else looks: a client could send one header for ever, or a byte of it
each minute. Nor does anybody after an answer was written: closing a connection waits until the
client has read it. What is refused here gets the shape of error and an id as everything else.
"""

import asyncio
import http
import secrets

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.gateway.errors import ApiError
from minisgl.gateway.sse import KEEP_ALIVE, KEEP_ALIVE_SECONDS

MAX_HEAD_BYTES = 64 << 10
"""Of a request line and headers; what is read at once may go beyond it."""
FRAMING = 4
"""A whole request as it travels may be so many times the largest body: chunks have a frame each,
and trailers are no body."""
HEAD_SECONDS = 30.0
"""For a request line and headers, and for the first byte on a new connection."""
STALL_SECONDS = 60.0
"""A client that takes nothing of what waits for it is cut off after that."""
PROBE_SECONDS = (0.25, 1.0, KEEP_ALIVE_SECONDS)
"""Pauses between the probes of a client that sends no more; the last one again and again."""


def connection_class(max_body_bytes: int) -> type["Connection"]:
    """The protocol for a server that takes bodies of this size."""
    return type("Connection", (Connection,), {"max_message_bytes": FRAMING * max_body_bytes})


class Connection(HttpToolsProtocol):
    """Ends a connection whose requests are too long, whose headers are too slow, or whose client
    reads nothing.

    A client may shut down its sending side and still read: it gets its answer. TCP shows a client
    that has closed altogether in the same way, and it differs only in what it does with what it is
    sent: it resets the connection. So such a client is sent something that means nothing: an
    interim response (100), which every client of HTTP/1.1 skips, or a comment in a stream that has
    begun. A client of HTTP/1.0 knows neither, and counts as gone.
    """

    max_message_bytes: int
    _bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The clock runs from here: a connection that says nothing goes too."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the clocks."""
        self._stop_timer()
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)  # calls resume_writing

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. False: close the connection."""
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body
        if not waits or cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self._ask_whether_it_reads()
        return True

    def _ask_whether_it_reads(self, times: int = 0) -> None:
        """The first of these makes a closed socket answer with a reset, the next one fails then."""
        if self.transport.is_closing():
            return
        if not self.pipeline and not self.cycle.response_complete:  # else an answer ends before
            if not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif self.cycle.chunked_encoding:  # events are sent whole, one or more a chunk
                self.transport.write(b"%x\r\n%b\r\n" % (len(KEEP_ALIVE), KEEP_ALIVE))
        pause = PROBE_SECONDS[min(times, len(PROBE_SECONDS) - 1)]
        self._probe = self.loop.call_later(pause, self._ask_whether_it_reads, times + 1)

    def on_message_begin(self) -> None:
        """A request line begins."""
        super().on_message_begin()
        self._bytes, self._in_head = 0, True
        self._start_timer()

    def on_headers_complete(self) -> None:
        """The body may take its time: `edge` has limits for it."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        self._bytes += len(data)
        super().data_received(data)
        limit = MAX_HEAD_BYTES if self._in_head else self.max_message_bytes
        if self._bytes > limit and not self.transport.is_closing():
            self._refuse(431, f"The headers are larger than {MAX_HEAD_BYTES >> 10} KiB.")

    def pause_writing(self) -> None:
        """More waits to be sent than should."""
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came. What is still unsent now, the client does not want."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _watch(self, unsent: int) -> None:
        def look() -> None:
            now = self.transport.get_write_buffer_size()
            if now < unsent:
                self._watch(now)
            else:
                self.transport.abort()

        self._stall = self.loop.call_later(STALL_SECONDS, look)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for what is no HTTP."""
        self._refuse(400, "This is not an HTTP request that can be read.")

    def _refuse(self, status: int, message: str) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else an answer is being written
            body = ApiError(status, message).encoded()
            head = (
                f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"x-request-id: {secrets.token_hex(16)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
