"""Reading many streams: what came, when, and how late it was."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minisgl.bench.streams import MARKS, Stream, lateness, marking_tokens, read_streams, request
from minisgl.config import StartError, UsageError
from minisgl.text import Tokenizer, load_tokenizer
from tests import tiny

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"text":"' + text.encode() + b'"}]}\n\n'


def answer(*texts: str) -> bytes:
    return HEAD + b"".join(map(event, texts)) + DONE


@contextmanager
def server(answers: list[bytes], begun: threading.Event) -> Iterator[tuple[str, int]]:
    """Gives each connection, in their order, one answer; an empty one never ends.

    The others end once `begun` is set: the client has seen all beginnings.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connections = [listening.accept()[0] for _ in answers]
            for connection, data in zip(connections, answers, strict=True):
                connection.recv(1 << 16)
                connection.sendall(data)
            begun.wait(10)
            for connection, data in zip(connections, answers, strict=True):
                if data:
                    connection.shutdown(socket.SHUT_WR)
            for connection in connections:
                while connection.recv(1 << 16):
                    pass  # until the client has gone
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()
        thread.join(10)
        assert not thread.is_alive()


def test_a_character_has_the_time_of_the_piece_that_ends_its_event() -> None:
    first, second = event("a"), event("bc")
    stream = Stream([HEAD + first[:-3], first[-3:] + second, DONE], [1.0, 2.0, 3.0])
    # The text's closing quote is in the first piece; what follows it does not matter.
    assert stream.characters() == [("a", 1.0), ("b", 2.0), ("c", 2.0)]


def test_a_text_that_is_split_counts_when_its_last_byte_is_there() -> None:
    body = event("ab")
    cut = body.index(b'b"') + 1
    assert Stream([HEAD + body[:cut], body[cut:], DONE], [1.0, 2.0, 3.0]).characters() == [
        ("a", 2.0),
        ("b", 2.0),
    ]


@pytest.mark.parametrize(
    "body", [HEAD + event("a"), b"HTTP/1.1 503 no\r\n\r\n" + DONE, b""], ids=["cut", "503", "empty"]
)
def test_an_answer_that_is_not_whole_is_an_error(body: bytes) -> None:
    with pytest.raises(StartError, match="not answered to its end"):
        Stream([body], [1.0]).characters()


def test_all_streams_are_read_to_their_ends_between_two_calls() -> None:
    calls: list[str] = []
    begun = threading.Event()
    answers = [answer("a", "b"), answer("c")]

    def started() -> None:
        calls.append("started")
        begun.set()

    with server(answers, begun) as address:
        streams = read_streams(
            address,
            [b"one", b"two"],
            on_all_started=started,
            on_first_end=lambda: calls.append("ended"),
        )
    assert calls == ["started", "ended"]
    assert [b"".join(stream.pieces) for stream in streams] == answers
    assert all(stream.times == sorted(stream.times) for stream in streams)


def test_streams_that_do_not_run_at_one_time_are_an_error() -> None:
    begun = threading.Event()
    begun.set()
    with (
        server([answer("a"), b""], begun) as address,
        pytest.raises(StartError, match="before the last one began"),
    ):
        read_streams(address, [b"one", b"two"])


@pytest.mark.parametrize(
    ("late", "marks"), [(0.0, 10), (0.004, 10), (0.031, 10), (0.097, 10), (0.6, 62)]
)
def test_a_token_says_when_it_was_due(late: float, marks: int) -> None:
    step_seconds = 0.01
    for tick in (123_450, 123_459, 123_461):
        due = (tick + 0.25) * step_seconds  # off the tick: where a float rounds does not matter
        arrived = due + late
        found = lateness(tick % marks, arrived, marks, step_seconds)
        assert found == pytest.approx(late + 0.25 * step_seconds, abs=1e-6)


def test_tokens_of_one_character_are_found_once_each(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.build_tiny(tmp_path / "model"))
    found = marking_tokens(tokenizer)
    assert [token_id for token_id, _ in found] == sorted(token_id for token_id, _ in found)
    assert sorted(mark for _, mark in found) == sorted(MARKS)
    assert all(tokenizer.decode([token_id]) == mark for token_id, mark in found)


def test_a_vocabulary_without_such_tokens_is_refused() -> None:
    class Words(Tokenizer):
        vocab_size = 3

        def __init__(self) -> None:
            pass

        def token_bytes(self, token_id: int) -> bytes:
            return b"word"

    with pytest.raises(UsageError, match="one letter or digit"):
        marking_tokens(Words())


def test_a_request_asks_for_a_stream_of_these_tokens_on_a_connection_of_its_own() -> None:
    head, _, body = request("m", [1, 2], 7, [5, 9]).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n") and b"connection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    assert b'"logit_bias":{"5":100.0,"9":100.0}' in body and b'"stream":true' in body
    assert b'"max_tokens":7' in body and b'"ignore_eos":true' in body
