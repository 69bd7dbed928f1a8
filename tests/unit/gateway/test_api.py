"""The API through the official client, with a scripted group."""

import json
import re

import openai
import pytest

from minisgl.gateway import sse
from minisgl.messages import AbortMsg, TokenizeMsg
from tests.support import metrics, wait_until
from tests.unit.gateway.scripted import MODEL, OUTPUT, TOKENIZER, Stage, chat_body


def test_a_chat_answer_has_the_whole_shape(stage: Stage) -> None:
    stage.group.cached_tokens = 3
    answer = stage.chat(max_tokens=7)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == MODEL
    assert choice.message.role == "assistant" and choice.index == 0
    assert choice.message.content == "Grüße" and choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len("[user]Rivers?")
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_an_answer_that_ends_by_itself_says_stop_and_counts_the_end_token(stage: Stage) -> None:
    answer = stage.chat()
    assert answer.choices[0].message.content == OUTPUT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(OUTPUT.encode()) + 1


def test_a_stream_gives_the_same_text_a_chunk_a_token(stage: Stage) -> None:
    chunks = list(stage.chat(stream=True, max_tokens=60))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == stage.chat(max_tokens=60).choices[0].message.content
    assert len(chunks) > 40
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "length"]
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    assert all(c.usage is None for c in chunks)


def test_usage_ends_a_stream_that_asks_for_it(stage: Stage) -> None:
    chunks = list(stage.chat(stream=True, max_tokens=6, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6
    assert all(c.usage is None and c.choices for c in chunks[:-1])


def test_a_stream_is_framed_as_events_and_not_buffered(stage: Stage) -> None:
    body = chat_body(stream=True, max_tokens=3)
    with stage.http.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-request-id": "check 7/ü".encode()}
    ) as answer:
        raw = "".join(answer.iter_text())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert dict(answer.headers.raw)[b"x-request-id"] == "check 7/ü".encode()
    events = raw.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(e.removeprefix("data: ")) for e in events[:-2])


def test_keep_alives_come_before_the_first_token(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)
    stage.group.pause_after = -1
    with stage.http.stream(
        "POST", "/v1/chat/completions", json=chat_body(stream=True, max_tokens=2)
    ) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200
        assert next(lines) == ": keep-alive"
        stage.group.go_on()
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest[-1] == "data: [DONE]" and len(rest) > 3


def test_several_choices_use_following_seeds_and_count_the_prompt_once(stage: Stage) -> None:
    answer = stage.chat(n=3, seed=5, max_tokens=4)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [m.sampling.seed for m in stage.bus.of(TokenizeMsg)] == [5, 6, 7]
    assert len({m.uid for m in stage.bus.of(TokenizeMsg)}) == 3
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len("[user]Rivers?")
    chunks = list(stage.chat(n=2, max_tokens=4, stream=True))
    assert {c.choices[0].index for c in chunks} == {0, 1}


def test_without_a_seed_each_request_gets_its_own(stage: Stage) -> None:
    stage.chat(max_tokens=1)
    stage.chat(max_tokens=1)
    first, second = (m.sampling.seed for m in stage.bus.of(TokenizeMsg))
    assert first is not None and first != second


def test_completions_take_texts_lists_and_ids(stage: Stage) -> None:
    create = stage.client.completions.create
    one = create(model=MODEL, prompt="A", max_tokens=4)
    assert one.object == "text_completion" and one.choices[0].text == "Grü"
    many = create(model=MODEL, prompt=["A", "BC"], max_tokens=4, n=2)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert many.usage.prompt_tokens == 3
    ids = TOKENIZER.encode("A")
    assert create(model=MODEL, prompt=ids, max_tokens=4).usage.prompt_tokens == 1
    assert len(create(model=MODEL, prompt=[ids, ids], max_tokens=4).choices) == 2
    default = create(model=MODEL, prompt="A")
    assert default.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_comes_before_the_output(stage: Stage, stream: bool) -> None:
    prompt = ["The Rhine", TOKENIZER.encode("Volga 世")]
    for given, text in zip(prompt, ("The Rhine", "Volga 世"), strict=True):
        answer = stage.client.completions.create(
            model=MODEL, prompt=given, max_tokens=4, echo=True, stream=stream
        )
        parts = answer if stream else [answer]
        assert "".join(part.choices[0].text for part in parts) == text + "Grü"


def test_chat_logprobs_join_to_the_text(stage: Stage) -> None:
    choice = stage.chat(logprobs=True, top_logprobs=2).choices[0]
    rows = choice.logprobs.content
    assert b"".join(bytes(r.bytes) for r in rows).decode() == choice.message.content == OUTPUT
    assert rows[0].token == "G" and rows[2].token == "bytes:\\xc3"
    assert [t.logprob for t in rows[0].top_logprobs] == [-0.25, -1.25]
    assert rows[0].top_logprobs[0].token == "G"
    chunks = list(stage.chat(logprobs=True, top_logprobs=2, stream=True))
    flat = [x for c in chunks if c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert flat == rows


@pytest.mark.parametrize("stop", ["Nile", "世", ", the", "🙂"])
def test_logprobs_end_where_a_stop_string_cuts_the_text(stage: Stage, stop: str) -> None:
    want = OUTPUT[: OUTPUT.index(stop)]
    choice = stage.chat(logprobs=True, stop=stop).choices[0]
    assert choice.message.content == want and choice.finish_reason == "stop"
    assert b"".join(bytes(r.bytes) for r in choice.logprobs.content).decode() == want
    chunks = list(stage.chat(logprobs=True, stop=stop, stream=True))
    flat = [x for c in chunks if c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert flat == choice.logprobs.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want


def test_a_run_that_a_stop_string_ended_is_aborted(stage: Stage) -> None:
    stage.chat(stop="Nile")
    wait_until(lambda: len(stage.bus.of(AbortMsg)) == 1, 5, lambda: str(stage.bus.sent))


def test_completion_logprobs_have_offsets_and_the_chosen_token(stage: Stage) -> None:
    logprobs = (
        stage.client.completions.create(model=MODEL, prompt="A", max_tokens=4, logprobs=2)
        .choices[0]
        .logprobs
    )
    assert logprobs.tokens == ["G", "r", "bytes:\\xc3", "bytes:\\xbc"]
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs[0]["G"] == -0.25 and len(logprobs.top_logprobs[0]) == 2
    none = stage.client.completions.create(model=MODEL, prompt="A", max_tokens=1, logprobs=0)
    assert none.choices[0].logprobs.top_logprobs == [{"G": -0.25}]


def test_text_parts_are_one_text_and_a_developer_speaks_as_the_system(stage: Stage) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    stage.chat(
        messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}],
        max_tokens=1,
    )
    assert stage.bus.of(TokenizeMsg)[0].messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "one\ntwo"},
    ]


def test_models_are_listed_with_their_length(stage: Stage) -> None:
    assert [m.id for m in stage.client.models.list()] == [MODEL]
    assert stage.client.models.retrieve(MODEL).model_dump()["max_model_len"] == 400
    with pytest.raises(openai.NotFoundError) as error:
        stage.client.models.retrieve("other")
    assert error.value.code == "model_not_found" and error.value.param == "model"


def test_tokens_go_round(stage: Stage) -> None:
    answer = stage.post("/tokenize", {"model": MODEL, "prompt": OUTPUT}).json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 400
    back = stage.post("/detokenize", {"model": MODEL, "tokens": answer["tokens"]}).json()
    assert back == {"prompt": OUTPUT}
    messages = [{"role": "user", "content": "x"}]
    chat = stage.post("/tokenize", {"model": MODEL, "messages": messages}).json()
    assert chat["count"] == len("[user]x")
    named = stage.post("/detokenize", {"model": MODEL, "tokens": [1]}).json()
    assert named == {"prompt": "</s>"}


def test_metrics_exist_from_the_start_and_count_a_request_once(stage: Stage) -> None:
    before = metrics(stage.url)
    for name in (
        "requests_running", "requests_waiting", "kv_pages_total", "kv_pages_free",
        "kv_pages_evictable", "prompt_tokens_total", "generation_tokens_total",
        "cached_tokens_total", "device_busy_seconds_total", "request_replays_total",
        "bus_errors_total", "step_seconds_count", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "request_duration_seconds_count",
    ):  # fmt: skip
        assert f"minisgl_{name}" in before, name
    assert before["minisgl_prompt_tokens_total"] == 0
    assert not [name for name in before if name.endswith("_created")]
    assert before["minisgl_kv_pages_total"] == 64 and before["minisgl_step_seconds_count"] == 3
    stage.group.cached_tokens = 2
    stage.chat(n=2, max_tokens=5)
    after = metrics(stage.url)
    assert after["minisgl_prompt_tokens_total"] == len("[user]Rivers?")
    assert after["minisgl_cached_tokens_total"] == 2
    assert after["minisgl_generation_tokens_total"] == 10
    for name in ("time_to_first_token", "inter_token_latency", "request_duration"):
        assert after[f"minisgl_{name}_seconds_count"] == 1, name
    text = stage.http.get("/metrics").text
    assert re.search(r'^minisgl_kv_pages_free\{group="g0"\} 60\.0$', text, re.M)
    assert 'minisgl_step_seconds_bucket{group="g0",le="0.5"} 3.0' in text


def test_what_is_found_wrong_with_a_request_later_is_no_error_of_the_service(
    stage: Stage,
) -> None:
    def ended() -> dict[str, float]:
        text = stage.http.get("/metrics").text
        found = re.findall(r'^minisgl_requests_total\{outcome="(.*)"\} (.*)$', text, re.M)
        return {outcome: float(count) for outcome, count in found}

    none = dict.fromkeys(("stop", "length", "error", "cancelled"), 0.0)
    body = chat_body(messages=[{"role": "user", "content": "y" * 395}])
    assert stage.post("/v1/chat/completions", body).status_code == 400
    assert stage.bus.of(TokenizeMsg), "the gateway itself was to let it pass"
    stage.chat(max_tokens=1)
    wait_until(lambda: ended() == none | {"length": 1.0}, 10, lambda: str(ended()))
    assert metrics(stage.url)["minisgl_request_duration_seconds_count"] == 1


def test_metrics_show_what_each_worker_could_not_read(stage: Stage) -> None:
    rank, tokenizer, _ = stage.bus.states
    rank.bus_errors, tokenizer.bus_errors = 2, 5

    def shown() -> list[tuple[str, ...]]:
        text = stage.http.get("/metrics").text
        return re.findall(r'^minisgl_bus_errors_total\{id="(.*)",role="(.*)"\} (.*)$', text, re.M)

    wait_until(
        lambda: shown() == [
            ("gw", "gateway", "0.0"), ("d0", "detokenizer", "0.0"), ("g0/0", "rank", "2.0"),
            ("t0", "tokenizer", "5.0"),
        ],
        10,
        lambda: str(shown()),
    )  # fmt: skip
