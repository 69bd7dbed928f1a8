"""Prompts on their way to a group, and the answers to those that go nowhere."""

import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minisgl.bus import TOK, connect, reply_queue, req_queue
from minisgl.config import WorkerConfig
from minisgl.messages import (
    GroupLoad,
    Route,
    SamplingParams,
    TokenizeMsg,
    UserMsg,
    UserReply,
    WorkerState,
    pack_ids,
    unpack_ids,
)
from minisgl.tokenizer.worker import STATES_SECONDS, TokenizerCore, run_tokenizer
from tests.unit.small_tokenizers import byte_level, word_piece

tokenizer = cache(byte_level)
ROUTE = Route(gateway="gw", boot=5, detokenizer="d0")


def state(group: str = "g0", beat: int = 1, draining: bool = False, **load: Any) -> WorkerState:
    figures: dict[str, Any] = {"incarnation": 7, "max_model_len": 64} | load
    return WorkerState(
        role="rank", id=f"{group}/0", boot=figures["incarnation"], beat=beat, draining=draining,
        load=GroupLoad(group=group, **figures),
    )  # fmt: skip


class Fleet:
    """Published states, a clock, and a tokenizer that reads both."""

    def __init__(self, *states: WorkerState, vocab_size: int = 300) -> None:
        self.states = list(states)
        self.now = 0.0
        self.core = TokenizerCore(
            tokenizer(), vocab_size, lambda: list(self.states), lambda: self.now
        )

    def ask(self, **fields: Any) -> tuple[str, Any]:
        ((queue, message),) = self.core.handle(
            TokenizeMsg(uid=b"u" * 16, attempt=fields.pop("attempt", 1), route=ROUTE, **fields)
        )
        return queue, message

    def refused(self, **fields: Any) -> Any:
        queue, reply = self.ask(**fields)
        assert queue == reply_queue("gw")
        assert (reply.boot, reply.source, reply.error.status) == (5, None, 400)
        return reply.error


def test_a_text_becomes_the_ids_of_a_request_for_the_group() -> None:
    queue, request = Fleet(state()).ask(text="hé", sampling=SamplingParams(seed=3))
    assert queue == req_queue("g0", 7)
    assert unpack_ids(request.prompt_ids).tolist() == tokenizer().encode("hé")
    assert (request.group, request.incarnation, request.sampling.seed) == ("g0", 7, 3)
    assert request.route == ROUTE


def test_messages_go_through_the_template_and_end_where_the_answer_starts() -> None:
    _, request = Fleet(state()).ask(messages=[{"role": "user", "content": "x"}])
    ids = unpack_ids(request.prompt_ids).tolist()
    assert tokenizer().decode(ids, skip_special_tokens=False) == "<s>user:x\nassistant:"


def test_a_replay_brings_its_ids_and_what_was_sent_unchanged() -> None:
    _, request = Fleet(state()).ask(
        prompt_ids=pack_ids([4, 5]), output_ids=pack_ids([6]), sent_chars=1, attempt=2
    )
    assert (request.attempt, request.prompt_ids) == (2, pack_ids([4, 5]))
    assert (request.output_ids, request.sent_chars) == (pack_ids([6]), 1)


def test_a_template_that_raises_is_a_400_with_its_reason() -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    error = Fleet(state()).refused(messages=turns)
    assert error.param == "messages"
    assert "system comes first" in error.message


def test_a_model_without_a_template_says_so() -> None:
    fleet = Fleet(state())
    fleet.core._tokenizer = word_piece()
    assert "no chat template" in fleet.refused(messages=[{"role": "user", "content": "x"}]).message


@pytest.mark.parametrize("bad", [-1, 300, 2**31 - 1])
def test_an_id_beyond_the_vocabulary_is_refused_by_name(bad: int) -> None:
    error = Fleet(state()).refused(prompt_ids=pack_ids([5, bad, 6]))
    assert error.param == "prompt"
    assert str(bad) in error.message and "299" in error.message


def test_a_bias_beyond_the_vocabulary_is_refused_by_name() -> None:
    error = Fleet(state()).refused(text="a", sampling=SamplingParams(logit_bias={300: 1.0}))
    assert error.param == "logit_bias"


@pytest.mark.parametrize("prompt", [{"text": ""}, {"prompt_ids": b""}])
def test_an_empty_prompt_is_refused(prompt: dict[str, Any]) -> None:
    error = Fleet(state()).refused(**prompt)
    assert (error.param, "empty" in error.message) == ("prompt", True)


@pytest.mark.parametrize("prompt", [{}, {"text": "a", "prompt_ids": b""}])
def test_not_exactly_one_prompt_is_refused(prompt: dict[str, Any]) -> None:
    assert "exactly one" in Fleet(state()).refused(**prompt).message


def test_ids_that_are_no_int32_are_refused() -> None:
    assert Fleet(state()).refused(prompt_ids=b"abc").param == "prompt"


def test_a_prompt_as_long_as_the_context_is_refused_with_both_lengths() -> None:
    fleet = Fleet(state(max_model_len=64))
    error = fleet.refused(prompt_ids=pack_ids([5] * 64))
    assert error.code == "context_length_exceeded"
    assert "64 tokens" in error.message and error.param == "prompt"
    assert "70 tokens" in fleet.refused(prompt_ids=pack_ids([5] * 70)).message
    assert isinstance(fleet.ask(prompt_ids=pack_ids([5] * 63))[1], UserMsg)


@pytest.mark.parametrize("states", [[], [state(draining=True)]])
def test_without_a_group_the_request_is_to_be_tried_again(states: list[WorkerState]) -> None:
    queue, reply = Fleet(*states).ask(text="a", output_ids=pack_ids([6]), sent_chars=1)
    assert (queue, reply.again, reply.error) == (reply_queue("gw"), "refused", None)
    assert (reply.pos, reply.text_at) == (1, 1)


def test_a_group_that_has_just_formed_is_found_at_once() -> None:
    fleet = Fleet()
    assert isinstance(fleet.ask(text="a")[1], UserReply)
    fleet.states = [state()]
    assert isinstance(fleet.ask(text="a")[1], UserMsg)


def test_the_group_with_the_fewest_requests_is_chosen() -> None:
    fleet = Fleet(
        state("a", running=2, waiting=1, incarnation=1), state("b", running=2, incarnation=2)
    )
    assert fleet.ask(text="x")[0] == req_queue("b", 2)


def test_a_burst_between_two_beats_spreads_over_the_groups() -> None:
    fleet = Fleet(state("a", incarnation=1), state("b", incarnation=2))
    chosen = [fleet.ask(text="x")[1].group for _ in range(4)]
    assert sorted(chosen) == ["a", "a", "b", "b"]


def test_a_new_beat_counts_what_was_sent_before_it() -> None:
    fleet = Fleet(state("a", incarnation=1, running=1), state("b", incarnation=2))
    assert fleet.ask(text="x")[1].group == "b"
    fleet.states = [state("a", beat=2, incarnation=1, running=1), state("b", beat=2, incarnation=2)]
    fleet.now = STATES_SECONDS
    assert fleet.ask(text="x")[1].group == "b"


# --- the process


@pytest.fixture
def bus_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="b") as folder:
        yield f"ipc://{folder}"


def test_a_process_tokenizes_what_the_gateway_puts_on_the_bus(tmp_path: Path, bus_url: str) -> None:
    folder = tmp_path / "model"
    tokenizer().hf.save_pretrained(folder)
    (folder / "config.json").write_text('{"vocab_size": 300}')
    gateway, rank = connect(bus_url, "local"), connect(bus_url, "local")
    gateway.subscribe(reply_queue("gw"))
    rank.subscribe(req_queue("g0", 7))
    rank.publish_state(state())

    stop, ready, codes = threading.Event(), threading.Event(), []
    config = WorkerConfig(bus=bus_url, id="t0", model=str(folder))
    thread = threading.Thread(
        target=lambda: codes.append(run_tokenizer(config, on_ready=ready.set, stop=stop)),
        daemon=True,
    )
    thread.start()
    assert ready.wait(20)
    assert ("tokenizer", "t0") in [(s.role, s.id) for s in gateway.read_states()]
    ask = TokenizeMsg(uid=b"u" * 16, attempt=1, route=ROUTE, text="ab")
    gateway.send(TOK, [ask, TokenizeMsg(uid=b"v" * 16, attempt=1, route=ROUTE, text="")])
    (entry,) = rank.receive(20)
    (answer,) = gateway.receive(20)
    assert [m.uid for m in entry.messages if isinstance(m, UserMsg)] == [b"u" * 16]
    assert [m.uid for m in answer.messages if isinstance(m, UserReply)] == [b"v" * 16]
    stop.set()
    thread.join(20)
    assert codes == [0]
    gateway.close()
    rank.close()
