"""Reading an HTTP answer, however its bytes are cut."""

import asyncio

import pytest

from minisgl.bench.sse import Endpoint, ResponseReader

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b"data: one", b": stays", b"data: [DONE]"]


def chunk(data: bytes) -> bytes:
    return b"%x;note\r\n%s\r\n" % (len(data), data)


CHUNKED = HEAD + chunk(b"data: o") + chunk(b"ne\n\n: stays\n\n") + chunk(b"data: [DONE]\n\n")
CHUNKED += b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_events_do_not_depend_on_how_bytes_come(size: int) -> None:
    reader = ResponseReader()
    found = []
    for start in range(0, len(CHUNKED), size):
        assert not reader.ended or start > len(CHUNKED) - len(b"\r\n\r\n")
        found += reader.feed(CHUNKED[start : start + size])
    assert (reader.status, reader.ended, found) == (200, True, EVENTS)


def test_an_answer_with_a_length_ends_with_it() -> None:
    reader = ResponseReader()
    head = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 7\r\n\r\n"
    assert reader.feed(head + b"no ") == [] and not reader.ended
    assert reader.feed(b"room") == [] and reader.ended
    assert (reader.status, reader.text) == (429, b"no room")


def test_an_answer_without_a_length_goes_on() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\n\r\ndata: a\n\ndata: b") == [b"data: a"]
    assert reader.feed(b"\n\n") == [b"data: b"] and not reader.ended


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1\r\n\r\n", HEAD + b"zz\r\n"])
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"HTTP|invalid literal"):
        ResponseReader().feed(data)


def test_a_request_has_path_host_and_headers_of_its_url() -> None:
    endpoint = Endpoint("http://user@example:81/qwen", {"Authorization": "Bearer k"})
    head, _, body = endpoint.request({"a": 1}).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /qwen/v1/completions HTTP/1.1" and body == b'{"a":1}'
    assert {"host: example:81", "Authorization: Bearer k", "content-length: 7"} <= set(lines)


async def test_a_server_that_falls_silent_is_given_up() -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {})
        with pytest.raises(TimeoutError, match=r"nothing came for 0\.2 seconds"):
            await endpoint.exchange(endpoint.request({}), lambda events: True, silence=0.2)
        async with asyncio.timeout(10):
            await gone.wait()  # the connection is closed, so that the server computes no more
