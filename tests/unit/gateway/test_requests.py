"""The owner of requests, without bus, threads or a real clock."""

import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.gateway.fleet import Fleet
from minisgl.gateway.request import Limits, News, Prompt, Request
from minisgl.gateway.requests import SILENCE_PAUSE_SECONDS, Requests
from minisgl.messages import (
    AbortMsg,
    AuditMsg,
    ErrorInfo,
    SamplingParams,
    Source,
    TokenizeMsg,
    TokenLogprobs,
    UserReply,
    WorkerState,
    pack_ids,
    unpack_ids,
)
from tests.unit.gateway.scripted import INCARNATION, serving_states

T = 30.0
BOOT = 99
PROMPT = pack_ids([5, 6, 7])


@dataclass
class Owner:
    """Requests under test with one open request, and all that its client got."""

    max_attempts: int = 3
    sampling: SamplingParams = field(default_factory=SamplingParams)
    now: float = 1000.0
    news: list[News] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = serving_states()
        self.fleet = Fleet(T)
        self.requests = Requests(
            "gw", BOOT, self.fleet, Limits(T, max_attempts=self.max_attempts, replay_wait=60.0)
        )
        self.look()
        self.request = self.start()

    def start(self, uid: bytes = b"u" * 16) -> Request:
        request = Request(
            uid=uid, index=0, prompt=Prompt(text="hi"), sampling=self.sampling,
            sink=self.news.append, deadline=self.now + 10_000,
        )  # fmt: skip
        self.requests.start(request, self.now)
        return request

    def look(self) -> None:
        for state in self.states:
            state.beat += 1
        self.fleet.observe([copy.copy(state) for state in self.states], self.now)

    def wait(self, seconds: float) -> None:
        """Time passes in half seconds, as the loop sees it."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.look()
            self.requests.tick(self.now)

    def reply(self, **fields: Any) -> None:
        fields = {
            "uid": self.request.uid, "attempt": self.request.attempt, "boot": BOOT,
            "source": source(),
        } | fields  # fmt: skip
        if "ids" in fields:
            fields["ids"] = pack_ids(fields["ids"])
        self.requests.reply(UserReply(**fields), self.now)

    def open(self, run: int = 1) -> None:
        self.reply(source=source(run), prompt_ids=PROMPT, cached_tokens=2)

    def audit(self, *held: tuple[bytes, int, int, int], **fields: Any) -> None:
        fields = {
            "boot": BOOT, "group": "g0", "incarnation": INCARNATION, "detokenizer": "d0",
        } | fields  # fmt: skip
        self.requests.audit(AuditMsg(held=list(held), **fields), self.now)

    def sent(self, kind: type) -> list[Any]:
        taken = self.requests.take_outbox()
        return [message for _, message in taken if isinstance(message, kind)]

    @property
    def ids(self) -> list[int]:
        return [i for news in self.news for i in news.ids]

    @property
    def text(self) -> str:
        return "".join(news.text for news in self.news)


def source(run: int = 1, incarnation: int = INCARNATION) -> Source:
    return Source(group="g0", incarnation=incarnation, run=run)


@pytest.fixture
def owner() -> Owner:
    return Owner()


def test_the_first_attempt_carries_the_prompt_and_the_route(owner: Owner) -> None:
    (message,) = owner.sent(TokenizeMsg)
    assert (message.uid, message.attempt, message.text) == (b"u" * 16, 1, "hi")
    assert message.prompt_ids is None and message.output_ids == b""
    assert (message.route.gateway, message.route.boot) == ("gw", BOOT)
    assert message.route.detokenizer == "d0"


def test_replies_in_order_reach_the_client_as_they_are(owner: Owner) -> None:
    owner.open()
    owner.reply(pos=0, ids=[1], text="ab")
    owner.reply(pos=1, ids=[2, 3], text="c", text_at=2, finish="length")
    assert owner.ids == [1, 2, 3] and owner.text == "abc"
    assert owner.news[-1].finish == "length" and len(owner.requests) == 0
    assert owner.request.prompt_tokens == 3 and owner.request.cached_tokens == 2
    assert owner.sent(AbortMsg) == []


def test_a_duplicate_is_dropped(owner: Owner) -> None:
    owner.open()
    owner.reply(pos=0, ids=[1], text="a")
    owner.reply(pos=0, ids=[1], text="a")
    assert owner.ids == [1] and owner.request.attempt == 1


@pytest.mark.parametrize("gap", [{"pos": 2, "text_at": 1}, {"pos": 1, "text_at": 3}])
def test_a_gap_is_replayed_from_what_the_client_has(owner: Owner, gap: dict[str, int]) -> None:
    owner.open()
    owner.reply(pos=0, ids=[1], text="a")
    owner.sent(TokenizeMsg)
    owner.reply(ids=[9], text="z", **gap)
    sent = owner.requests.take_outbox()
    assert [type(message) for _, message in sent] == [AbortMsg, TokenizeMsg]
    assert sent[0][0] == f"req:g0:{INCARNATION:016x}"
    replay = sent[1][1]
    assert isinstance(replay, TokenizeMsg) and replay.attempt == 2
    assert replay.text is None and replay.prompt_ids == PROMPT
    assert unpack_ids(replay.output_ids).tolist() == [1] and replay.sent_chars == 1
    assert owner.ids == [1] and owner.requests.replays == 1


@pytest.mark.parametrize(
    "fields",
    [{"attempt": 2}, {"attempt": 0}, {"source": source(2)}, {"source": source(1, 8)},
     {"uid": b"x" * 16}, {"boot": 1}],
)  # fmt: skip
def test_what_is_not_the_bound_computation_is_dropped_and_aborted(
    owner: Owner, fields: dict[str, Any]
) -> None:
    owner.open()
    owner.sent(TokenizeMsg)
    owner.reply(pos=0, ids=[1], text="a", **fields)
    owner.reply(pos=0, ids=[1], text="a", **fields)
    (abort,) = owner.sent(AbortMsg)
    assert abort.run == fields.get("source", source()).run
    assert owner.ids == [] and owner.request.attempt == 1


def test_a_reply_without_the_prompt_cannot_open_the_first_computation(owner: Owner) -> None:
    owner.reply(pos=0, ids=[1], text="a")
    assert owner.request.attempt == 2 and owner.ids == []


def test_the_prompt_and_the_cached_tokens_are_those_of_the_first_attempt(owner: Owner) -> None:
    owner.open()
    owner.reply(again="lost")
    owner.reply(source=source(2), prompt_ids=pack_ids([1]), cached_tokens=1)
    assert owner.request.prompt_ids == PROMPT and owner.request.cached_tokens == 2


def test_an_error_is_final(owner: Owner) -> None:
    owner.reply(source=None, error=ErrorInfo(status=400, message="no", code="c"))
    assert owner.news[-1].error == ErrorInfo(status=400, message="no", code="c")
    assert len(owner.requests) == 0 and owner.requests.waiting == 0


def test_three_attempts_without_a_token_end_with_an_error_that_says_why(owner: Owner) -> None:
    for attempt in range(3):
        assert owner.request.attempt == attempt + 1
        owner.reply(source=source(attempt), again="lost", why="it fell")
    error = owner.news[-1].error
    assert error is not None and error.status == 500 and "it fell" in error.message
    assert "3 times" in error.message


def test_a_new_token_starts_the_count_of_attempts_again(owner: Owner) -> None:
    owner.open()
    for i in range(9):
        owner.reply(source=source(i + 1), pos=i, ids=[i], text="a", text_at=i)
        owner.reply(source=source(i + 1), again="lost")
    assert owner.ids == list(range(9)) and owner.request.attempt == 10


def test_a_poisoned_neighbour_counts_only_its_own_attempts(owner: Owner) -> None:
    other = owner.start(b"v" * 16)
    for run in range(3):
        owner.reply(source=source(run), again="lost")
    assert owner.request.done and not other.done and other.failures == 0


def test_refusals_are_no_failures_but_end_after_the_wait(owner: Owner) -> None:
    for _ in range(20):
        owner.reply(source=None, again="refused")
        owner.wait(0.5)
    assert owner.request.attempt > 10 and not owner.request.done
    for _ in range(120):
        owner.reply(source=None, again="refused")
        owner.wait(0.5)
    error = owner.news[-1].error
    assert error is not None and (error.status, error.code) == (503, "no_group_ready")


def test_a_refused_request_waits_a_moment_before_it_asks_again(owner: Owner) -> None:
    owner.sent(TokenizeMsg)
    owner.reply(source=None, again="refused")
    assert owner.sent(TokenizeMsg) == []
    owner.wait(0.5)
    assert len(owner.sent(TokenizeMsg)) == 1


def test_a_handback_moves_on_at_once_and_ends_what_still_computes(owner: Owner) -> None:
    owner.open()
    owner.requests.take_outbox()
    owner.reply(again="handback")
    sent = owner.requests.take_outbox()
    assert [type(message) for _, message in sent] == [AbortMsg, TokenizeMsg]
    assert owner.request.failures == 0


def test_a_lost_request_waits_for_a_group_to_come_back(owner: Owner) -> None:
    owner.open()
    rank = owner.states.pop(0)
    owner.wait(0.5)
    owner.reply(again="lost")
    assert owner.request.attempt == 1
    owner.wait(30)
    assert not owner.request.done
    owner.states.append(rank)
    owner.wait(0.5)
    assert owner.request.attempt == 2


def test_a_request_that_no_group_takes_for_too_long_ends(owner: Owner) -> None:
    owner.open()
    owner.states.pop(0)
    owner.wait(0.5)
    owner.reply(again="lost")
    owner.wait(60.5)
    error = owner.news[-1].error
    assert error is not None and error.code == "no_group_ready" and "60 s" in error.message


def test_a_late_reply_of_an_attempt_that_was_given_up_is_not_taken(owner: Owner) -> None:
    owner.open()
    owner.states.pop(0)
    owner.wait(0.5)
    owner.reply(again="lost")
    owner.sent(AbortMsg)
    owner.reply(pos=0, ids=[1], text="a")
    assert owner.ids == [] and [abort.run for abort in owner.sent(AbortMsg)] == [1]


def test_the_wait_for_a_group_counts_from_the_last_one_that_took_it(owner: Owner) -> None:
    for run in range(3):
        for _ in range(40):
            owner.reply(source=None, again="refused")
            owner.wait(1)
        owner.open(run)
        owner.reply(source=source(run), again="handback")
    assert not owner.request.done


def test_silence_of_a_bound_request_is_a_loss_after_t(owner: Owner) -> None:
    owner.open()
    owner.wait(T - 0.5)
    assert not owner.sent(AbortMsg)
    owner.wait(0.5)
    assert [abort.run for abort in owner.sent(AbortMsg)] == [1]
    owner.wait(SILENCE_PAUSE_SECONDS)
    assert owner.request.attempt == 2


def test_silence_before_a_computation_is_bound_is_a_loss_after_twice_t(owner: Owner) -> None:
    owner.wait(2 * T + SILENCE_PAUSE_SECONDS - 0.5)
    assert owner.request.attempt == 1
    owner.wait(0.5)
    assert owner.request.attempt == 2


def test_a_request_lost_on_its_way_while_a_worker_dies_is_not_to_blame(owner: Owner) -> None:
    for lost in range(3):
        attempt = owner.request.attempt
        owner.states[1].boot += 1  # a tokenizer, or whatever: it was replaced
        owner.wait(2 * T)
        owner.wait(SILENCE_PAUSE_SECONDS)
        assert owner.request.attempt == attempt + 1
        assert (owner.request.failures, owner.request.forgiven) == (0, lost + 1)
    owner.states[1].boot += 1
    owner.wait(2 * T)  # one that kills whoever takes it must end all the same
    assert (owner.request.failures, owner.request.forgiven) == (1, 3)


def test_a_request_lost_on_its_way_while_all_are_well_counts(owner: Owner) -> None:
    owner.wait(2 * T)
    assert (owner.request.failures, owner.request.forgiven) == (1, 0)


def test_a_group_that_dies_costs_its_requests_one_attempt_not_two() -> None:
    owner = Owner()
    owner.open()
    owner.wait(0.5)  # its last beat comes after its last reply
    rank0 = next(state for state in owner.states if state.role == "rank")
    for _ in range(int(3 * T)):
        rank0.beat -= 1  # which `wait` adds
        owner.wait(0.5)
    assert (owner.request.attempt, owner.request.failures) == (1, 1)
    owner.wait(1)
    assert owner.request.attempt == 2


def test_a_silence_that_turns_out_to_be_the_detokenizers_is_not_waited_out(owner: Owner) -> None:
    owner.states.append(WorkerState(role="detokenizer", id="d1", boot=24, beat=0))
    owner.wait(0.5)
    owner.open()
    owner.wait(0.5)  # its last beat comes after its last reply
    silent = next(s for s in owner.states if s.id == owner.request.detokenizer[0])
    for _ in range(int(2 * T) + 1):
        silent.beat -= 1  # which `wait` adds
        owner.wait(0.5)
    assert (owner.request.attempt, owner.request.detokenizer[0]) == (2, "d1")


def test_an_audit_that_lists_a_request_is_progress_even_while_it_waits(owner: Owner) -> None:
    for _ in range(5):
        owner.wait(2 * T - 1)
        owner.audit((owner.request.uid, 1, 1, 0))
    assert owner.request.attempt == 1


def test_what_three_audits_leave_out_is_replayed(owner: Owner) -> None:
    owner.open()
    owner.audit()
    owner.audit()
    owner.audit((owner.request.uid, 1, 1, 0))
    owner.audit()
    owner.audit()
    assert owner.request.attempt == 1
    owner.audit()
    assert owner.request.attempt == 2


@pytest.mark.parametrize(
    "other", [{"group": "g1"}, {"incarnation": 8}, {"detokenizer": "d1"}, {"boot": 1}]
)
def test_audits_of_others_say_nothing_about_a_request(owner: Owner, other: dict[str, Any]) -> None:
    owner.open()
    for _ in range(5):
        owner.audit(**other)
    assert owner.request.attempt == 1


def test_an_audit_that_comes_again_is_no_new_evidence(owner: Owner) -> None:
    owner.open()
    for number in (1, 1, 2, 1, 2, 2):
        owner.audit(number=number)
    assert owner.request.attempt == 1
    owner.audit(number=3)
    assert owner.request.attempt == 2


def test_an_unbound_request_is_not_missed_by_audits(owner: Owner) -> None:
    for _ in range(5):
        owner.audit()
    assert owner.request.attempt == 1


@pytest.mark.parametrize("held", [(b"x" * 16, 1, 1, 0), (b"u" * 16, 1, 2, 0), (b"u" * 16, 2, 1, 0)])
def test_what_an_audit_lists_and_nobody_wants_is_aborted_each_time(
    owner: Owner, held: tuple[bytes, int, int, int]
) -> None:
    owner.open()
    for _ in range(2):
        owner.audit(held)
        (abort,) = owner.sent(AbortMsg)
        assert (abort.uid, abort.attempt, abort.run) == held[:3]


def test_a_dropped_request_is_aborted_even_when_its_computation_is_unknown(owner: Owner) -> None:
    owner.requests.drop(owner.request)
    assert owner.sent(AbortMsg) == []
    owner.audit((owner.request.uid, 1, 4, 0))
    owner.open(run=5)
    assert [abort.run for abort in owner.sent(AbortMsg)] == [4, 5]
    assert owner.news == [] and owner.requests.waiting == 0


def test_a_detokenizer_with_another_boot_has_lost_its_state(owner: Owner) -> None:
    owner.open()
    owner.wait(1)
    owner.states[2].boot = 77
    owner.wait(0.5)
    assert owner.request.attempt == 2 and owner.request.detokenizer == ("d0", 77)


def test_a_replay_after_a_failure_takes_another_detokenizer_if_there_is_one(owner: Owner) -> None:
    owner.states.append(WorkerState(role="detokenizer", id="d1", boot=4, beat=1))
    owner.wait(0.5)
    owner.open()
    for run, detokenizer in ((1, "d1"), (2, "d0")):
        owner.reply(source=source(run), again="lost")
        assert owner.request.detokenizer[0] == detokenizer


def test_another_incarnation_of_its_group_ends_an_attempt(owner: Owner) -> None:
    owner.open()
    load = owner.states[0].load
    assert load is not None
    load.incarnation = 8
    owner.wait(0.5)
    assert owner.request.attempt == 2


def test_a_rank_process_that_has_not_formed_yet_ends_an_attempt_of_the_one_before(
    owner: Owner,
) -> None:
    owner.open()
    owner.states[0].boot, owner.states[0].load = 55, None
    owner.wait(0.5)
    assert owner.request.source is not None and owner.request.resume_at is not None


def restart(owner: Owner, incarnation: int) -> None:
    """The only group is killed, and forms anew five seconds later."""
    load, owner.states[0].load = owner.states[0].load, None
    assert load is not None
    owner.states[0].boot += 1
    owner.wait(5)
    owner.states[0].load = msgspec.structs.replace(load, incarnation=incarnation)
    owner.wait(0.5)


def test_a_request_without_a_word_is_sent_again_once_the_only_group_serves_anew(
    owner: Owner,
) -> None:
    owner.wait(1)
    restart(owner, 8)
    assert owner.request.attempt == 2 and owner.request.forgiven == 1
    owner.wait(2 * T - 1)  # and once only: this one is on its way to the new one
    assert owner.request.attempt == 2


def test_a_request_without_a_word_stays_with_a_group_that_could_have_it(owner: Owner) -> None:
    assert owner.states[0].load is not None
    other = msgspec.structs.replace(owner.states[0].load, group="g1", incarnation=9)
    owner.states.append(WorkerState(role="rank", id="g1/0", boot=31, beat=0, load=other))
    owner.wait(1)
    request = owner.start(b"v" * 16)
    restart(owner, 8)
    assert request.attempt == 1
    owner.states.pop()
    owner.wait(T)  # now that one is silent as well
    assert request.attempt == 2


def test_a_request_that_waits_in_a_group_moves_on_when_that_one_is_replaced(owner: Owner) -> None:
    assert owner.states[0].load is not None
    other = msgspec.structs.replace(owner.states[0].load, group="g1", incarnation=9)
    owner.states.append(WorkerState(role="rank", id="g1/0", boot=31, beat=0, load=other))
    owner.wait(1)
    owner.audit((owner.request.uid, 1, 1, 0))
    owner.states[0].boot, owner.states[0].load = 55, None
    owner.wait(0.5)
    assert (owner.request.attempt, owner.request.forgiven) == (2, 1)
    owner.audit((owner.request.uid, 2, 1, 0), group="g1", incarnation=9)
    owner.wait(5)
    assert owner.request.attempt == 2


def test_a_request_without_a_word_that_follows_a_restart_is_not_sent_twice(owner: Owner) -> None:
    restart(owner, 8)
    request = owner.start(b"v" * 16)
    owner.wait(2 * T - 1)
    assert request.attempt == 1


def test_an_empty_bus_proves_nothing(owner: Owner) -> None:
    owner.open()
    owner.states, states = [], owner.states
    owner.wait(T - 1)
    assert owner.request.attempt == 1 and owner.request.resume_at is None
    owner.states = states
    owner.audit((owner.request.uid, 1, 1, 0))
    owner.wait(1)
    assert owner.request.attempt == 1


def test_after_a_pause_of_its_own_the_clocks_start_again(owner: Owner) -> None:
    owner.open()
    owner.wait(1)
    owner.now += 10 * T
    owner.wait(0.5)
    assert owner.request.attempt == 1


def test_an_outage_of_the_bus_is_nobodys_silence(owner: Owner) -> None:
    owner.open()
    owner.wait(1)
    for _ in range(int(4 * T)):  # no look at the bus succeeds
        owner.now += 0.5
        owner.requests.restart_clocks(owner.now)
        owner.requests.tick(owner.now)
    owner.wait(1)
    assert owner.request.attempt == 1 and owner.request.resume_at is None


def test_the_time_limit_ends_a_request_wherever_it_is(owner: Owner) -> None:
    owner.open()
    owner.request.deadline = owner.now + 1
    owner.wait(1)
    error = owner.news[-1].error
    assert error is not None and error.status == 504
    assert [abort.run for abort in owner.sent(AbortMsg)] == [1]


def test_malformed_ids_and_missing_logprobs_are_a_loss_and_no_crash() -> None:
    owner = Owner(sampling=SamplingParams(logprobs=0))
    owner.open()
    message = UserReply(uid=owner.request.uid, attempt=1, boot=BOOT, source=source(), ids=b"\0\0\0")
    owner.requests.reply(message, owner.now)
    assert owner.request.attempt == 2
    owner.reply(ids=[1], logprobs=[TokenLogprobs(logprob=-1), TokenLogprobs(logprob=-2)])
    assert owner.request.attempt == 3 and owner.ids == []


def test_an_abort_that_nobody_asked_for_is_a_loss(owner: Owner) -> None:
    owner.open()
    owner.reply(finish="abort")
    assert owner.request.attempt == 2


def test_waiting_counts_requests_without_a_first_token(owner: Owner) -> None:
    other = owner.start(b"v" * 16)
    assert owner.requests.waiting == 2
    owner.open()
    owner.reply(pos=0, ids=[1])
    assert owner.requests.waiting == 1
    owner.requests.drop(owner.request)
    owner.requests.drop(owner.request)
    owner.requests.drop(other)
    assert owner.requests.waiting == 0


# --- any order of faults --------------------------------------------------------------------

IDS = list(range(100, 109))
TEXTS = ["ab", "", "c", "", "", "def", "g", "", "h"]
"""Some tokens have no text of their own; the flush at the end may hold more than the last one."""


class World:
    """A group and a network that lose, repeat and reorder as they are told."""

    def __init__(self) -> None:
        self.owner = Owner(max_attempts=10**6)
        self.runs = 0
        self.incarnation = INCARNATION
        self.flying: list[UserReply] = []
        self.past: list[UserReply] = []
        self.asked: list[TokenizeMsg] = []
        self.held: dict[tuple[bytes, int, int], int] = {}

    def pump(self) -> None:
        """Rank 0 takes what was sent: aborts, and new attempts, whose replies start to fly."""
        for queue, message in self.owner.requests.take_outbox():
            if isinstance(message, AbortMsg):
                if queue.endswith(f"{self.incarnation:016x}"):
                    self.held.pop((message.uid, message.attempt, message.run), None)
            elif isinstance(message, TokenizeMsg):
                self.asked.append(message)
                self.compute(message)

    def compute(self, message: TokenizeMsg) -> None:
        self.runs += 1
        where = Source(group="g0", incarnation=self.incarnation, run=self.runs)
        have, at = len(message.output_ids) // 4, message.sent_chars
        base: dict[str, Any] = {
            "uid": message.uid, "attempt": message.attempt, "boot": BOOT, "source": where
        }  # fmt: skip
        self.held[message.uid, message.attempt, self.runs] = have
        self.flying.append(UserReply(**base, pos=have, text_at=at, prompt_ids=PROMPT))
        for pos in range(have, len(IDS)):
            text = "".join(TEXTS[: pos + 1])[at:]
            finish = "stop" if pos == len(IDS) - 1 else None
            self.flying.append(
                UserReply(
                    **base, pos=pos, ids=pack_ids([IDS[pos]]), text=text, text_at=at, finish=finish
                )
            )
            at += len(text)

    def deliver(self, i: int) -> None:
        if self.flying:
            reply = self.flying.pop(i % len(self.flying))
            self.past.append(reply)
            self.give(reply)

    def give(self, reply: UserReply) -> None:
        self.owner.requests.reply(reply, self.owner.now)
        self.ended(reply)

    def ended(self, reply: UserReply) -> None:
        """Audits follow replies: past the last one, received or not, rank 0 holds nothing."""
        if reply.finish and reply.source:
            self.held.pop((reply.uid, reply.attempt, reply.source.run), None)

    def act(self, action: str, i: int) -> None:
        owner = self.owner
        if action == "next":
            self.deliver(0)
        elif action == "reorder":
            self.deliver(i)
        elif action == "lose" and self.flying:
            self.ended(self.flying.pop(i % len(self.flying)))
        elif action == "repeat" and self.past:
            self.give(self.past[i % len(self.past)])
        elif action == "again":
            owner.reply(source=owner.request.source, again=("lost", "refused", "handback")[i % 3])
        elif action == "twice" and self.asked:
            self.compute(self.asked[i % len(self.asked)])
        elif action == "restart":
            self.incarnation += 1
            self.held.clear()
            load = owner.states[0].load
            assert load is not None
            load.incarnation = self.incarnation
        elif action == "audit":
            owner.audit(*((*k, p) for k, p in self.held.items()), incarnation=self.incarnation)
        elif action == "wait":
            owner.wait(i / 2)
        self.pump()


ACTIONS = ["next"] * 5 + ["reorder", "lose", "repeat", "again", "twice", "restart", "audit", "wait"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 70)), max_size=60))
def test_whatever_is_lost_repeated_or_reordered_the_client_gets_each_token_once_and_in_order(
    steps: list[tuple[str, int]],
) -> None:
    world = World()
    owner = world.owner
    world.pump()
    for action, i in steps:
        world.act(action, i)
        assert owner.ids == IDS[: len(owner.ids)]
        assert "".join(TEXTS).startswith(owner.text)
    for _ in range(400):  # the faults are over: everything comes, audits and time go on
        if owner.request.done:
            break
        world.act("next", 0)
        world.act("audit", 0)
        world.act("wait", 1)
    assert owner.ids == IDS and owner.text == "".join(TEXTS)
    assert owner.news[-1].finish == "stop"
    assert sum(news.finish is not None for news in owner.news) == 1
    assert len(owner.requests) == 0 and owner.requests.waiting == 0
