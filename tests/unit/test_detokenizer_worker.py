"""What gateways hear of a computation, whatever order, loss or repetition its messages meet."""

import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.bus import connect, detok_queue, reply_queue
from minisgl.config import ProbedConfig
from minisgl.detokenizer.worker import SILENT_AUDITS_SECONDS, DetokenizerCore, run_detokenizer
from minisgl.messages import (
    AuditMsg,
    DetokenizeBatch,
    DetokenizeMsg,
    Opening,
    Route,
    Source,
    TokenLogprobs,
    UserReply,
    WorkerState,
    decode,
    encode,
    pack_ids,
    unpack_ids,
)
from tests.unit.small_tokenizers import byte_level

tokenizer = cache(byte_level)
UID = b"u" * 16
SOURCE = Source(group="g0", incarnation=7, run=1)
ROUTE = Route(gateway="gw", boot=5, detokenizer="d0")
EOS = 2


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def core(clock: Any = None) -> DetokenizerCore:
    return DetokenizerCore(tokenizer(), 30.0, clock or Clock())


def text_ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def message(pos: int = 0, ids: list[int] | None = None, **fields: Any) -> DetokenizeMsg:
    return DetokenizeMsg(
        uid=fields.pop("uid", UID), attempt=fields.pop("attempt", 1),
        route=fields.pop("route", ROUTE), source=fields.pop("source", SOURCE),
        pos=pos, ids=pack_ids(ids or []), **fields,
    )  # fmt: skip


def opening(output: list[int] | None = None, **fields: Any) -> DetokenizeMsg:
    output = output or []
    given = Opening(prompt_ids=pack_ids([9, 8]), output_ids=pack_ids(output), **fields)
    return message(len(output), opening=given)


def step(rows: list[tuple[bytes, int, int, int, int, int]], **fields: Any) -> DetokenizeBatch:
    """Rows of (uid, attempt, run, pos, gateway, id)."""

    def column(i: int, kind: str) -> bytes:
        return np.array([r[i] for r in rows], kind).tobytes()

    return DetokenizeBatch(
        group="g0", incarnation=7, detokenizer="d0",
        gateways=fields.pop("gateways", [("gw", 5)]), uid=b"".join(r[0] for r in rows),
        attempt=column(1, "<i4"), run=column(2, "<i8"), pos=column(3, "<i4"),
        gateway=column(4, "<i4"), ids=b"" if fields.get("audit") else column(5, "<i4"), **fields,
    )  # fmt: skip


def replies(worker: DetokenizerCore, *messages: Any) -> list[UserReply]:
    """What follows, all of it to one gateway; over the wire, as a process would see it."""
    out = [a for m in messages for a in worker.handle(decode(encode([m]))[0])]
    assert {queue for queue, _ in out} <= {reply_queue("gw")}
    assert all(isinstance(m, UserReply) for _, m in out)
    return [m for _, m in out if isinstance(m, UserReply)]


def test_the_first_reply_brings_the_prompt_and_its_cached_tokens() -> None:
    worker = core()
    first, second = replies(worker, opening(cached_tokens=3), message(0, text_ids("h")))
    assert (first.prompt_ids, first.cached_tokens) == (pack_ids([9, 8]), 3)
    assert (first.source, first.boot, first.ids, first.text) == (SOURCE, 5, b"", "")
    assert (second.prompt_ids, second.cached_tokens, second.text) == (None, 0, "h")


def test_an_opening_may_bring_tokens_and_the_end_in_one_message() -> None:
    msg = opening()
    msg.ids, msg.finish = pack_ids(text_ids("hi")), "length"
    (only,) = replies(core(), msg)
    assert (only.text, only.finish, only.prompt_ids) == ("hi", "length", pack_ids([9, 8]))


def test_a_reply_has_its_ids_also_before_they_have_text() -> None:
    worker = core()
    a, b = tokenizer().hf.convert_tokens_to_ids(["Ã", "©"])
    _, first, second = replies(worker, opening(), message(0, [a]), message(1, [b]))
    assert (first.ids, first.text, first.text_at) == (pack_ids([a]), "", 0)
    assert (second.ids, second.text, second.pos, second.text_at) == (pack_ids([b]), "é", 1, 0)


def test_rows_of_a_step_go_on_with_their_own_computations() -> None:
    worker = core()
    other = b"o" * 16
    second = message(0, opening=Opening(prompt_ids=b""), uid=other,
                     source=Source(group="g0", incarnation=7, run=2))  # fmt: skip
    x, y = text_ids("xy")
    batch = step([(UID, 1, 1, 0, 0, x), (other, 1, 2, 0, 0, y)], others=[opening(), second])
    got = replies(worker, batch)
    assert [(r.uid, r.text) for r in got] == [(UID, ""), (other, ""), (UID, "x"), (other, "y")]


def test_each_gateway_gets_its_own_replies() -> None:
    worker = core()
    route = Route(gateway="other", boot=6, detokenizer="d0")
    worker.handle(opening())
    out = worker.handle(message(0, text_ids("a"), route=route, opening=Opening(prompt_ids=b""),
                                uid=b"o" * 16))  # fmt: skip
    assert [(queue, getattr(m, "boot", None)) for queue, m in out] == [(reply_queue("other"), 6)]


def test_the_eos_is_among_the_ids_and_not_in_the_text() -> None:
    _, last = replies(
        core(), opening(), message(0, [*text_ids("hi"), *text_ids("!")], finish="stop")
    )
    assert (last.text, last.finish) == ("hi", "stop")
    assert unpack_ids(last.ids).tolist() == text_ids("hi!")


def test_incomplete_bytes_are_flushed_at_the_end() -> None:
    lead = tokenizer().hf.convert_tokens_to_ids("ð")
    _, first, last = replies(
        core(), opening(), message(0, [lead]), message(1, [EOS], finish="stop")
    )
    assert (first.text, last.text) == ("", "\ufffd")


def test_a_stop_string_ends_the_reply_and_later_tokens_are_ignored_quietly() -> None:
    worker = core()
    _, *parts = replies(worker, opening(stop=("B C",)), *(
        message(i, [t]) for i, t in enumerate(text_ids("A B C D"))
    ))  # fmt: skip
    assert "".join(r.text for r in parts) == "A "
    assert [r.finish for r in parts] == [None] * 4 + ["stop"]
    assert not worker.busy()
    assert replies(worker, step([(UID, 1, 1, 6, 0, 5)]), message(7, [5], finish="length")) == []


def test_ids_and_logprobs_end_with_the_token_that_completes_a_stop_string() -> None:
    worker = core()
    logprobs = [TokenLogprobs(logprob=-float(i)) for i in range(3)]
    _, last = replies(
        worker,
        opening(stop=(".",)),
        message(0, text_ids("a.b"), logprobs=logprobs, finish="length"),
    )
    assert unpack_ids(last.ids).tolist() == text_ids("a.")
    assert [x.logprob for x in last.logprobs or []] == [0.0, -1.0]
    assert (last.text, last.finish) == ("a", "stop")


def test_a_stop_string_that_does_not_come_is_released_at_the_end() -> None:
    _, first, last = replies(
        core(),
        opening(stop=("<end>",)),
        message(0, text_ids("x<en")),
        message(4, [EOS], finish="stop"),
    )
    assert (first.text, last.text, last.text_at, last.finish) == ("x", "<en", 1, "stop")


def test_an_opening_met_again_is_ignored() -> None:
    worker = core()
    replies(worker, opening(), message(0, text_ids("a")))
    assert replies(worker, opening()) == []
    assert [r.text for r in replies(worker, message(1, text_ids("b")))] == ["b"]


def test_a_token_met_again_is_ignored() -> None:
    worker = core()
    replies(worker, opening(), message(0, text_ids("a")))
    assert replies(worker, message(0, text_ids("a"))) == []


def test_an_unknown_computation_is_lost_once() -> None:
    worker = core()
    got = replies(
        worker, step([(UID, 1, 1, 4, 0, 9)]), step([(UID, 1, 1, 5, 0, 9)]), message(6, [9])
    )
    assert [(r.again, r.source, r.boot) for r in got] == [("lost", SOURCE, 5)]


def test_a_gap_loses_the_computation_once() -> None:
    worker = core()
    _, lost = replies(worker, opening(), message(1, [9]), message(2, [9]), opening())
    assert (lost.again, lost.source) == ("lost", SOURCE)
    assert not worker.busy()


def test_unreadable_ids_lose_only_their_own_computation() -> None:
    worker = core()
    replies(worker, opening())
    bad = message(0, [9], uid=b"o" * 16, opening=Opening(prompt_ids=b"", output_ids=b"abc"))
    assert [(r.uid, r.again) for r in replies(worker, bad)] == [(b"o" * 16, "lost")]
    assert [r.text for r in replies(worker, message(0, text_ids("a")))] == ["a"]


def test_two_attempts_of_one_request_do_not_mix() -> None:
    worker = core()
    replies(worker, opening())
    second = Source(group="g1", incarnation=8, run=1)
    msg = message(0, text_ids("b"), attempt=2, source=second, opening=Opening(prompt_ids=b""))
    assert [(r.attempt, r.text) for r in replies(worker, msg)] == [(2, "b")]
    assert [(r.attempt, r.text) for r in replies(worker, message(0, text_ids("a")))] == [(1, "a")]


def test_a_replayed_request_goes_on_after_what_was_sent() -> None:
    worker = core()
    ids = text_ids("say <en")
    first, then = replies(
        worker, opening(ids, sent_chars=4, stop=("<end>",)), message(len(ids), text_ids("try"))
    )
    assert (first.pos, first.text_at, first.text) == (7, 4, "")
    assert (then.pos, then.text_at, then.text) == (7, 4, "<entry")


def test_a_replayed_output_that_was_complete_hides_its_eos() -> None:
    ids = [*text_ids("hi"), *text_ids("!")]  # "!" stands for a stop id, which has a text of its own
    _, last = replies(core(), opening(ids, sent_chars=1), message(3, [], finish="stop"))
    assert (last.text, last.text_at, last.finish, last.ids) == ("i", 1, "stop", b"")


def test_a_finish_without_any_token_is_passed_on() -> None:
    _, last = replies(core(), opening(), message(0, [], finish="stop"))
    assert (last.text, last.finish) == ("", "stop")


def test_an_audit_follows_the_replies_and_names_each_gateway_also_without_requests() -> None:
    worker = core()
    worker.handle(opening())
    batch = step(
        [(UID, 1, 1, 1, 0, 0)], audit=True, gateways=[("gw", 5), ("idle", 6)],
        others=[message(0, text_ids("a"))],
    )  # fmt: skip
    out = worker.handle(batch)
    assert [queue for queue, _ in out] == [
        reply_queue("gw"),
        reply_queue("gw"),
        reply_queue("idle"),
    ]
    reply, audit, empty = (m for _, m in out)
    assert isinstance(reply, UserReply) and reply.text == "a"
    assert audit == AuditMsg(
        boot=5, group="g0", incarnation=7, detokenizer="d0", held=[(UID, 1, 1, 1)]
    )
    assert isinstance(empty, AuditMsg) and (empty.boot, empty.held) == (6, [])


def test_a_waiting_request_in_an_audit_is_not_called_lost() -> None:
    out = core().handle(step([(UID, 1, 1, 0, 0, 0)], audit=True))
    assert [type(m) for _, m in out] == [AuditMsg]


def test_what_an_audit_of_its_source_leaves_out_was_aborted_and_goes() -> None:
    worker = core()
    worker.handle(opening())
    other = step([], audit=True)
    other.incarnation = 99
    worker.handle(other)
    assert worker.busy(), "another incarnation knows nothing of it"
    worker.handle(step([], audit=True))
    assert not worker.busy()


def test_what_is_silent_for_two_heartbeats_goes_and_what_an_audit_lists_stays() -> None:
    clock = Clock()
    worker = core(clock)
    worker.handle(opening())
    other = step([], audit=True)
    other.incarnation = 99
    for clock.now in range(1, 112):
        worker.handle(step([(UID, 1, 1, 0, 0, 0)], audit=True) if clock.now == 50 else other)
        worker.tick()
        assert worker.busy() == (clock.now < 111)


def test_while_nobody_is_heard_nothing_is_silent() -> None:
    clock = Clock()
    worker = core(clock)
    worker.handle(opening())
    for clock.now in range(1, 200):
        worker.tick()
    ((_, reply),) = worker.handle(step([(UID, 1, 1, 0, 0, 65)]))
    assert isinstance(reply, UserReply) and reply.again is None
    worker.tick()
    assert worker.busy()


def test_columns_that_do_not_fit_are_refused_whole() -> None:
    batch = step([(UID, 1, 1, 0, 0, 1)])
    batch.pos = b""
    with pytest.raises(ValueError, match="differ in length"):
        core().handle(batch)


def test_columns_that_do_not_fit_change_no_state() -> None:
    worker = core()
    batch = step([(UID, 1, 1, 0, 0, 1)], others=[opening()])
    batch.pos = b""
    with pytest.raises(ValueError, match="differ in length"):
        worker.handle(batch)
    assert not worker.busy()


@pytest.mark.parametrize("row", [(-1, 1, 0), (0, 1, 0), (1, -1, 0), (1, 2**63 - 1, 0), (1, 1, -1)])
@pytest.mark.parametrize("audit", [False, True])
def test_a_row_that_no_reply_can_carry_spoils_no_reply_of_others(
    row: tuple[int, int, int], audit: bool
) -> None:
    batch = step([(UID, *row, 0, 1), (b"v" * 16, 1, 1, 0, 0, 1)], audit=audit)
    with pytest.raises(ValueError, match="attempt, run or place"):
        core().handle(batch)


@pytest.mark.parametrize("fields", [{"stop": ("", "x")}, {"sent_chars": 99}])
def test_an_opening_with_odd_values_stops_no_worker(fields: dict[str, Any]) -> None:
    _, last = replies(core(), opening(**fields), message(0, text_ids("a"), finish="length"))
    assert (last.finish, last.text) == ("length", "" if fields.get("sent_chars", 0) > 0 else "a")


def test_leaving_hands_all_back_when_a_peer_is_there() -> None:
    worker = core()
    replies(worker, opening(), message(0, text_ids("ab")))
    ((queue, reply),) = worker.leave(peer=True) or []
    assert queue == reply_queue("gw") and isinstance(reply, UserReply)
    assert (reply.again, reply.pos, reply.source) == ("handback", 2, SOURCE)
    assert not worker.busy()


def test_without_a_peer_it_leaves_only_when_no_rank_computes_any_more() -> None:
    clock = Clock()
    worker = core(clock)
    worker.handle(opening())
    assert worker.leave(peer=False) is None
    clock.now = SILENT_AUDITS_SECONDS + 1
    assert [m.again for _, m in worker.leave(peer=False) or [] if isinstance(m, UserReply)] == [
        "handback"
    ]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(3, 270), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    repeats=st.sets(st.integers(0, 8)),
    finish=st.sampled_from(["stop", "length"]),
)
def test_replies_join_to_the_ids_and_the_text_of_the_output(
    ids: list[int], cuts: list[int], repeats: set[int], finish: Any
) -> None:
    worker = core()
    worker.handle(opening())
    places = sorted({min(c, len(ids) - 1) for c in cuts} | {0})
    ends = [*places[1:], len(ids)]
    sent = []
    for i, (a, b) in enumerate(zip(places, ends, strict=True)):
        msg = message(a, ids[a:b], finish=finish if b == len(ids) else None)
        sent += [msg, msg] if i in repeats else [msg]
    got = replies(worker, *sent)
    visible = ids[:-1] if finish == "stop" else ids
    assert "".join(r.text for r in got) == tokenizer().decode(visible)
    assert [i for r in got for i in unpack_ids(r.ids).tolist()] == ids
    assert [r.text_at for r in got] == [
        len("".join(r.text for r in got[:i])) for i in range(len(got))
    ]
    assert [r.finish for r in got] == [None] * (len(got) - 1) + [finish]


# --- the process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tokenizer().hf.save_pretrained(folder)
    (folder / "config.json").write_text('{"vocab_size": 300}')
    return folder


@pytest.fixture
def bus_url() -> Any:
    with tempfile.TemporaryDirectory(prefix="b") as folder:
        yield f"ipc://{folder}"


def start(
    config: ProbedConfig, **options: Any
) -> tuple[threading.Event, threading.Thread, list[int]]:
    """A worker in a thread, ready; its exit code comes into the list."""
    stop, ready, codes = threading.Event(), threading.Event(), []
    thread = threading.Thread(
        target=lambda: codes.append(
            run_detokenizer(config, on_ready=ready.set, stop=stop, **options)
        ),
        daemon=True,
    )
    thread.start()
    assert ready.wait(20)
    return stop, thread, codes


def collect(bus: Any, count: int) -> list[list[Any]]:
    """Entries, each a list of messages, until they hold `count` messages."""
    entries: list[list[Any]] = []
    for _ in range(100):
        entries += [e.messages for e in bus.receive(0.2)]
        if sum(map(len, entries)) >= count:
            break
    return entries


GATEWAY = WorkerState(role="gateway", id="gw", boot=5, beat=1)
"""Of the requests of these tests."""


def test_a_process_answers_on_the_bus_shows_itself_and_ends_when_its_work_is_done(
    model: Path, bus_url: str
) -> None:
    config = ProbedConfig(bus=bus_url, id="d0", model=str(model), drain_seconds=30)
    stop, thread, codes = start(config, tokenizes=True)
    bus = connect(bus_url, "local")
    bus.subscribe(reply_queue("gw"))
    assert [(s.role, s.id) for s in bus.read_states()] == [
        ("detokenizer", "d0"),
        ("tokenizer", "d0"),
    ]
    bus.publish_state(GATEWAY)
    bus.send(detok_queue("d0"), [step([], others=[opening(), message(0, text_ids("a"))])])
    assert [[m.text for m in entry] for entry in collect(bus, 2)] == [["", "a"]]

    stop.set()
    for _ in range(100):
        if all(s.draining for s in bus.read_states() if s != GATEWAY):
            break
        bus.receive(0.1)
    assert thread.is_alive()
    bus.send(detok_queue("d0"), [message(1, [EOS], finish="stop")])
    assert [[m.finish for m in entry] for entry in collect(bus, 1)] == [["stop"]]
    thread.join(20)
    assert codes == [0]
    assert bus.read_states() == [GATEWAY]
    bus.close()


def test_a_process_whose_time_to_drain_is_over_hands_back_to_its_peer(
    model: Path, bus_url: str
) -> None:
    config = ProbedConfig(bus=bus_url, id="d0", model=str(model), drain_seconds=0)
    stop, thread, codes = start(config)
    bus = connect(bus_url, "local")
    bus.subscribe(reply_queue("gw"))
    bus.publish_state(WorkerState(role="detokenizer", id="d1", boot=3, beat=1))
    bus.publish_state(GATEWAY)
    bus.send(detok_queue("d0"), [opening()])
    assert len(collect(bus, 1)) == 1
    stop.set()
    assert [[m.again for m in entry] for entry in collect(bus, 1)] == [["handback"]]
    thread.join(20)
    assert codes == [0]
    bus.close()


def test_a_process_that_ends_does_not_wait_for_what_a_gateway_that_has_gone_asked_for(
    model: Path, bus_url: str
) -> None:
    config = ProbedConfig(bus=bus_url, id="d0", model=str(model), drain_seconds=3600)
    stop, thread, codes = start(config)
    bus = connect(bus_url, "local")
    bus.subscribe(reply_queue("gw"))
    bus.send(detok_queue("d0"), [opening()])
    assert len(collect(bus, 1)) == 1
    stop.set()
    thread.join(20)
    assert codes == [0]
    bus.close()


def test_a_malformed_batch_stops_no_process(model: Path, bus_url: str) -> None:
    config = ProbedConfig(bus=bus_url, id="d0", model=str(model))
    stop, thread, codes = start(config)
    bus = connect(bus_url, "local")
    bus.subscribe(reply_queue("gw"))
    bad = step([(UID, 1, 1, 0, 0, 1)])
    bad.uid = b"short"
    bus.send(detok_queue("d0"), [bad, AuditMsg(boot=1, group="g", incarnation=1, detokenizer="d0")])
    bus.send(detok_queue("d0"), [opening()])
    assert [[m.uid for m in entry] for entry in collect(bus, 1)] == [[UID]]
    bus.send(detok_queue("d0"), [message(0, [], finish="abort")])
    stop.set()
    thread.join(20)
    assert codes == [0]
    bus.close()
