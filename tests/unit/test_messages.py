"""Sampling parameters: what is wrong is refused by the field's name."""

from typing import Any

import msgspec
import pytest

from minisgl.messages import (
    Route,
    SamplingParams,
    TokenizeMsg,
    decode,
    decode_state,
    encode,
    pack_ids,
    unpack_ids,
)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": "x"}, {"temperature": True},
        {"top_p": 1.1}, {"top_p": None}, {"top_k": -2}, {"top_k": 1.5}, {"min_p": -1},
        {"max_tokens": 0}, {"max_tokens": "a"}, {"max_tokens": 1.0}, {"seed": 2**63},
        {"seed": 1.5}, {"presence_penalty": 3}, {"frequency_penalty": -3},
        {"repetition_penalty": 0}, {"logprobs": 21}, {"logprobs": True}, {"stop": [""]},
        {"stop": [1]}, {"stop": ["a"] * 17}, {"stop": "x" * 5000}, {"stop_token_ids": ["a"]},
        {"stop_token_ids": [-1]}, {"ignore_eos": 1}, {"priority": 2**31}, {"priority": 0.5},
        {"logit_bias": {-1: 0.0}}, {"logit_bias": {1: 101}}, {"logit_bias": {"1": 0.0}},
        {"logit_bias": {1: "x"}}, {"logit_bias": [1]},
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_of_its_field(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ValueError, match=rf"^{name} must "):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0}, {"temperature": 2}, {"top_p": 0}, {"top_k": 0}, {"min_p": 1},
        {"max_tokens": None}, {"seed": -(2**63)}, {"stop": "a"}, {"stop": ["a", "b"]},
        {"stop": None}, {"stop_token_ids": [1, 2]}, {"logprobs": 0}, {"logit_bias": {1: -100}},
        {"priority": -5},
    ],
)  # fmt: skip
def test_values_at_the_borders_are_taken_and_travel_unchanged(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    message = TokenizeMsg(
        uid=b"u" * 16,
        attempt=1,
        route=Route(gateway="g", boot=2**64 - 1, detokenizer="d"),
        text="x",
        sampling=params,
    )
    assert decode(encode([message])) == [message]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x80", encode([])[:0], b"\x91\x81\xa1t\xa1x"])
def test_what_is_no_batch_of_messages_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


def test_a_message_with_a_wrong_value_is_no_message() -> None:
    raw = [{"t": "tok", "uid": b"u" * 16, "attempt": 1, "sampling": {"temperature": 9.0},
            "route": {"gateway": "g", "boot": 1, "detokenizer": "d"}}]  # fmt: skip
    with pytest.raises(ValueError, match="temperature"):
        decode(msgspec.msgpack.encode(raw))


REPLY = {"t": "reply", "uid": b"u" * 16, "attempt": 1, "boot": 5}
STATE = {"role": "rank", "id": "g0/0", "boot": 2**64 - 1, "beat": 1}
LOAD = {"group": "g0", "incarnation": 7, "max_model_len": 9}


@pytest.mark.parametrize(
    "fields",
    [
        {"uid": b"u" * 15}, {"uid": b"u" * 17}, {"attempt": 2**31}, {"attempt": 0},
        {"attempt": -(2**63)}, {"boot": -1}, {"pos": -1}, {"pos": 2**31}, {"text_at": -1},
        {"cached_tokens": 2**64 - 1}, {"error": {"status": 200, "message": ""}},
        {"source": {"group": "g0", "incarnation": 7, "run": 2**64 - 1}},
    ],
)  # fmt: skip
def test_a_number_that_no_worker_can_hold_makes_no_message(fields: dict[str, Any]) -> None:
    assert len(decode(msgspec.msgpack.encode([REPLY]))) == 1
    with pytest.raises(ValueError, match="Expected"):
        decode(msgspec.msgpack.encode([REPLY | fields]))


@pytest.mark.parametrize("fields", [{"running": -(2**40)}, {"waiting": -1}, {"max_model_len": -1}])
def test_a_load_below_zero_makes_no_state(fields: dict[str, Any]) -> None:
    assert decode_state(msgspec.msgpack.encode(STATE | {"load": LOAD})).load is not None
    with pytest.raises(ValueError, match="Expected"):
        decode_state(msgspec.msgpack.encode(STATE | {"load": LOAD | fields}))


def test_a_field_that_a_newer_version_adds_is_passed_over() -> None:
    raw = [{"t": "abort", "uid": b"u" * 16, "attempt": 1, "run": 3, "later": [1, 2]}]
    (message,) = decode(msgspec.msgpack.encode(raw))
    assert getattr(message, "run", None) == 3


def test_ids_travel_as_int32() -> None:
    assert unpack_ids(pack_ids([1, -1, 2**31 - 1])).tolist() == [1, -1, 2**31 - 1]
    with pytest.raises(ValueError):
        unpack_ids(b"abc")
