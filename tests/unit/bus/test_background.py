"""The bus whose calls never wait, over a bus that fails when it is told to."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from minisgl.bus.background import BackgroundBus
from minisgl.bus.base import Bus, BusError, Entry, ReplacedError
from minisgl.messages import AbortMsg, Message, WorkerState
from tests.support import wait_until


class Flaky(Bus):
    """Keeps what it takes while it answers."""

    def __init__(self) -> None:
        self.away = False
        self.replaced = False
        self.entries: list[tuple[str, list[int]]] = []
        self.states: list[WorkerState] = []
        self.inbox: list[Entry] = []
        self.tries = 0

    def _look(self) -> None:
        self.tries += 1
        if self.away:
            raise BusError("away")

    def subscribe(self, queue: str) -> None: ...

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        self._look()
        self.entries.append((queue, [m.run for m in batch if isinstance(m, AbortMsg)]))

    def receive(self, timeout: float) -> list[Entry]:
        self._look()
        taken, self.inbox = self.inbox, []
        if not taken:
            threading.Event().wait(0.01)
        return taken

    def ack(self, entries: Sequence[Entry]) -> None: ...

    def publish_state(self, state: WorkerState) -> None:
        self._look()
        if self.replaced:
            raise ReplacedError("another one is here")
        self.states.append(state)

    def read_states(self) -> list[WorkerState]:
        self._look()
        return list(self.states)

    def close(self) -> None: ...


@pytest.fixture
def inner() -> Flaky:
    return Flaky()


@pytest.fixture
def bus(inner: Flaky) -> Iterator[BackgroundBus]:
    made = BackgroundBus(inner)
    made.start(receives=True)
    yield made
    made.close()


def message(run: int) -> AbortMsg:
    return AbortMsg(uid=b"u" * 16, attempt=1, run=run)


def state(beat: int) -> WorkerState:
    return WorkerState(role="rank", id="g0/0", boot=1, beat=beat)


def test_what_is_sent_while_the_bus_is_away_arrives_in_order_and_joined(
    inner: Flaky, bus: BackgroundBus
) -> None:
    inner.away = True
    for run in range(50):
        bus.send("a" if run < 30 else "b", [message(run)])
    wait_until(lambda: bus.congested and inner.tries > 3, 10, lambda: str(inner.tries))
    assert inner.entries == []
    inner.away = False
    wait_until(
        lambda: not bus.congested and len(inner.entries) >= 2, 10, lambda: str(inner.entries)
    )
    sent = [(queue, run) for queue, runs in inner.entries for run in runs]
    assert sent == [("a" if run < 30 else "b", run) for run in range(50)]
    assert len(inner.entries) < 10, "neighbours of one queue travel as one entry"


def test_received_entries_come_in_order(inner: Flaky, bus: BackgroundBus) -> None:
    inner.inbox = [Entry("q", [message(run)], b"") for run in range(20)]
    got: list[int] = []
    while len(got) < 20:
        got += [m.run for e in bus.receive(1.0) for m in e.messages if isinstance(m, AbortMsg)]
    assert got == list(range(20))
    assert bus.receive(0) == []


def test_only_the_newest_state_is_published_after_an_outage(
    inner: Flaky, bus: BackgroundBus
) -> None:
    inner.away = True
    wait_until(lambda: bus.congested, 10, lambda: "not congested")
    for beat in range(1, 6):
        bus.publish_state(state(beat))
    inner.away = False
    wait_until(lambda: bool(inner.states), 10, lambda: "no state")
    assert inner.states[-1].beat == 5 and len(inner.states) <= 2
    wait_until(lambda: bus.read_states() == inner.states, 10, lambda: str(bus.read_states()))


def test_a_worker_that_was_replaced_learns_it_at_its_next_call(
    inner: Flaky, bus: BackgroundBus
) -> None:
    inner.replaced = True
    bus.publish_state(state(1))

    def told() -> bool:
        try:
            bus.send("a", [message(1)])
        except ReplacedError:
            return True
        return False

    wait_until(told, 10, lambda: "it goes on as if nothing were")


def test_nothing_leaves_when_the_guard_says_no(inner: Flaky) -> None:
    class Frozen(Exception):
        pass

    def guard() -> None:
        raise Frozen

    bus = BackgroundBus(inner, guard=guard)
    bus.start(receives=True)
    with pytest.raises(Frozen):
        while True:
            bus.receive(0.05)
    assert inner.tries == 0
    bus.close()


def test_what_was_sent_before_close_still_leaves(inner: Flaky) -> None:
    bus = BackgroundBus(inner)
    bus.start(receives=False)
    for run in range(100):
        bus.send("a", [message(run)])
    bus.close()
    assert [run for _, runs in inner.entries for run in runs] == list(range(100))
