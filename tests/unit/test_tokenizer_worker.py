"""Prompts on their way to a group, and the answers to those that go nowhere."""

import math
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.bus import TOK, connect, reply_queue, req_queue
from minisgl.config import ProbedConfig
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
from minisgl.tokenizer.worker import STATES_SECONDS, TokenizerCore, choose_group, run_tokenizer
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


def test_the_choices_of_one_request_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, own = Fleet(state()), tokenizer()
    texts: list[str] = []
    encode = own.encode

    def watched(text: str, special: bool = True) -> list[int]:
        texts.append(text)
        return encode(text, special)

    monkeypatch.setattr(own, "encode", watched)
    asked = ["hé", "hé", "hé", "x", "hé"]
    got = [unpack_ids(fleet.ask(text=text)[1].prompt_ids).tolist() for text in asked]
    assert got == [encode(text) for text in asked]
    assert texts == ["hé", "x", "hé"]


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


# --- the choice of a group


def load(group: str, running: int, waiting: int = 0) -> GroupLoad:
    return GroupLoad(group=group, incarnation=1, max_model_len=64, running=running, waiting=waiting)


@pytest.mark.parametrize(
    ("loads", "cached", "chosen"),
    [
        ([], {}, None),
        ([("a", 0)], {}, "a"),
        ([("a", 1000)], {"a": 64}, "a"),
        # Nobody knows the prompt: the least load, then the name.
        ([("a", 2), ("b", 1), ("c", 3)], {}, "b"),
        ([("b", 1), ("a", 1)], {"a": 0, "b": 0}, "a"),
        # The longest prefix goes first, even to an idle service's busiest group.
        ([("a", 0), ("b", 1)], {"b": 64}, "b"),
        ([("a", 10), ("b", 10), ("c", 10)], {"a": 64, "b": 192, "c": 128}, "b"),
        ([("b", 3), ("a", 3)], {"a": 64, "b": 64}, "a"),
        # Limit of 9 + 1 requests on two groups: ceil(6.25) = 7.
        ([("a", 6), ("b", 3)], {"a": 64}, "a"),
        ([("a", 7), ("b", 2)], {"a": 64}, "b"),
        # The best is overloaded: the next best that is not.
        ([("a", 20), ("b", 10), ("c", 9)], {"a": 640, "b": 64}, "b"),
        # A group that left is no candidate, whatever it had.
        ([("a", 5)], {"gone": 6400}, "a"),
    ],
)
def test_the_group_that_knows_most_is_chosen_unless_it_is_overloaded(
    loads: list[tuple[str, int]], cached: dict[str, int], chosen: str | None
) -> None:
    group = choose_group([load(name, running) for name, running in loads], cached)
    assert (group and group.group) == chosen


def test_waiting_requests_count_like_running_ones() -> None:
    assert choose_group([load("a", 1, 6), load("b", 2)], {"a": 64}) == load("b", 2)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.lists(st.integers(0, 7), max_size=300),
    st.integers(0, 7),
)
def test_no_group_is_overloaded_though_all_prompts_share_one_prefix(
    running: list[int], ends: list[int], popular: int
) -> None:
    """Requests come, and after each of them one may end anywhere."""
    cached = {f"g{popular % len(running)}": 640}
    for end in [*ends, *range(8)]:
        loads = [load(f"g{i}", n) for i, n in enumerate(running)]
        chosen = choose_group(loads, cached)
        assert chosen is not None
        at = int(chosen.group[1:])
        running[at] += 1
        assert running[at] <= math.ceil(1.25 * sum(running) / len(running))
        running[end % len(running)] = max(0, running[end % len(running)] - 1)


def test_a_popular_prefix_keeps_to_its_group_as_long_as_that_is_not_overloaded() -> None:
    running = [0, 0, 0, 0]
    for _ in range(400):
        chosen = choose_group([load(f"g{i}", n) for i, n in enumerate(running)], {"g2": 64})
        assert chosen is not None
        running[int(chosen.group[1:])] += 1
    assert running[2] == 125 and min(running) >= 91


def test_a_group_whose_state_stands_still_is_chosen_no_more() -> None:
    fleet = Fleet(state("a", incarnation=1), state("b", incarnation=2, running=50))
    fleet.core = TokenizerCore(
        tokenizer(), 300, lambda: fleet.states, lambda: fleet.now, silence=4.0
    )

    def turn(*beating: int) -> str:
        """A second passes; then who gets a request."""
        fleet.now += 1
        for i in beating:
            fleet.states[i].beat += 1
        fleet.core.tick()
        _, message = fleet.ask(text="x")
        return message.group if isinstance(message, UserMsg) else message.again

    assert [turn(0, 1) for _ in range(3)] == ["a"] * 3
    assert [turn(1) for _ in range(5)] == ["a", "a", "a", "b", "b"]
    assert [turn() for _ in range(5)][-1] == "refused"
    fleet.now += 10  # its own pause: nobody is silent for that
    assert turn() == "a"


def known_prefixes(fleet: Fleet, cached: dict[str, int]) -> list[tuple[list[str], list[int]]]:
    asked: list[tuple[list[str], list[int]]] = []

    def look_up(groups: Sequence[str], ids: Sequence[int]) -> dict[str, int]:
        asked.append((list(groups), list(ids)))
        return cached

    fleet.core = TokenizerCore(
        tokenizer(), 300, lambda: fleet.states, lambda: fleet.now, cached=look_up
    )
    return asked


def test_with_two_groups_the_one_that_knows_the_prompt_gets_it() -> None:
    fleet = Fleet(state("a", incarnation=1), state("b", incarnation=2))
    asked = known_prefixes(fleet, {"a": 0, "b": 64})
    assert fleet.ask(prompt_ids=pack_ids([4, 5]))[0] == req_queue("b", 2)
    assert asked == [(["a", "b"], [4, 5])]


def test_what_was_sent_just_now_counts_against_a_popular_group() -> None:
    fleet = Fleet(state("a", incarnation=1), state("b", incarnation=2))
    known_prefixes(fleet, {"b": 64})
    chosen = [fleet.ask(text="x")[1].group for _ in range(8)]
    assert (chosen[0], chosen.count("b")) == ("b", 5)


@pytest.mark.parametrize("states", [[], [state()], [state(), state("b", draining=True)]])
def test_where_there_is_no_choice_nothing_is_looked_up(states: list[WorkerState]) -> None:
    fleet = Fleet(*states)
    asked = known_prefixes(fleet, {})
    fleet.ask(text="x")
    assert asked == []


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
    config = ProbedConfig(bus=bus_url, id="t0", model=str(folder))
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
