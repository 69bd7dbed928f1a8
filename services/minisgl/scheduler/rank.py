"""The loop of one rank: messages in, a step, results out."""

import bisect
import logging
import time
from collections.abc import Callable

from minisgl.bus import Bus, Entry
from minisgl.lifecycle import boot_clock
from minisgl.messages import (
    STEP_BUCKETS,
    AbortMsg,
    GroupLoad,
    Message,
    UserMsg,
    WorkerState,
    decode,
    encode,
    unpack_ids,
)
from minisgl.scheduler import integrity
from minisgl.scheduler.feed import Feed
from minisgl.scheduler.gateways import Gateways
from minisgl.scheduler.replies import ReplySink
from minisgl.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""An idle group steps, empty, so often: its state beats, and its ranks see that all are there."""


class StepClock:
    """How long steps took, for the metrics."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._buckets = [0] * len(STEP_BUCKETS)

    def add(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        at = bisect.bisect_left(STEP_BUCKETS, seconds)
        if at < len(self._buckets):
            self._buckets[at] += 1

    def cumulative(self) -> list[int]:
        """Steps at most as long as each bound."""
        total, sums = 0, []
        for count in self._buckets:
            total += count
            sums.append(total)
        return sums


class Rank:
    """Runs one scheduler. Rank 0 has the bus; the others see its messages through the feed."""

    def __init__(
        self,
        scheduler: Scheduler,
        feed: Feed,
        *,
        group: str,
        incarnation: int,
        bus: Bus | None = None,
        sink: ReplySink | None = None,
        state: Callable[[GroupLoad | None], WorkerState],
        publish: Callable[[WorkerState], None],
        turn: Callable[[], None] = lambda: None,
        drain_seconds: float = 0.0,
        silence: float = float("inf"),
        transport: str = "",
        busy: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """`bus` and `sink` are rank 0's. `state` makes this rank's state, `publish` shows it.

        `turn` is called at the start of each round. Once the group leaves, it hands back after
        `drain_seconds` what it still holds, if another group lives. `silence` is the heartbeat
        time-out in seconds, of `clock`. `transport` is what tensors travel by, and `busy` gives the
        seconds that the device has computed, both for the load.
        """
        self._scheduler = scheduler
        self._feed = feed
        self._group = group
        self._incarnation = incarnation
        self._bus = bus
        self._sink = sink
        self._state = state
        self._publish = publish
        self._clock = clock
        self._transport = transport
        self._busy = busy
        self._steps = StepClock()
        self._gateways = Gateways(silence)
        self._errors = 0
        self._next_second = 0.0
        self._unchecked = True
        self._injected: list[bytes] = []
        self._turn = turn
        self._drain_seconds = drain_seconds
        self._drain_until: float | None = None
        self._states: list[WorkerState] = []
        self._peer_leaves = False

    def run(self, asked: Callable[[], bool]) -> None:
        """Until the group has drained: `asked()` of any rank makes it begin. Raises `PeerError`."""
        while True:
            self._turn()
            raws = self._receive() if self._bus is not None else []
            entries = self._feed.exchange(None if self._left(asked) else raws)
            if entries is None:
                return
            for raw in entries:
                for message in decode(raw):
                    if not apply(message, self._scheduler, self._group, self._incarnation):
                        self._errors += 1
            began = time.perf_counter()
            if self._scheduler.step():
                self._steps.add(time.perf_counter() - began)
                self._unchecked = True
            self._each_second()

    def load(self) -> GroupLoad:
        """The figures of this group."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        return GroupLoad(
            group=self._group,
            incarnation=self._incarnation,
            max_model_len=scheduler.max_model_len,
            running=scheduler.running,
            waiting=scheduler.waiting,
            pages_total=cache.num_pages,
            pages_free=cache.free_pages,
            pages_evictable=cache.evictable_pages,
            steps=self._steps.steps,
            step_seconds=self._steps.seconds,
            step_buckets=self._steps.cumulative(),
            retractions=scheduler.retractions,
            transport=self._transport,
            busy_seconds=self._busy(),
        )

    def _receive(self) -> list[bytes]:
        if self._bus is None:
            return []
        entries = self._bus.receive(0 if not self._scheduler.idle else self._until_next_second())
        self._bus.ack(entries)
        taken = [self._without_new(e) if self._drain_until is not None else e.raw for e in entries]
        raws, self._injected = [*self._injected, *taken], []
        return raws

    def _until_next_second(self) -> float:
        return min(max(self._next_second - self._clock(), 0), IDLE_SECONDS)

    def _each_second(self) -> None:
        now = self._clock()
        if now < self._next_second:
            return
        self._next_second = now + IDLE_SECONDS
        state = self._state(self.load() if self._sink is not None else None)
        if self._bus is not None:
            state.bus_errors = self._errors + self._bus.errors
        self._publish(state)
        if self._scheduler.idle and self._unchecked:
            self._unchecked = False
            integrity.check(self._scheduler)
        if self._bus is not None and self._sink is not None:
            self._states = self._bus.read_states()
            mine = f"{self._group}/"
            self._peer_leaves = any(s.draining and s.id.startswith(mine) for s in self._ranks())
            if self._bus.congested:
                self._gateways.unanswered()
            else:
                held = (p.route for p in self._scheduler.held() if p.route is not None)
                self._gateways.look(self._states, held, self._clock())
                self._sink.audit(self._states)
            self._drop_orphans()

    def _left(self, asked: Callable[[], bool]) -> bool:
        """Rank 0: whether the group has ended. It takes nothing new once a rank was asked to go."""
        if self._bus is None or self._sink is None:
            return False
        now = self._clock()
        if self._drain_until is None:
            if not asked() and not self._peer_leaves:
                return False
            self._drain_until = now + self._drain_seconds
            self._next_second = now  # show it, and look who is there
            _log.info("draining group=%s requests=%d", self._group, self._scheduler.running)
        if self._scheduler.idle and not self._injected:
            return True
        others = (s.load for s in self._ranks() if s.load is not None and not s.draining)
        if now < self._drain_until or not any(load.group != self._group for load in others):
            return False
        self._sink.hand_back()
        return True

    def _ranks(self) -> list[WorkerState]:
        return [s for s in self._states if s.role == "rank"]

    def _without_new(self, entry: Entry) -> bytes:
        """The entry without requests, which go back to be computed elsewhere."""
        kept: list[Message] = []
        for message in entry.messages:
            if isinstance(message, UserMsg) and self._sink is not None:
                self._sink.refuse_for_now(message)
            else:
                kept.append(message)
        return encode(kept)

    def _drop_orphans(self) -> None:
        """Free the requests of gateways that nobody waits at any more.

        The aborts go through the feed, as every rank must drop them in the same step.
        """
        now, leaving = self._clock(), self._drain_until is not None
        orphans: list[Message] = [
            AbortMsg(uid=p.uid, attempt=p.attempt, run=p.run)
            for p in self._scheduler.held()
            if p.route is not None and self._gateways.left(p.route, now, leaving=leaving)
        ]
        if orphans:
            _log.info("aborting requests=%d of gateways that have left", len(orphans))
            self._injected.append(encode(orphans))


def apply(message: Message, scheduler: Scheduler, group: str, incarnation: int) -> bool:
    """Do what a message says. False: it is malformed or of another incarnation, and dropped.

    Every rank sees the same messages and drops the same ones.
    """
    if isinstance(message, AbortMsg):
        scheduler.abort(message.uid, message.run)
        return True
    if (
        not isinstance(message, UserMsg)
        or (message.group, message.incarnation) != (group, incarnation)
        or len(message.uid) != 16
        or len(message.prompt_ids) % 4
        or len(message.output_ids) % 4
    ):
        _log.warning("dropped message=%s uid=%s", type(message).__name__, _uid(message))
        return False
    scheduler.add(
        message.uid,
        unpack_ids(message.prompt_ids),
        message.sampling,
        route=message.route,
        attempt=message.attempt,
        output_ids=unpack_ids(message.output_ids),
        sent_chars=message.sent_chars,
    )
    return True


def _uid(message: Message) -> str:
    uid = getattr(message, "uid", b"")
    return uid.hex() if isinstance(uid, bytes) else ""
