"""What happens around an answer: clients that leave, queues that fill, a bus that is away."""

import asyncio
import http.client
import io
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from minisgl.config import UsageError
from minisgl.gateway import connection, edge
from minisgl.gateway import main as gateway_main
from minisgl.gateway.auth import Keys
from minisgl.messages import (
    AuditMsg,
    ErrorInfo,
    Message,
    TokenizeMsg,
    UserReply,
    WorkerState,
    pack_ids,
    unpack_ids,
)
from tests.support import metrics, open_files, wait_until
from tests.unit.gateway.scripted import (
    INCARNATION,
    MAX_MODEL_LEN,
    MODEL,
    OUTPUT,
    Stage,
    aborted,
    chat_body,
)

CHAT = "/v1/chat/completions"
MakeStage = Callable[..., Stage]


def soon(condition: Callable[[], bool], what: object = "the condition does not hold") -> None:
    wait_until(condition, 10, lambda: str(what))


def raw_post(stage: Stage, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """Send a request over a bare socket."""
    sock = stage.connect()
    data = json.dumps(body).encode()
    sock.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return sock


# --- clients that leave or are slow ---------------------------------------------------------


def test_a_streaming_client_that_leaves_is_aborted_at_its_source(stage: Stage) -> None:
    stage.group.pause_after = 3
    with stage.http.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
    soon(lambda: set(aborted(stage.bus)) == {(1, 1)}, stage.bus.sent)
    soon(lambda: len(stage.service.requests) == 0 and not stage.service.calls)
    assert metrics(stage.url)["minisgl_requests_total"] == 1


def test_a_blocking_client_that_leaves_is_aborted_too(stage: Stage) -> None:
    stage.group.pause_after = 3
    sock = raw_post(stage, chat_body(n=2))
    soon(lambda: stage.service.requests.waiting == 0 and stage.group.runs == 2)
    sock.close()
    soon(lambda: set(aborted(stage.bus)) == {(1, 1), (1, 2)}, stage.bus.sent)


def test_a_client_that_leaves_before_any_reply_is_aborted_when_the_first_comes(
    stage: Stage,
) -> None:
    stage.group.pause_after = -1
    sock = raw_post(stage, chat_body(stream=True))
    soon(lambda: stage.group.runs == 1)
    sock.close()
    soon(lambda: len(stage.service.requests) == 0)
    assert aborted(stage.bus) == []
    stage.group.go_on()
    soon(lambda: (1, 1) in aborted(stage.bus), stage.bus.sent)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [-1, 3])
def test_a_client_that_only_sends_no_more_gets_its_whole_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, stream: bool, pause_after: int
) -> None:
    monkeypatch.setattr(connection, "PROBE_SECONDS", (0.01,))
    stage.group.pause_after = pause_after
    sock = raw_post(stage, chat_body(stream=stream))
    soon(lambda: stage.group.runs == 1)
    sock.shutdown(socket.SHUT_WR)
    received = b""
    probe = b": keep-alive" if stream and pause_after > 0 else b"100 Continue"
    while received.count(probe) < 20:  # long after one that has left would have been noticed
        received += sock.recv(1 << 16)
    stage.group.go_on()
    received += until_closed(sock)
    answer = http.client.HTTPResponse(Replayed(received))  # type: ignore[arg-type]
    answer.begin()
    body = answer.read().decode()
    assert answer.status == 200
    if stream:
        assert text_of(body) == OUTPUT
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == OUTPUT
    assert aborted(stage.bus) == []


def test_a_client_of_http_1_0_that_sends_no_more_counts_as_gone(stage: Stage) -> None:
    stage.group.pause_after = 3
    data = json.dumps(chat_body()).encode()
    sock = stage.connect()
    sock.sendall(
        f"POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    soon(lambda: stage.group.runs == 1)
    sock.shutdown(socket.SHUT_WR)
    assert until_closed(sock) == b""
    soon(lambda: set(aborted(stage.bus)) == {(1, 1)}, stage.bus.sent)


def test_a_client_that_sends_no_more_within_its_request_is_gone(stage: Stage) -> None:
    sock = stage.connect()
    sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
    sock.shutdown(socket.SHUT_WR)
    assert until_closed(sock) == b""


class Replayed:
    """A socket that gives these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def text_of(events: str) -> str:
    """What the events of a chat hold together, which must end with [DONE]."""
    lines = [e for e in events.split("\n\n") if e and not e.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    deltas = (json.loads(e.removeprefix("data: "))["choices"][0]["delta"] for e in lines)
    return "".join(delta.get("content") or "" for delta in deltas)


def test_an_audit_tells_of_a_request_whose_client_left(stage: Stage) -> None:
    stage.bus.deliver(
        AuditMsg(
            boot=stage.service.boot, group="g0", incarnation=INCARNATION, detokenizer="d0",
            held=[(b"x" * 16, 1, 77, 5)],
        )
    )  # fmt: skip
    soon(lambda: set(aborted(stage.bus)) == {(1, 77)})


def test_a_client_that_reads_nothing_holds_up_nobody_and_then_gets_all(stage: Stage) -> None:
    stage.group.output = "x" * 200_000
    stage.group.react = lambda message: _in_large_pieces(stage, message)
    slow = raw_post(stage, chat_body(stream=True))
    soon(lambda: stage.group.runs == 1 and len(stage.service.requests) == 0)
    stage.group.output, stage.group.react = OUTPUT, lambda message: None
    assert stage.chat(max_tokens=7).choices[0].message.content == "Grüße"
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += slow.recv(1 << 20)
    assert b"data: [DONE]" in received and received.count(b"x" * 1000) >= 20_000
    soon(lambda: not stage.service.calls)


def _in_large_pieces(stage: Stage, message: TokenizeMsg) -> list[UserReply]:
    """20 MB in 200 replies: more than sockets hold."""
    prompt = pack_ids(stage.group.prompt_of(message))
    replies = [stage.group.reply(message, prompt_ids=prompt)]
    for i in range(200):
        replies.append(
            stage.group.reply(
                message, pos=i, ids=pack_ids([5]), text="x" * 100_000, text_at=i * 100_000,
                finish="stop" if i == 199 else None,
            )
        )  # fmt: skip
    return replies


def test_forty_clients_at_once_all_get_their_answer(stage: Stage) -> None:
    answers: list[str] = []

    def ask() -> None:
        chunks = stage.chat(stream=True, max_tokens=40)
        answers.append("".join(c.choices[0].delta.content or "" for c in chunks))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 40 and len(set(answers)) == 1
    soon(lambda: len(stage.service.requests) == 0 and not stage.service.calls)


# --- errors in the middle -------------------------------------------------------------------


def test_an_error_after_the_first_byte_is_an_event_and_then_the_end(stage: Stage) -> None:
    def fails_later(message: TokenizeMsg) -> list[UserReply]:
        error = ErrorInfo(status=500, message="it broke", code="c")
        return [*stage.group.answer(message)[:4], stage.group.reply(message, error=error)]

    stage.group.react = fails_later
    stage.group.pause_after = 3
    with stage.http.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        stage.group.go_on()
        events = [line for line in lines if line]
    assert answer.status_code == 200
    assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "it broke"
    chunks = iter(stage.chat(stream=True))
    next(chunks)
    stage.group.go_on()
    with pytest.raises(openai.APIError, match="it broke"):
        list(chunks)


def test_an_error_of_one_choice_ends_the_others(stage: Stage) -> None:
    def second_fails(message: TokenizeMsg) -> list[UserReply]:
        if stage.group.runs == 2:
            return stage.group.error(message, 400, "no")
        return stage.group.answer(message)[:3]

    stage.group.react = second_fails
    with pytest.raises(openai.BadRequestError, match="no"):
        stage.chat(n=2)
    soon(lambda: set(aborted(stage.bus)) == {(1, 1)})


def test_a_stream_goes_on_after_a_replay_as_if_nothing_had_happened(stage: Stage) -> None:
    def falls_once(message: TokenizeMsg) -> list[UserReply]:
        replies = stage.group.answer(message)
        if message.attempt == 1:
            lost = stage.group.reply(message, again="lost")
            return [*replies[:20], lost]
        return replies

    stage.group.react = falls_once
    stage.group.cached_tokens = 1
    chunks = list(stage.chat(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == OUTPUT
    first, second = stage.bus.of(TokenizeMsg)
    assert len(unpack_ids(second.output_ids)) == 19 and second.sampling == first.sampling
    assert chunks[-1].usage.completion_tokens == len(OUTPUT.encode()) + 1
    seen = metrics(stage.url)
    assert seen["minisgl_request_replays_total"] == 1
    assert seen["minisgl_prompt_tokens_total"] == len("[user]Rivers?")
    assert seen["minisgl_cached_tokens_total"] == 1
    assert seen["minisgl_generation_tokens_total"] == len(OUTPUT.encode()) + 1


def test_messages_for_others_on_its_queue_do_not_stop_the_gateway(stage: Stage) -> None:
    stage.bus.deliver(stage.group.reply(_message(stage), ids=b"abc", pos=-5))
    stage.bus.deliver(_message(stage))
    soon(lambda: metrics(stage.url)["minisgl_bus_errors_total"] == 1)
    assert stage.chat(max_tokens=1).usage.completion_tokens == 1


def _message(stage: Stage) -> TokenizeMsg:
    stage.chat(max_tokens=1)
    message = stage.bus.of(TokenizeMsg)[-1]
    assert isinstance(message, TokenizeMsg)
    return message


def test_a_request_over_its_time_limit_is_a_504(make_stage: MakeStage) -> None:
    stage = make_stage(request_timeout_seconds=0.3)
    stage.group.pause_after = 1
    with pytest.raises(openai.APIStatusError) as error:
        stage.chat()
    assert error.value.status_code == 504 and error.value.code == "request_timeout"
    soon(lambda: set(aborted(stage.bus)) == {(1, 1)})


# --- limits and readiness -------------------------------------------------------------------


def test_one_more_than_may_wait_is_a_429_with_retry_after(make_stage: MakeStage) -> None:
    stage = make_stage(max_queued_requests=2)
    stage.group.pause_after = 0
    waiting = [raw_post(stage, chat_body()) for _ in range(2)]
    soon(lambda: stage.service.requests.waiting == 2)
    answer = stage.post(CHAT, chat_body())
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) > 0
    stage.group.pause_after = None
    stage.group.go_on()
    soon(lambda: stage.service.requests.waiting == 0)
    assert stage.post(CHAT, chat_body(max_tokens=1)).status_code == 200
    for sock in waiting:
        sock.close()


def test_a_queue_of_length_0_takes_who_comes_alone(make_stage: MakeStage) -> None:
    stage = make_stage(max_queued_requests=0)
    assert stage.chat(max_tokens=1).usage.completion_tokens == 1
    stage.group.pause_after = -1
    first = raw_post(stage, chat_body())
    soon(lambda: stage.service.requests.waiting == 1)
    assert stage.post(CHAT, chat_body()).json()["error"]["code"] == "queue_full"
    first.close()


def test_more_choices_than_the_queue_holds_can_never_be_served(make_stage: MakeStage) -> None:
    answer = make_stage(max_queued_requests=2).post(CHAT, chat_body(n=3))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_without_a_group_or_a_worker_a_new_request_is_a_503_at_once(
    stage: Stage, gone: int
) -> None:
    stage.bus.states.pop(gone)
    soon(lambda: stage.http.get("/ready").status_code == 503)
    answer = stage.post(CHAT, chat_body(stream=True))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_group_ready"
    assert int(answer.headers["retry-after"]) > 0
    assert stage.http.get("/health").status_code == 200
    assert stage.post("/tokenize", {"model": MODEL, "prompt": "x"}).json()["max_model_len"] == 400


def test_a_draining_group_takes_nothing_new(stage: Stage) -> None:
    stage.bus.states[0].draining = True
    soon(lambda: stage.http.get("/ready").status_code == 503)


def test_an_accepted_request_waits_for_a_group_and_then_goes_on(stage: Stage) -> None:
    refused = [0]

    def refuses_twice(message: TokenizeMsg) -> list[UserReply] | None:
        refused[0] += 1
        return (
            [stage.group.reply(message, source=None, again="refused")] if refused[0] < 3 else None
        )

    stage.group.react = refuses_twice
    assert stage.chat().choices[0].message.content == OUTPUT
    assert refused[0] == 3


def test_a_bus_that_is_away_is_a_503_and_keeps_what_was_to_be_sent(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.group.pause_after = 5
    sock = raw_post(stage, chat_body(stream=True))
    soon(lambda: stage.group.runs == 1 and stage.service.requests.waiting == 0)
    stage.bus.away = True
    soon(lambda: stage.http.get("/ready").status_code == 503)
    answer = stage.post(CHAT, chat_body())
    assert answer.json()["error"]["code"] == "bus_unavailable" and answer.headers["retry-after"]
    sock.close()
    soon(lambda: len(stage.service.requests) == 0)
    stage.bus.away = False
    soon(lambda: set(aborted(stage.bus)) == {(1, 1)}, stage.bus.sent)
    soon(lambda: stage.http.get("/ready").status_code == 200)


def test_it_does_not_listen_until_a_request_can_be_served(make_stage: MakeStage) -> None:
    stage = Stage()
    states, stage.bus.states = stage.bus.states, []
    stage.start(wait=False)
    try:
        soon(lambda: stage.bus.own is not None)
        with pytest.raises(httpx.ConnectError):
            stage.http.get("/health")
        assert not stage.listens.is_set()
        stage.bus.states = states
        assert stage.listens.wait(10)
        assert stage.http.get("/ready").json() == {"status": "ready"}
    finally:
        stage.close()


def test_a_pod_of_a_cluster_listens_once_it_has_seen_the_bus() -> None:
    stage = Stage(listen_when_ready=False)
    stage.bus.away = True
    stage.start(wait=False)
    try:
        with pytest.raises(httpx.ConnectError):
            stage.http.get("/health")
        stage.bus.away = False
        assert stage.listens.wait(10)
        assert stage.http.get("/ready").status_code == 200
    finally:
        stage.close()


def test_while_the_bus_is_away_a_pod_of_a_cluster_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_main, "FIRST_LOOK_SECONDS", 0.1)
    stage = Stage(listen_when_ready=False)
    stage.bus.away = True
    stage.start(wait=False)
    try:
        assert stage.listens.wait(10)
        answer = stage.post(CHAT, chat_body())
        assert answer.json()["error"]["code"] == "bus_unavailable" and answer.headers["retry-after"]
        assert stage.http.get("/health").status_code == 200
    finally:
        stage.close()


def test_a_signal_ends_it_while_it_waits_for_a_group(make_stage: MakeStage) -> None:
    stage = Stage()
    stage.bus.states = []
    stage.start(wait=False)
    soon(lambda: stage.bus.own is not None)
    stage.close()
    assert stage.code == 0 and not stage.listens.is_set() and stage.bus.closed


def test_it_publishes_its_state_with_a_beat_that_moves(stage: Stage) -> None:
    soon(lambda: stage.bus.own is not None)
    first = stage.bus.own
    assert first is not None and (first.role, first.id) == ("gateway", "gw")
    assert first.boot == stage.service.boot and not first.draining
    soon(lambda: stage.bus.own is not None and stage.bus.own.beat > first.beat)


# --- the end --------------------------------------------------------------------------------


def test_a_drain_refuses_new_requests_and_finishes_open_streams(make_stage: MakeStage) -> None:
    stage = make_stage(drain_seconds=30.0)
    stage.group.pause_after = 5
    with stage.http.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        stage.signal()
        soon(lambda: httpx.get(f"{stage.url}/health").status_code == 503)
        refused = httpx.post(stage.url + CHAT, json=chat_body())
        assert refused.status_code == 503 and refused.headers["retry-after"]
        soon(lambda: stage.bus.own is not None and stage.bus.own.draining)
        stage.group.go_on()
        assert "data: [DONE]" in list(lines)
    soon(lambda: stage.code == 0)
    assert stage.bus.closed


def test_what_outlasts_the_drain_ends_with_an_error_and_is_aborted(make_stage: MakeStage) -> None:
    stage = make_stage(drain_seconds=0.2)
    stage.group.pause_after = 5
    with stage.http.stream("POST", CHAT, json=chat_body(stream=True)) as answer:
        stage.signal()
        events = [line for line in answer.iter_lines() if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    soon(lambda: stage.code == 0)
    assert set(aborted(stage.bus)) == {(1, 1)}


def test_a_thread_that_fails_ends_the_process_with_an_error(stage: Stage) -> None:
    def fails(message: Message) -> None:
        raise RuntimeError("the test breaks the bus")

    stage.bus.on_send = fails
    sock = raw_post(stage, chat_body())
    soon(lambda: stage.code == 1)
    sock.close()


def test_a_second_gateway_of_the_same_id_ends_this_one(stage: Stage) -> None:
    stage.bus.states.append(WorkerState(role="gateway", id="other", boot=5, beat=0))
    stage.bus.states.append(WorkerState(role="gateway", id="gw", boot=stage.service.boot, beat=0))
    stage.chat(max_tokens=1)
    assert stage.code is None
    stage.bus.states.append(WorkerState(role="gateway", id="gw", boot=5, beat=0))
    soon(lambda: stage.code == 5)


# --- the edge -------------------------------------------------------------------------------


def test_every_answer_has_a_request_id(stage: Stage) -> None:
    for path in ("/health", "/v1/models", "/v1/nothing"):
        made = stage.http.get(path).headers["x-request-id"]
        assert made and made != stage.http.get(path).headers["x-request-id"]
        given = stage.http.get(path, headers={"X-Request-Id": "A b"})
        assert given.headers["x-request-id"] == "A b"
        assert len(given.headers.get_list("x-request-id")) == 1


def test_each_answer_is_one_line_of_the_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="minisgl.gateway.edge")
    stage.chat(max_tokens=1, stream=True, extra_headers={"x-request-id": "r1"}).close()
    stage.http.get("/health")
    stage.http.get("/v1/nothing", headers={"x-request-id": "r2"})
    soon(lambda: len(caplog.records) == 2, caplog.records)
    lines = {vars(r)["request_id"]: vars(r) for r in caplog.records}
    assert (lines["r1"]["path"], lines["r1"]["status"]) == (CHAT, 200)
    assert (lines["r2"]["method"], lines["r2"]["status"]) == ("GET", 404)


def test_a_prefix_that_a_proxy_leaves_is_taken_off(make_stage: MakeStage) -> None:
    stage = make_stage(root_path="/qwen/")
    for path in ("/qwen/v1/models", "/v1/models", "/qwen/health", "/qwen/v1/models/" + MODEL):
        assert stage.http.get(path).status_code == 200, path
    for path in ("/qwenx/v1/models", "/qwen", "/other/v1/models"):
        assert stage.http.get(path).status_code == 404, path


def test_with_keys_every_path_but_probes_and_metrics_needs_one(make_stage: MakeStage) -> None:
    stage = make_stage(api_keys=("secret", "second"))
    for header in (None, "Bearer wrong", "Basic secret", "Bearer secretx", "secret", "Bearer ü"):
        headers = {} if header is None else {"authorization": header.encode()}
        for answer in (
            stage.http.post(CHAT, json=chat_body(), headers=headers),
            stage.http.get("/v1/models", headers=headers),
            stage.http.get("/v1/nothing", headers=headers),
            stage.http.get("/openapi.json", headers=headers),
            stage.http.get("//metrics", headers=headers),
        ):
            assert answer.status_code == 401, answer.text
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["x-request-id"]
    for path in ("/health", "/ready", "/metrics"):
        assert stage.http.get(path).status_code == 200
    for key in ("secret", "second"):
        headers = {"authorization": f"bearer {key}"}
        assert stage.http.get("/v1/models", headers=headers).status_code == 200
    assert stage.http.get("/v1/models", headers={"x-request-id": "a"}).status_code == 401


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two \n")
    now = [0.0]
    keys = Keys((), str(file), lambda: now[0])
    assert keys.allow(b"Bearer one") and keys.allow(b"Bearer two")
    assert not keys.allow(b"Bearer # ours") and not keys.allow(b"Bearer ")
    file.write_text("three")
    os.utime(file, (5, 5))
    assert keys.allow(b"Bearer one")
    now[0] += 1
    assert not keys.allow(b"Bearer one") and keys.allow(b"Bearer three")
    file.unlink()
    now[0] += 1
    assert keys.allow(b"Bearer three")
    file.write_text("")
    now[0] += 1
    assert keys.required and not keys.allow(b"Bearer three") and not keys.allow(None)


def test_a_key_file_without_a_key_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is let in then, which no condition of an object shows."""
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    now = [0.0]
    keys = Keys((), str(file), lambda: now[0])
    for _ in range(3):
        now[0] += 1
        assert not keys.allow(b"Bearer none")
    assert [m for m in caplog.messages if "nobody" in m] == [
        f"nobody is let in: file={file} holds no key"
    ]


def test_a_key_file_that_cannot_be_read_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--api-keys-file"):
        Keys((), str(tmp_path / "none"), time.monotonic)


def test_a_long_answer_is_clipped_at_the_length_of_the_model(stage: Stage) -> None:
    stage.group.output = "x" * 1000
    answer = stage.chat(max_tokens=5000)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == MAX_MODEL_LEN


# --- clients that want too much -------------------------------------------------------------


def until_closed(sock: socket.socket) -> bytes:
    """What comes until the gateway closes the connection."""
    received = b""
    while piece := sock.recv(1 << 16):
        received += piece
    return received


def head(request: bytes) -> tuple[int, dict[str, Any]]:
    """(Status, the error) of a raw answer."""
    top, _, body = request.partition(b"\r\n\r\n")
    assert b"x-request-id: " in top and b"connection: close" in top.lower()
    return int(top.split()[1]), json.loads(body)["error"]


def test_headers_without_an_end_are_refused(stage: Stage) -> None:
    sock = stage.connect()
    sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 1000)
    sent = 0
    while not select.select([sock], [], [], 0.02)[0]:  # what it has not read would break the answer
        assert sent < 4 * connection.MAX_HEAD_BYTES
        sent += sock.send(b"a" * 4000)
    status, error = head(until_closed(sock))
    assert status == 431 and "64 KiB" in error["message"]
    assert stage.http.get("/health", headers={"x-long": "a" * 60_000}).status_code == 200


def test_what_is_no_http_is_an_error_in_the_same_shape(stage: Stage) -> None:
    sock = stage.connect()
    sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    assert head(until_closed(sock))[0] == 400


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost:"])
def test_a_connection_without_a_whole_head_is_closed_in_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    sock = stage.connect()
    sock.sendall(sent)
    assert until_closed(sock) == b""


def test_a_connection_may_be_used_again_after_a_pause(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    sock = stage.connect()
    for _ in range(2):
        sock.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(20)


def test_a_body_that_does_not_come_is_a_408(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "BODY_SECONDS", 0.2)
    sock = stage.connect()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50\r\n\r\n{"
    )
    assert head(until_closed(sock))[0] == 408


def test_open_requests_may_not_hold_more_than_so_much(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "OPEN_BODIES", 1)
    stage = make_stage(max_body_bytes=3000)
    stage.group.pause_after = 2
    first = raw_post(stage, chat_body(user="x" * 2500))
    soon(lambda: stage.group.runs == 1)
    refused = stage.post(CHAT, chat_body(user="x" * 1000))
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    assert refused.headers["retry-after"]
    first.close()
    soon(lambda: not stage.service.calls)
    stage.group.pause_after = None
    soon(lambda: stage.post(CHAT, chat_body(user="x" * 2500)).status_code == 200)


@pytest.mark.parametrize("pause_after", [None, 100])
def test_a_client_that_never_reads_is_cut_off(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, pause_after: int | None
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.2)
    stage.group.react = lambda message: _in_large_pieces(stage, message)
    stage.group.pause_after = pause_after
    files = open_files(os.getpid())
    sock = raw_post(stage, chat_body(stream=True))
    soon(lambda: stage.group.runs == 1)
    soon(lambda: open_files(os.getpid()) == files + 1)  # this end of the connection
    soon(lambda: not stage.service.calls)
    assert not until_closed(sock).endswith(b"0\r\n\r\n")


def test_a_prompt_that_cannot_fit_never_reaches_a_tokenizer(stage: Stage) -> None:
    longest = len("<unk>")  # of all tokens of this tokenizer
    long = "x" * (MAX_MODEL_LEN * longest)
    half = {"role": "user", "content": long[: len(long) // 2]}
    for path, body, param in (
        (CHAT, chat_body(messages=[half, half], n=128), "messages"),
        ("/v1/completions", {"model": MODEL, "prompt": ["a", long]}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [5] * MAX_MODEL_LEN}, "prompt"),
    ):
        refused = stage.post(path, body)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["code"] == "context_length_exceeded"
        assert error["param"] == param and error["message"].count(str(MAX_MODEL_LEN)) == 2
    assert stage.bus.of(TokenizeMsg) == [] and not stage.service.calls
    assert (
        stage.post("/v1/completions", {"model": MODEL, "prompt": long[:-longest]}).status_code
        == 400
    )
    assert len(stage.bus.of(TokenizeMsg)) == 1


def test_load_balancers_may_ask_by_head(stage: Stage) -> None:
    for path in ("/health", "/ready", "/metrics"):
        answer = stage.http.head(path)
        assert answer.status_code == 200 and answer.content == b""
    assert set(stage.http.post("/health").headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_what_is_missing_is_logged_when_it_changes(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [m for m in caplog.messages if m.startswith(("requests can", "listening"))]

    caplog.set_level("INFO")
    stage = make_stage()
    want = ["requests can be served", f"listening on {stage.url}"]
    soon(lambda: said() == want, said())
    everybody = list(stage.bus.states)
    for role in ("detokenizer", "rank"):
        stage.bus.states = [state for state in stage.bus.states if state.role != role]
        who = "no group of ranks" if role == "rank" else f"no {role}"
        want.append(f"requests cannot be served: {who} is ready")
        soon(lambda: said() == want, want)
    stage.bus.states = everybody
    want.append("requests can be served")
    soon(lambda: said() == want, want)


@pytest.mark.parametrize("listen_when_ready", [False, True])
def test_a_signal_that_came_while_the_gateway_started_ends_it(listen_when_ready: bool) -> None:
    asked = threading.Event()
    asked.set()
    stage = Stage()

    async def serve() -> int:
        served = gateway_main.serve(stage.service, stage._sock, listen_when_ready, asked=asked)
        return await asyncio.wait_for(served, 20)

    assert asyncio.run(serve()) == 0
    stage.close()
