"""The workers' loop on a bus that fails, with a core that only echoes."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from minisgl.bus import Bus, Entry
from minisgl.bus.base import BusError
from minisgl.config import ProbedConfig
from minisgl.messages import AbortMsg, AuditMsg, Message, WorkerState
from minisgl.tokenizer import loop
from minisgl.tokenizer.loop import Addressed, run_loop

CONFIG = ProbedConfig(bus="ipc:///unused", id="w", model="m", drain_seconds=0)


def ask(run: int) -> AbortMsg:
    return AbortMsg(uid=b"u" * 16, attempt=1, run=run)


class Echo:
    """Answers each message to `out`; refuses run 13."""

    role: Any = "tokenizer"
    handles: tuple[type, ...] = (AbortMsg,)

    def handle(self, message: Message) -> list[Addressed]:
        if isinstance(message, AbortMsg) and message.run == 13:
            raise ValueError("unlucky")
        return [("out", message)]

    def tick(self) -> None:
        pass

    def busy(self) -> bool:
        return False

    def leave(self, peer: bool) -> list[Addressed]:
        return []


class ScriptedBus(Bus):
    """Hands out entries one by one, fails as told, and stops the loop when all is done."""

    def __init__(self, entries: Sequence[list[Message]], fails: dict[str, int]) -> None:
        self.entries = [Entry("q", list(e), b"") for e in entries]
        self.fails = dict(fails)
        self.log: list[Any] = []
        self.stop = threading.Event()
        self.counted: list[list[int]] = []
        """`bus_errors` of each state that was shown, by boot."""
        self._boots: list[int] = []

    def _maybe_fail(self, call: str) -> None:
        if self.fails.get(call, 0) > 0:
            self.fails[call] -= 1
            raise BusError(f"{call} failed")

    def subscribe(self, queue: str) -> None:
        pass

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        self._maybe_fail("send")
        self.log.append((queue, [getattr(m, "run", None) for m in batch]))

    def receive(self, timeout: float) -> list[Entry]:
        self._maybe_fail("receive")
        if self.entries:
            return [self.entries.pop(0)]
        self.stop.set()
        return []

    def ack(self, entries: Sequence[Entry]) -> None:
        self._maybe_fail("ack")
        self.log.append("ack")

    def publish_state(self, state: WorkerState) -> None:
        self._maybe_fail("publish")
        if state.boot not in self._boots:
            self._boots.append(state.boot)
            self.counted.append([])
        self.counted[self._boots.index(state.boot)].append(state.bus_errors)

    def read_states(self) -> list[WorkerState]:
        self._maybe_fail("read")
        return []

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_RETRY_SECONDS", 0.0)


def log_of(entries: Sequence[list[Message]], **fails: int) -> list[Any]:
    bus = ScriptedBus(entries, fails)
    assert run_loop(CONFIG, bus, [Echo()], stop=bus.stop) == 0
    return bus.log


def test_an_entry_is_acknowledged_after_what_follows_from_it_was_sent() -> None:
    assert log_of([[ask(1), ask(2)], [ask(3)]]) == [("out", [1, 2]), "ack", ("out", [3]), "ack"]


@pytest.mark.parametrize("call", ["send", "receive", "publish"])
def test_a_bus_that_does_not_answer_for_a_while_loses_nothing(call: str) -> None:
    want = [("out", [1]), "ack", ("out", [2]), "ack"]
    assert log_of([[ask(1)], [ask(2)]], **{call: 3}) == want


def test_an_acknowledgement_that_fails_is_not_the_end() -> None:
    assert log_of([[ask(1)], [ask(2)]], ack=1) == [("out", [1]), ("out", [2]), "ack"]


def test_one_malformed_message_does_not_take_its_neighbours_along() -> None:
    assert log_of([[ask(1), ask(13), ask(2)]]) == [("out", [1, 2]), "ack"]


def test_what_cannot_be_read_is_counted_in_one_state_of_the_process() -> None:
    stray = AuditMsg(boot=1, group="g0", incarnation=2, detokenizer="d0")
    bus = ScriptedBus([[ask(13), stray], [ask(1)]], {})
    bus.errors = 3  # entries that the bus itself could not read
    other = Echo()
    other.handles = ()
    assert run_loop(CONFIG, bus, [Echo(), other], stop=bus.stop) == 0
    assert [counts[-1] for counts in bus.counted] == [5, 0]


def test_a_worker_is_ready_once_and_only_when_the_others_can_see_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> int:
        return caplog.messages.count("ready role=tokenizer id=w")

    caplog.set_level("INFO")
    monkeypatch.setattr(loop, "BEAT_SECONDS", 0.0)
    log_of([[ask(1)]], publish=99)
    assert said() == 0
    log_of([[ask(1)], [ask(2)], [ask(3)]], publish=1)
    assert said() == 1
