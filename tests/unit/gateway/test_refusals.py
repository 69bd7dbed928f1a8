"""What is refused, and how: always in OpenAI's shape, by the field's name, never with a 500."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.messages import TokenizeMsg
from tests.unit.gateway.scripted import MAX_MODEL_LEN, MODEL, Stage, chat_body

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "A", "max_tokens": 1} | fields


@pytest.fixture(scope="module")
def shared() -> Iterator[Stage]:
    """One gateway for all refusals: they leave nothing behind."""
    stage = Stage().start()
    yield stage
    stage.close()


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1, "stream": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a" * 4000, "b" * 97]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ({"stream": "yes"}, "stream"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"priority": 2**31}, "priority"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [1]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"prediction": {}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"prompt": "x"}, "prompt"),
        ({"model": 5}, "model"),
    ],
)  # fmt: skip
def test_a_bad_field_of_a_chat_is_refused_by_name(
    shared: Stage, fields: dict[str, Any], param: str
) -> None:
    error = error_of(shared.post(CHAT, chat_body(**fields)), 400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param.rpartition(".")[2].partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"messages": []}, "messages"),
        ({"n": 100, "prompt": ["a"] * 20}, "n"),
    ],
)
def test_a_bad_field_of_a_completion_is_refused_by_name(
    shared: Stage, fields: dict[str, Any], param: str
) -> None:
    error = error_of(shared.post(COMPLETIONS, completion_body(**fields)), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"model": MODEL, "prompt": 1}, "prompt"),
        ("/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "a"}],
                       "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [10**6]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"model": MODEL}, "tokens"),
        ("/v1/chat/completions", {"model": MODEL}, "messages"),
        ("/v1/completions", {"prompt": "x"}, "model"),
    ],
)  # fmt: skip
def test_a_missing_or_wrong_field_is_named(
    shared: Stage, path: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(shared.post(path, body), 400)["param"] == param


def test_harmless_values_of_fields_that_do_nothing_here_are_accepted(shared: Stage) -> None:
    body = chat_body(
        max_tokens=1, user="u", metadata={"a": "b"}, store=True, tools=None, tool_choice="none",
        response_format={"type": "text"}, functions=None, logit_bias=None, stop=None, n=None,
        seed=None, stream=False, stream_options=None, service_tier="auto", modalities=["text"],
        logprobs=False, top_logprobs=None, audio=None, temperature=1, reasoning_effort=None,
    )  # fmt: skip
    body["messages"] = [
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None},
    ]
    assert shared.post(CHAT, body).status_code == 200
    body = completion_body(suffix=None, best_of=2, n=2, echo=False, logprobs=None)
    assert shared.post(COMPLETIONS, body).status_code == 200


def test_every_field_that_is_honoured_reaches_the_engine(shared: Stage) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.25, "seed": -3, "presence_penalty": 1.5,
        "frequency_penalty": -1.5, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.25,
        "ignore_eos": True, "priority": -2,
    }  # fmt: skip
    lists = {"stop": ["x", "y"], "stop_token_ids": [5, 6], "logit_bias": {"9": -100}}
    body = chat_body(max_completion_tokens=2, logprobs=True, top_logprobs=4, **fields, **lists)
    assert shared.post(CHAT, body).status_code == 200
    sampling = shared.bus.of(TokenizeMsg)[-1].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.stop == ("x", "y") and sampling.stop_token_ids == (5, 6)
    assert sampling.logit_bias == {9: -100.0}
    assert sampling.max_tokens == 2 and sampling.logprobs == 4


def test_the_model_must_be_the_one_served(shared: Stage) -> None:
    bodies = (
        (CHAT, chat_body()), (COMPLETIONS, completion_body()),
        ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [3]}),
    )  # fmt: skip
    for path, body in bodies:
        error = error_of(shared.post(path, body | {"model": "no-such-model"}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert "no-such-model" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt_is_a_400_with_both_lengths_for_streams_too(
    shared: Stage, stream: bool
) -> None:
    messages = [{"role": "user", "content": "x" * MAX_MODEL_LEN}]
    answer = shared.post(CHAT, chat_body(messages=messages, stream=stream))
    error = error_of(answer, 400)
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"] and str(MAX_MODEL_LEN + 6) in error["message"]
    with pytest.raises(openai.BadRequestError):
        shared.chat(messages=messages, stream=stream)


@pytest.mark.parametrize(
    "raw",
    [b'{"model": "x", "messages": [', b"", b"\xff\xfe", b"[]", b"null", b"7", b'"x"', b"[" * 99999,
     b'{"model": NaN}', b'{"a": 1e999}'],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_a_400(shared: Stage, raw: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        headers = {"content-type": "application/json"}
        error_of(shared.http.post(path, content=raw, headers=headers), 400)


def test_json_of_another_content_type_is_a_400_that_says_so(shared: Stage) -> None:
    answer = shared.http.post(
        CHAT, content=json.dumps(chat_body()), headers={"content-type": "text/plain"}
    )
    assert "Content-Type" in error_of(answer, 400)["message"]


def test_numbers_that_json_does_not_have_are_refused(shared: Stage) -> None:
    for value in ("NaN", "Infinity", "1e999"):
        raw = json.dumps(chat_body(top_p=0.125)).replace("0.125", value)
        answer = shared.http.post(CHAT, content=raw, headers={"content-type": "application/json"})
        assert error_of(answer, 400)["param"] == "top_p"


HALF = "\ud800"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"stop": HALF}, "stop"),
        (CHAT, {"stop": ["a", HALF]}, "stop"),
        (CHAT, {HALF: 1}, r"\ud800"),
        (CHAT, {"messages": [{"role": HALF, "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
         "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": HALF}]}, "messages[0].name"),
        (CHAT, {"messages": [{"role": "user", "content": "a", HALF: 1}]}, r"messages[0].\ud800"),
        (CHAT, {"logit_bias": {HALF: 1}}, "logit_bias"),
        (CHAT, {"model": HALF}, "model"),
        (COMPLETIONS, {"prompt": HALF}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", HALF]}, "prompt"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_refused_by_its_field_and_with_what_to_do(
    shared: Stage, path: str, fields: dict[str, Any], param: str
) -> None:
    body = chat_body(**fields) if path == CHAT else {"model": MODEL, **fields}
    raw, headers = json.dumps(body), {"content-type": "application/json"}
    error = error_of(shared.http.post(path, content=raw, headers=headers), 400)
    assert error["param"] == param
    assert error["message"].startswith(f"{param} holds half of a surrogate pair")
    assert "send the whole pair" in error["message"]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_an_empty_conversation_is_refused_in_plain_words(shared: Stage, path: str) -> None:
    error = error_of(shared.post(path, {"model": MODEL, "messages": []}), 400)
    assert error["param"] == "messages"
    assert error["message"] == "messages must hold at least one item: it is an empty list"


def test_unknown_paths_and_methods_are_errors_in_json(shared: Stage) -> None:
    assert "/v1/nothing" in error_of(shared.http.get("/v1/nothing"), 404)["message"]
    error_of(shared.http.get("/v1/chat/completions/"), 404)
    answer = shared.http.get(CHAT)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_body_too_large_is_a_413_with_and_without_a_length(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(max_body_bytes=1 << 20)
    error = error_of(stage.post(COMPLETIONS, completion_body(prompt="x" * (1 << 20))), 413)
    assert "1048576 bytes" in error["message"] and "--max-body-bytes" in error["message"]
    chunks = iter([b"x" * 4096] * 300)
    headers = {"content-type": "application/json"}
    error_of(stage.http.post(COMPLETIONS, content=chunks, headers=headers), 413)
    assert stage.post(COMPLETIONS, completion_body()).status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_what_the_gateway_encodes_itself_may_have_an_eighth_of_that(
    make_stage: Callable[..., Stage], path: str
) -> None:
    stage = make_stage(max_body_bytes=8 << 10)
    error = error_of(stage.post(path, {"model": MODEL, "prompt": "x" * 1024}), 413)
    assert "1024 bytes, an eighth of 8192" in error["message"]
    assert "--max-body-bytes" in error["message"]
    assert stage.post("/tokenize", {"model": MODEL, "prompt": "x" * 900}).status_code == 200


def test_an_unforeseen_error_is_a_500_in_the_same_shape(
    shared: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.service, "start", None)
    answer = shared.post(CHAT, chat_body())
    error = error_of(answer, 500)
    assert answer.headers["connection"] == "close"
    assert error["type"] == "server_error" and "NoneType" not in error["message"]


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([MODEL, "user", "text", "none", "", 2**31, 2**63, -(2**63) - 1, 10**30])
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "include_usage", "1"]) | st.text(),
        inner, max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip
FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "n", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias",
    "echo", "best_of", "suffix", "tools", "response_format", "user", "metadata", "top_k", "min_p",
    "repetition_penalty", "ignore_eos", "stop_token_ids", "priority", "presence_penalty", "tokens",
    "add_special_tokens", "modalities",
]  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    CHAT: chat_body(max_tokens=1),
    COMPLETIONS: completion_body(),
    "/tokenize": {"model": MODEL, "prompt": "a"},
    "/detokenize": {"model": MODEL, "tokens": [3]},
}


@settings(
    max_examples=300, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(
    path=st.sampled_from(sorted(BASES)),
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=3),
)
def test_no_body_gives_a_500(shared: Stage, path: str, fields: dict[str, Any]) -> None:
    raw = json.dumps(BASES[path] | fields)
    answer = shared.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (raw, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
