"""Which workers of the service live, judged from the states that they publish.

No clock of another host is read and absence proves nothing by itself (a flushed bus shows nobody
for a second): a worker is silent when its beat stood still for the heartbeat time-out while this
process could read the bus. No I/O here; `now` is this process's clock, in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.messages import GroupLoad, WorkerState

PAUSE_SECONDS = 2.0
"""After a gap of this length between two looks the fault may be our own: clocks start again."""

LATE_SECONDS = 3.0
"""Beats come each second: a worker whose beat is older is not well."""

FORGET_AFTER = 3
"""A worker that is not shown and silent for this many time-outs is forgotten."""


@dataclass(slots=True)
class Seen:
    """The last state of one worker, and when its beat last moved."""

    state: WorkerState
    moved: float
    shown: bool = True
    """Whether the newest look at the bus had it."""


@dataclass(slots=True)
class Formed:
    """The present life of a group; incarnation 0: its rank 0 is new, and has not formed yet."""

    incarnation: int
    boot: int
    """Of rank 0."""
    since: float
    """When it was first seen."""


class Fleet:
    """The workers as this process sees them. `silence` is the heartbeat time-out, in seconds."""

    def __init__(self, silence: float) -> None:
        self.silence = silence
        self.max_model_len: int | None = None
        """Of the group seen last; kept while no group is there."""
        self._seen: dict[tuple[str, str], Seen] = {}
        self._formed: dict[str, Formed] = {}
        self._looked: float | None = None
        self._turn = 0
        self.unwell: float | None = None
        """When a worker was last seen to be late, gone or replaced, or the bus not seen at all."""

    def observe(self, states: Sequence[WorkerState], now: float) -> bool:
        """Take a fresh look at the bus; whether the last one is so old that clocks start again.

        A look that failed is not reported.
        """
        paused = self._looked is not None and now - self._looked > PAUSE_SECONDS
        self._looked = now
        for seen in self._seen.values():
            seen.shown = False
            if paused:
                seen.moved = now
        for state in states:
            key = (str(state.role), state.id)
            known = self._seen.get(key)
            if known is not None and known.state.boot != state.boot:
                self.unwell = now
            if known is None or (known.state.boot, known.state.beat) != (state.boot, state.beat):
                self._seen[key] = Seen(state, now)
            else:
                known.state, known.shown = state, True
            if state.role == "rank" and state.id.endswith("/0"):
                self._observe_rank0(state, now)
        if paused or any(
            now - seen.moved >= LATE_SECONDS and seen.state.role != "gateway"
            for seen in self._seen.values()
        ):
            self.unwell = now
        limit = FORGET_AFTER * self.silence
        for key, seen in list(self._seen.items()):
            if not seen.shown and now - seen.moved > limit:
                del self._seen[key]
        return paused

    def _observe_rank0(self, state: WorkerState, now: float) -> None:
        group, incarnation = state.id.removesuffix("/0"), 0
        if state.load is not None:
            group, incarnation = state.load.group, state.load.incarnation
            self.max_model_len = state.load.max_model_len
        known = self._formed.get(group)
        if known is None and not incarnation:
            return
        same_boot = known is not None and known.boot == state.boot
        if known is None or not same_boot or incarnation not in (0, known.incarnation):
            self._formed[group] = Formed(incarnation, state.boot, now)

    def group_left(self, group: str, incarnation: int) -> bool:
        """Whether this incarnation is known to be over: another one took its place."""
        known = self._formed.get(group)
        return known is not None and known.incarnation != incarnation

    def all_left(self, since: float, now: float) -> bool:
        """Whether no group is left of those that were there at `since`: each was replaced, or is
        silent for the time-out. What was given to one of them since then nobody computes."""
        return bool(self._formed) and not any(
            formed.since <= since and not self.worker_left("rank", f"{group}/0", formed.boot, now)
            for group, formed in self._formed.items()
        )

    def worker_left(self, role: str, id: str, boot: int, now: float) -> bool:
        """Whether this process is known to be gone: replaced, or silent for the time-out.

        While the bus is away nobody can be heard, so silence counts up to the newest look only.
        """
        seen = self._seen.get((role, id))
        if seen is None or seen.state.boot != boot:
            return True
        until = now if self._looked is None else min(now, self._looked)
        return until - seen.moved >= self.silence

    def takers(self, role: str, now: float) -> list[WorkerState]:
        """The workers of a role that take new work: shown, beating, not draining."""
        return [
            seen.state
            for (r, _), seen in self._seen.items()
            if r == role
            and seen.shown
            and not seen.state.draining
            and now - seen.moved < self.silence
        ]

    def missing(self, now: float) -> str | None:
        """What is lacking before a request can be served, in words; None if nothing is."""
        if not any(state.load is not None for state in self.takers("rank", now)):
            return "no group of ranks is ready"
        for role in ("tokenizer", "detokenizer"):
            if not self.takers(role, now):
                return f"no {role} is ready"
        return None

    def next_detokenizer(self, now: float, avoid: str = "") -> WorkerState | None:
        """A detokenizer that takes new work, each in its turn; None if there is none.

        `avoid` is the id of one that is taken only where there is no other.
        """
        takers = sorted(self.takers("detokenizer", now), key=lambda state: state.id)
        takers = [state for state in takers if state.id != avoid] or takers
        if not takers:
            return None
        self._turn += 1
        return takers[self._turn % len(takers)]

    def bus_errors(self) -> list[tuple[str, str, int]]:
        """(role, id, count) of every other worker that is shown; gateways show their own."""
        shown = [seen.state for seen in self._seen.values() if seen.shown]
        return sorted((s.role, s.id, s.bus_errors) for s in shown if s.role != "gateway")

    def loads(self) -> list[GroupLoad]:
        """The figures of every group that is shown, for the metrics."""
        shown = [seen.state.load for seen in self._seen.values() if seen.shown]
        return sorted((load for load in shown if load is not None), key=lambda load: load.group)
