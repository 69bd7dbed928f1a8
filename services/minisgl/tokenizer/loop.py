"""The loop that a tokenizer and a detokenizer share: receive, handle, send, acknowledge, beat."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, Protocol

from minisgl.bus import Bus, Entry
from minisgl.bus.base import REPLACED_CODE, BusError, ReplacedError
from minisgl.config import ProbedConfig, new_boot
from minisgl.health import Health
from minisgl.messages import Message, WorkerState

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
_WAIT_SECONDS = 0.1
"""Longest wait for an entry: how soon SIGTERM is noticed."""
_QUIET_SECONDS = 0.3
"""How long nothing may come before a draining worker takes its queues for empty."""

_RETRY_SECONDS = 0.5
"""Pause between two tries on a bus that does not answer."""

POISONOUS = 3
"""An entry handed out so often without an end ends those that take it."""

Addressed = tuple[str, Message]
"""(queue, message) to send."""


class Core(Protocol):
    """What a worker does, without any input or output of its own."""

    role: Literal["tokenizer", "detokenizer"]
    handles: tuple[type, ...]
    """The kinds of messages that it takes."""

    def handle(self, message: Message) -> list[Addressed]:
        """What follows from one message. Raises `ValueError` for a malformed one."""

    def give_up(self, message: Message) -> list[Addressed]:
        """The answer to a message that has ended everybody who took it."""

    def tick(self) -> None:
        """Called each second."""

    def busy(self) -> bool:
        """Whether it holds requests that are not finished."""

    def keep(self, gateways: Collection[tuple[str, int]]) -> None:
        """While draining: the (id, boot) of all gateways. What others asked for nobody awaits."""

    def leave(self, peer: bool) -> list[Addressed] | None:
        """The time to drain is over. None: go on; else the last messages, and the process ends.

        `peer`: another live worker of this role takes new work.
        """


def run_loop(
    config: ProbedConfig,
    bus: Bus,
    cores: Sequence[Core],
    *,
    on_ready: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Turn until `stop` is set and the work is done; returns the exit code.

    All entries of one `receive` are handled, then what follows goes out as one entry a queue, then
    they are acknowledged: a crash in between repeats, and loses nothing. A bus that does not
    answer is waited for; what could not be sent is sent then.
    """
    try:
        return _turn(config, bus, cores, on_ready, stop or threading.Event())
    except ReplacedError as error:
        log.error("%s", error)
        return REPLACED_CODE


def _turn(
    config: ProbedConfig,
    bus: Bus,
    cores: Sequence[Core],
    on_ready: Callable[[], None] | None,
    stop: threading.Event,
) -> int:
    by_kind = {kind: core for core in cores for kind in core.handles}
    states = [
        WorkerState(role=core.role, id=config.id, boot=new_boot(), beat=0, pod=config.pod)
        for core in cores
    ]
    health = Health(config.health_dir)
    next_beat = heard = time.monotonic()
    deadline: float | None = None
    ready = False
    shown: set[int] = set()
    """Boots of the states that the others have seen."""

    def late() -> bool:
        """Whether the time to drain is over; it begins at the first call after `stop`."""
        nonlocal deadline, heard, next_beat
        now = time.monotonic()
        health.turn()  # also while a bus that is away is tried again
        if deadline is None and stop.is_set():
            deadline, heard, next_beat = now + config.drain, now, now
            log.info("draining for at most %g seconds", config.drain)
        return deadline is not None and now >= deadline

    while True:
        is_late, now = late(), time.monotonic()
        if now >= next_beat:
            next_beat = now + BEAT_SECONDS
            for core, state in zip(cores, states, strict=True):
                core.tick()
                state.beat += 1
                state.draining = deadline is not None
                state.bus_errors = bus.errors if state is states[0] else 0
                with _outage("the state"):  # the next beat brings it
                    bus.publish_state(state)
                    if state.boot not in shown:
                        shown.add(state.boot)
                        log.info("ready role=%s id=%s", state.role, state.id)
        health.show_ready(deadline is None)
        if not ready:
            ready = True
            if on_ready is not None:
                on_ready()
        if deadline is not None:
            last = _last_words(bus, cores, states, now - heard, is_late)
            if last is not None:
                send_all(bus, last, late)
                return 0
        entries: list[Entry] = []
        with _outage("receiving", pause=True):
            entries = bus.receive(_WAIT_SECONDS)
        if entries:
            heard = time.monotonic()
            if send_all(bus, _handled(bus, by_kind, entries), late):
                with _outage("acknowledging"):  # they come again, as duplicates
                    bus.ack(entries)


def _handled(bus: Bus, by_kind: dict[type, Core], entries: Iterable[Entry]) -> Iterable[Addressed]:
    for message, deliveries in ((m, e.deliveries) for e in entries for m in e.messages):
        core = by_kind.get(type(message))
        if core is None:
            bus.errors += 1
            log.warning("dropped a %s: not for this worker", type(message).__name__)
            continue
        try:
            if deliveries >= POISONOUS:
                yield from core.give_up(message)
            else:
                yield from core.handle(message)
        except ValueError as error:
            bus.errors += 1
            log.warning("dropped a malformed %s: %s", type(message).__name__, error)


def send_all(bus: Bus, addressed: Iterable[Addressed], late: Callable[[], bool]) -> bool:
    """Send these messages, as one entry a queue and in their order; tries until it can.

    False: it could not, and it is too late to try again.
    """
    batches: dict[str, list[Message]] = {}
    for queue, message in addressed:
        batches.setdefault(queue, []).append(message)
    for queue, batch in batches.items():
        sent = False
        while not sent:
            with _outage(f"sending to {queue}", pause=True):
                bus.send(queue, batch)
                sent = True
            if not sent and late():
                return False
    return True


@contextlib.contextmanager
def _outage(what: str, pause: bool = False) -> Iterator[None]:
    """A bus that does not answer has logged it, and with `pause` gets some time."""
    try:
        yield
    except BusError as error:
        log.debug("the bus does not answer (%s): %s", what, error)
        if pause:
            time.sleep(_RETRY_SECONDS)


def _last_words(
    bus: Bus, cores: Sequence[Core], states: Sequence[WorkerState], quiet: float, late: bool
) -> list[Addressed] | None:
    """None: it must go on. Else what is to be sent before the end."""
    others: list[WorkerState] = []
    if any(core.busy() for core in cores):
        with _outage("reading states"):
            others = bus.read_states()
            gateways = {(s.id, s.boot) for s in others if s.role == "gateway"}
            for core in cores:
                core.keep(gateways)
    if not any(core.busy() for core in cores) and (late or quiet >= _QUIET_SECONDS):
        return []
    if not late:
        return None
    boots = {state.boot for state in states}
    words: list[Addressed] = []
    for core in cores:
        peer = any(s.role == core.role and not s.draining and s.boot not in boots for s in others)
        last = core.leave(peer)
        if last is None:
            return None
        words += last
    return words
