"""Whose requests rank 0 frees, on a clock of the test's own."""

import pytest

from minisgl.messages import WorkerState
from minisgl.scheduler.feed import SingleFeed
from minisgl.scheduler.rank import Rank

from .test_replies import Group, Wire

T = 4.0


class _Enough(Exception):
    """The loop has turned."""


class Watched(Wire):
    """A bus whose states and whose answers the test decides."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[WorkerState] = []
        self.away = False

    @property
    def congested(self) -> bool:  # type: ignore[override]
        return self.away

    def read_states(self) -> list[WorkerState]:
        return self.states


class Served:
    """A group that computes one endless request of one gateway."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.bus = Watched()
        self.gateway = WorkerState(role="gateway", id="gw0", boot=5, beat=1)
        self.bus.states = [self.gateway]
        self.group = Group(overlap_scheduling=False)
        self.scheduler = self.group.scheduler
        self.group.ask(b"a" * 16, [2, 3], max_tokens=50, ignore_eos=True)
        self._turns = 0
        self.rank = Rank(
            self.scheduler, SingleFeed(), group="g0", incarnation=77, bus=self.bus,
            sink=self.group.sink, state=self._state, publish=lambda _: None, turn=self._turn,
            silence=T, clock=lambda: self.now,
        )  # fmt: skip
        self.scheduler.step = lambda: False  # type: ignore[method-assign]

    def seconds(self, count: float, *, beats: bool = False) -> bool:
        """Whether the request is still held after so many seconds, a round each."""
        for _ in range(int(count)):
            self.now += 1.0
            self.gateway.beat += beats
            self.round()
        return any(True for _ in self.scheduler.held())

    def round(self) -> None:
        self._turns = 0
        with pytest.raises(_Enough):
            self.rank.run(lambda: False)

    def _turn(self) -> None:
        self._turns += 1
        if self._turns > 2:  # what one round finds the next one takes
            raise _Enough

    def _state(self, load: object) -> WorkerState:
        return WorkerState(role="rank", id="g0/0", boot=1, beat=0)


def test_the_requests_of_a_gateway_that_is_silent_for_3_t_are_freed() -> None:
    served = Served()
    assert served.seconds(20, beats=True)
    assert served.seconds(3 * T - 1)
    assert not served.seconds(2)


def test_a_gateway_that_is_not_shown_is_only_silent() -> None:
    served = Served()
    assert served.seconds(2, beats=True)
    served.bus.states = []
    assert served.seconds(3 * T - 1)
    assert not served.seconds(2)


def test_the_requests_of_a_gateway_that_was_never_shown_are_freed_after_3_t() -> None:
    served = Served()
    served.bus.states = []
    assert served.seconds(3 * T - 1)
    assert not served.seconds(3)


def test_the_requests_of_a_gateway_that_was_replaced_are_freed_at_once() -> None:
    served = Served()
    assert served.seconds(2, beats=True)
    served.bus.states = [WorkerState(role="gateway", id="gw0", boot=6, beat=0)]
    assert not served.seconds(1)


def test_while_redis_does_not_answer_nobody_is_silent_and_clocks_start_again() -> None:
    served = Served()
    assert served.seconds(2, beats=True)
    assert served.seconds(3 * T - 2)
    served.bus.away = True
    assert served.seconds(10 * T)
    served.bus.away = False
    assert served.seconds(3 * T - 1)
    assert not served.seconds(3)


def test_after_a_pause_of_its_own_the_clocks_start_again() -> None:
    served = Served()
    assert served.seconds(2, beats=True)
    assert served.seconds(3 * T - 2)
    served.now += 10 * T
    assert served.seconds(3 * T - 1)
    assert not served.seconds(3)
