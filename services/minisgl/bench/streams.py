"""Many streams read at the least cost: when each byte came, and later what it was.

One thread, one socket a stream, nothing parsed while the streams run: a client that shares its
processors with the service that it measures must hardly be there. The requests ask a fake engine
for tokens of one character that count its ticks (`--fake-step-seconds`), so every character that
arrives says when it was due.
"""

import re
import select
import socket
import string
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from minisgl.config import StartError, UsageError
from minisgl.text import Tokenizer

MARKS = string.digits + string.ascii_letters
"""What tokens may look like: one character each, never escaped in JSON."""
BIAS = 100.0
READ_BYTES = 1 << 16
_TEXT = re.compile(rb'"text":"([^"]*)"')


@dataclass(slots=True)
class Stream:
    """What came of one answer."""

    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each of `pieces` was read, in seconds of CLOCK_MONOTONIC."""

    def characters(self) -> list[tuple[str, float]]:
        """The text of a completion that was streamed, and when each character came.

        Raises `StartError` if it broke off or is none.
        """
        body = b"".join(self.pieces)
        if not body.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in body:
            raise StartError(f"a stream was not answered to its end: {body[:300]!r}")
        ends, end = [], 0
        for piece in self.pieces:
            end += len(piece)
            ends.append(end)
        return [
            (character, self.times[bisect_left(ends, found.end())])
            for found in _TEXT.finditer(body)
            for character in found[1].decode()
        ]


def marking_tokens(tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """(id, character) of tokens that are one of `MARKS`, by rising id.

    Raises `UsageError` if the vocabulary has not a dozen of them.
    """
    found: dict[str, int] = {}
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id).decode("ascii", "replace")
        if len(text) == 1 and text in MARKS:
            found.setdefault(text, token_id)
    if len(found) < 12:
        raise UsageError("--model: its vocabulary has no tokens of one letter or digit each")
    return sorted((token_id, mark) for mark, token_id in found.items())


def request(model: str, prompt_ids: Sequence[int], tokens: int, marks: Sequence[int]) -> bytes:
    """A streaming completion of exactly so many tokens, each one of `marks`."""
    body = msgspec.json.encode(
        {
            "model": model,
            "prompt": list(prompt_ids),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "logit_bias": {str(token_id): BIAS for token_id in marks},
        }
    )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read_streams(
    address: tuple[str, int],
    requests: Sequence[bytes],
    *,
    on_all_started: Callable[[], None] = lambda: None,
    on_first_end: Callable[[], None] = lambda: None,
    seconds: float = 120.0,
) -> list[Stream]:
    """Send all requests at once and read each answer to its end.

    `on_all_started` is called once every stream has begun, `on_first_end` when one has ended.
    Raises `StartError` after `seconds`, and if the streams do not all run at one time.
    """
    streams: dict[int, Stream] = {}
    sockets: dict[int, socket.socket] = {}
    poll = select.epoll()
    deadline = time.monotonic() + seconds
    silent, ended = len(requests), False
    try:
        for data in requests:
            connection = socket.create_connection(address)
            connection.sendall(data)
            connection.setblocking(False)
            number = connection.fileno()
            sockets[number], streams[number] = connection, Stream()
            poll.register(number, select.EPOLLIN)
        left = dict(sockets)
        while left:
            for number, _ in poll.poll(1.0):
                data = left[number].recv(READ_BYTES)
                stream = streams[number]
                if data:
                    if not stream.times:
                        silent -= 1
                        if not silent:
                            on_all_started()
                    stream.pieces.append(data)
                    stream.times.append(time.monotonic())
                    continue
                poll.unregister(number)
                del left[number]
                if silent:
                    stream.characters()
                    raise StartError("a stream ended before the last one began: they are too short")
                if not ended:
                    ended = True
                    on_first_end()
            if time.monotonic() > deadline:
                raise StartError(f"{len(left)} streams had not ended after {seconds:g} seconds")
    finally:
        poll.close()
        for connection in sockets.values():
            connection.close()
    return list(streams.values())


def lateness(mark: int, arrived: float, marks: int, step_seconds: float) -> float:
    """Seconds from when a token was due to its arrival.

    `mark` is the place of the token among the `marks` that ticks count with. Right as long as it
    is below `marks` steps.
    """
    tick = int(arrived / step_seconds)
    tick -= (tick - mark) % marks
    return arrived - tick * step_seconds
