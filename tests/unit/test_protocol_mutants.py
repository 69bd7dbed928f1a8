"""The model check of the protocol finds each way in which a core could forget a rule of it.

Each mutant breaks one rule of a real core. A few fixed seeds must find it.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minisgl.detokenizer.worker import DetokenizerCore, _State
from minisgl.gateway.request import Request
from minisgl.gateway.requests import Requests
from minisgl.messages import DetokenizeMsg, Opening, UserReply, pack_ids
from minisgl.scheduler.replies import ReplySink
from minisgl.scheduler.request import PendingReq
from minisgl.scheduler.scheduler import Scheduler
from tests.unit.protocol.world import World

RUNS = 250
Mutate = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Replays are the point here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def takes_beyond_a_gap(patch: pytest.MonkeyPatch) -> None:
    """The gateway takes tokens that do not follow on what the client has."""
    real = Requests._take

    def take(self: Requests, request: Request, msg: UserReply, now: float) -> None:
        if msg.pos > len(request.ids):
            msg.pos, msg.text_at = len(request.ids), request.sent_chars
        real(self, request, msg, now)

    patch.setattr(Requests, "_take", take)


def takes_twice(patch: pytest.MonkeyPatch) -> None:
    """The gateway takes what it has already: `pos` is not looked at."""
    real = Requests._take

    def take(self: Requests, request: Request, msg: UserReply, now: float) -> None:
        msg.pos, msg.text_at = len(request.ids), request.sent_chars
        real(self, request, msg, now)

    patch.setattr(Requests, "_take", take)


def ignores_text_at(patch: pytest.MonkeyPatch) -> None:
    """The gateway takes text wherever it stands, and the detokenizer starts at its beginning."""
    real, real_open = Requests._take, DetokenizerCore._open

    def take(self: Requests, request: Request, msg: UserReply, now: float) -> None:
        msg.text_at = request.sent_chars
        real(self, request, msg, now)

    def open_(self: DetokenizerCore, msg: DetokenizeMsg, opening: Opening) -> _State:
        opening.sent_chars = 0
        return real_open(self, msg, opening)

    patch.setattr(Requests, "_take", take)
    patch.setattr(DetokenizerCore, "_open", open_)


def binds_no_computation(patch: pytest.MonkeyPatch) -> None:
    """The gateway takes replies of any attempt and of any computation."""
    real = Requests.reply

    def reply(self: Requests, msg: UserReply, now: float) -> None:
        request = self._open.get(msg.uid)
        if request is not None:
            msg.attempt = request.attempt
            if request.source is not None and msg.source is not None:
                request.source = msg.source
        real(self, msg, now)

    patch.setattr(Requests, "reply", reply)


def opens_without_earlier_output(patch: pytest.MonkeyPatch) -> None:
    """The detokenizer does not begin with the ids of earlier attempts."""
    real = DetokenizerCore._open

    def open_(self: DetokenizerCore, msg: DetokenizeMsg, opening: Opening) -> _State:
        state = real(self, msg, opening)
        state.unfed = []
        return state

    patch.setattr(DetokenizerCore, "_open", open_)


def detokenizes_beyond_a_gap(patch: pytest.MonkeyPatch) -> None:
    """The detokenizer takes whatever comes as the next token."""
    real = DetokenizerCore._advance

    def advance(self: DetokenizerCore, key: Any, state: _State, pos: int, *rest: Any) -> None:
        real(self, key, state, state.pos, *rest)

    patch.setattr(DetokenizerCore, "_advance", advance)


def forgets_the_output(patch: pytest.MonkeyPatch) -> None:
    """A replay starts at the prompt, but says that it goes on."""
    real = Scheduler.add

    def add(self: Scheduler, uid: bytes, *args: Any, **named: Any) -> PendingReq | None:
        if (output := named.get("output_ids")) is not None and len(output):
            named["output_ids"] = output[::-1].copy()
        return real(self, uid, *args, **named)

    patch.setattr(Scheduler, "add", add)


def says_nothing_of_what_it_holds(patch: pytest.MonkeyPatch) -> None:
    """The rank sends no audits: an abort that was lost is not said again."""
    patch.setattr(ReplySink, "audit", lambda self, states: None)


def hears_no_audit(patch: pytest.MonkeyPatch) -> None:
    """The gateway takes a request that waits for its turn for one that was lost."""
    patch.setattr(Requests, "audit", lambda self, msg, now: None)


def separates_the_end(patch: pytest.MonkeyPatch) -> None:
    """The end of an output comes without the token that it came with."""
    real = DetokenizerCore._advance

    def advance(
        self: DetokenizerCore, key: Any, state: _State, pos: int, ids: list[int],
        logprobs: Any, finish: Any, out: Any,
    ) -> None:  # fmt: skip
        real(self, key, state, pos, [] if finish else ids, logprobs, finish, out)

    patch.setattr(DetokenizerCore, "_advance", advance)


def never_notices_silence(patch: pytest.MonkeyPatch) -> None:
    """The gateway waits for ever for what was lost on its way."""
    patch.setattr(Requests, "tick", lambda self, now: None)


def asks_again_for_the_whole(patch: pytest.MonkeyPatch) -> None:
    """A replay does not say what the client has."""
    real = Requests._attempt

    def attempt(self: Requests, request: Request, now: float) -> None:
        real(self, request, now)
        for _, message in self.outbox:
            if getattr(message, "uid", b"") == request.uid and hasattr(message, "output_ids"):
                message.output_ids = pack_ids([])

    patch.setattr(Requests, "_attempt", attempt)


MUTANTS: list[Mutate] = [
    takes_beyond_a_gap, takes_twice, ignores_text_at, binds_no_computation,
    opens_without_earlier_output, detokenizes_beyond_a_gap,
    forgets_the_output, says_nothing_of_what_it_holds, hears_no_audit, separates_the_end,
    never_notices_silence, asks_again_for_the_whole,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_core_that_forgets_a_rule_is_found(
    mutate: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    for seed in range(RUNS):
        try:
            World(seed).run()
        except AssertionError:  # a promise of the protocol; any other error is the mutant's own
            return
    raise AssertionError(f"{RUNS} runs found nothing: {mutate.__doc__}")
