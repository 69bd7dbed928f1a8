"""The four kinds of workers around the real cores, cut into actions that nothing interrupts.

Between two `act` calls of one worker anything may happen: it is killed, paused, or others run.
"""

import contextlib
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from minisgl.bus.base import TOK, Bus, Entry, detok_queue, reply_queue, req_queue
from minisgl.config import EngineConfig
from minisgl.detokenizer.worker import DetokenizerCore
from minisgl.engine.step import StepInput, StepOutput
from minisgl.gateway.fleet import Fleet
from minisgl.gateway.link import BUS_SILENCE_SECONDS
from minisgl.gateway.request import Limits
from minisgl.gateway.requests import Requests
from minisgl.messages import (
    AuditMsg,
    GroupLoad,
    Message,
    SamplingParams,
    TokenLogprobs,
    UserReply,
    WorkerState,
)
from minisgl.scheduler.feed import SingleFeed
from minisgl.scheduler.rank import Rank
from minisgl.scheduler.replies import ReplySink
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tokenizer.loop import POISONOUS
from minisgl.tokenizer.worker import TokenizerCore

from ..scheduler.model_engine import ModelEngine
from .bus import Item, SimBus, read

Batches = list[tuple[str, list[Message]]]
"""(queue, batch) to write, in this order."""

ROWS = 3
"""Requests that a group runs at once."""


class Surroundings(Protocol):
    """What a worker needs of its world."""

    bus: SimBus
    now: float
    silence: float

    def confirmed(self) -> bool:
        """Whether the writer hears that its write arrived; else it writes again."""

    def several(self) -> int:
        """How many entries are read at once."""

    def coin(self) -> bool: ...

    def clock(self) -> float: ...


class Worker:
    """One process. Subclasses say what it does once nothing is left to write."""

    def __init__(self, world: Surroundings, state: WorkerState, queue: str) -> None:
        self.world = world
        self.state = state
        self.queue = queue
        """The one that it reads."""
        self.unsent: Batches = []
        """In order; the first one may have been written already, unconfirmed."""
        self.paused_until = 0.0
        self.alive = True
        self._taken: list[Item] = []
        self._beat_at = 0.0
        self._shown = False

    def act(self) -> None:
        """Do one thing, or nothing."""
        raise NotImplementedError

    def busy(self) -> bool:
        """Whether anything but time is needed for it to go on."""
        return bool(self.unsent) or self.world.bus.waiting(self.queue)

    def write(self) -> None:
        """Write the first unsent batch, and forget it once that is confirmed."""
        self.world.bus.append(*self.unsent[0])
        if self.world.confirmed():
            del self.unsent[0]

    def read_own(self) -> list[Entry]:
        """The next entries of a queue of its own; those of the last time are deleted."""
        self.world.bus.delete(self._taken)
        self._taken = self.world.bus.first(self.queue, self.world.several())
        return read(self._taken)

    def beat(self) -> bool:
        """Once a second: whether it was time. Who has been replaced ends."""
        if self.world.now < self._beat_at:
            return False
        self._beat_at = self.world.now + 1
        self.state.beat += 1
        self.publish()
        return True

    def publish(self) -> None:
        """Show the own state, if the bus answers."""
        if not self.world.bus.away:
            self.alive = self.world.bus.publish(self.state, first=not self._shown)
            self._shown = True


def joined(messages: Iterable[tuple[str, Message]]) -> Batches:
    """Neighbours for one queue as one batch."""
    return [(q, [m for _, m in pairs]) for q, pairs in groupby(messages, key=itemgetter(0))]


class Gateway(Worker):
    def __init__(self, world: Surroundings, id: str, boot: int, max_attempts: int) -> None:
        state = WorkerState(role="gateway", id=id, boot=boot, beat=0)
        super().__init__(world, state, reply_queue(id))
        self.fleet = Fleet(world.silence)
        limits = Limits(world.silence, max_attempts=max_attempts)
        self.requests = Requests(id, boot, self.fleet, limits)
        self._look_at = 0.0
        self._looked = world.now

    def act(self) -> None:
        now, bus = self.world.now, self.world.bus
        self.beat()
        if now >= self._look_at:
            self._look_at = now + 0.5
            if not bus.away:
                self._looked = now
                if self.fleet.observe(bus.read_states(), now):
                    self.requests.restart_clocks(now)
            if now - self._looked >= BUS_SILENCE_SECONDS:
                self.requests.restart_clocks(now)
            self.requests.tick(now)
        self.unsent += joined(self.requests.take_outbox())
        if bus.away:
            return
        if self.unsent and self.world.coin():
            self.write()
            return
        entries = self.read_own()
        for message in (m for entry in entries for m in entry.messages):
            if isinstance(message, UserReply):
                self.requests.reply(message, now)
            elif isinstance(message, AuditMsg):
                self.requests.audit(message, now)


class Pipe(Worker):
    """A tokenizer or detokenizer: receive and handle, write what follows, acknowledge."""

    def __init__(self, world: Surroundings, id: str, boot: int, core: object) -> None:
        assert isinstance(core, TokenizerCore | DetokenizerCore)
        queue = TOK if isinstance(core, TokenizerCore) else detok_queue(id)
        super().__init__(world, WorkerState(role=core.role, id=id, boot=boot, beat=0), queue)
        self.core = core
        self._hand: list[Item] = []
        self._recovers = True

    def act(self) -> None:
        bus = self.world.bus
        if self.beat():
            self.core.tick()
        if bus.away:
            return
        if self.unsent:
            self.write()
        elif self._hand:
            bus.delete(self._hand)
            self._hand = []
        else:
            self._receive()

    def _receive(self) -> None:
        if isinstance(self.core, DetokenizerCore):
            entries = self.read_own()
        else:
            items = self.world.bus.hand_out(
                self.state.id, self.world.several(), recovers=self._recovers
            )
            self._recovers = False
            self._hand, entries = items, read(items)
        batches: dict[str, list[Message]] = {}
        for entry in entries:
            answer = self.core.give_up if entry.deliveries >= POISONOUS else self.core.handle
            for queue, message in (out for m in entry.messages for out in answer(m)):
                batches.setdefault(queue, []).append(message)
        self.unsent = list(batches.items())


class _TurnOver(Exception):
    """The rank's loop has turned once."""


class Group(Worker):
    """Rank 0 of a group of one, from its forming to its end."""

    def __init__(
        self, world: Surroundings, name: str, boot: int, *, salt: int, overlap: bool, length: int
    ):
        state = WorkerState(role="rank", id=f"{name}/0", boot=boot, beat=0)
        super().__init__(world, state, req_queue(name, boot))
        self.incarnation = boot
        self.draining = False
        settings = EngineConfig(
            model="m", max_running_requests=ROWS, max_prefill_tokens=8, reserve_tokens=2,
            overlap_scheduling=overlap,
        )  # fmt: skip
        engine = LogprobEngine(
            num_pages=3 * length // 4, page_size=2, max_seq_len=length, max_running=ROWS
        )
        engine.salt = salt
        bus = _RankBus(self)
        sink = ReplySink(bus, name, boot, ROWS + 1)
        self.scheduler = Scheduler(settings, engine, sink)
        sink.scheduler = self.scheduler
        self._turns = 0
        self._left = False
        self.rank = Rank(
            self.scheduler, SingleFeed(), group=name, incarnation=boot, bus=bus, sink=sink,
            state=self._show, publish=lambda _: self.publish(), turn=self._turn, drain_seconds=1.0,
            silence=world.silence, clock=world.clock,
        )  # fmt: skip

    def act(self) -> None:
        if self.unsent and not self.world.bus.away and self.world.coin():
            self.unsent = [(q, [m for _, b in same for m in b]) for q, same in self._neighbours()]
            self.write()
        elif self._left:
            self.alive = bool(self.unsent)  # what it said last still goes out
        else:
            self._turns = 0
            with contextlib.suppress(_TurnOver):
                self.rank.run(lambda: self.draining)
                self._left = True

    def busy(self) -> bool:
        return super().busy() or not self.scheduler.idle

    def _neighbours(self) -> Iterable[tuple[str, list[tuple[str, list[Message]]]]]:
        return ((queue, list(same)) for queue, same in groupby(self.unsent, key=itemgetter(0)))

    def _turn(self) -> None:
        if self._turns:
            raise _TurnOver
        self._turns = 1

    def _show(self, load: GroupLoad | None) -> WorkerState:
        self.state.load = load
        self.state.beat += 1
        self.state.draining = self.draining
        return self.state


class _RankBus(Bus):
    """Never waits: what is sent is written when the bus answers."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._states: list[WorkerState] = []

    @property
    def congested(self) -> bool:  # type: ignore[override]
        return self._group.world.bus.away

    def subscribe(self, queue: str) -> None: ...

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        self._group.unsent.append((queue, list(batch)))

    def receive(self, timeout: float) -> list[Entry]:
        away = self._group.world.bus.away
        return [] if away else self._group.read_own()

    def ack(self, entries: Sequence[Entry]) -> None: ...

    def publish_state(self, state: WorkerState) -> None: ...

    def read_states(self) -> list[WorkerState]:
        if not self.congested:
            self._states = self._group.world.bus.read_states()
        return self._states

    def close(self) -> None: ...


class LogprobEngine(ModelEngine):
    """Reports the token itself as its log probability, where one is wanted."""

    def admit(self, row: int, sampling: SamplingParams, *ids: object, **named: object) -> None:
        super().admit(row, sampling, *ids, **named)  # type: ignore[arg-type]
        self._wants = getattr(self, "_wants", {})
        self._wants[row] = sampling.logprobs is not None

    def forward(self, step: StepInput) -> StepOutput:
        output = super().forward(step)
        if step.wants_logprobs:
            result = output.wait()
            result.logprobs = {
                i: TokenLogprobs(logprob=-float(result.tokens[i]))
                for i, row in enumerate(step.rows.tolist())
                if self._wants[row]
            }
        return output
