"""Which gateways still wait for what this group computes, as its rank 0 sees them."""

from collections.abc import Iterable, Sequence

from minisgl.messages import Route, WorkerState

FORGOTTEN_AFTER = 3
"""Heartbeat time-outs of silence after which nobody waits for a gateway's requests."""
PAUSE_SECONDS = 2.0
"""After a gap of this length between two looks the fault may be our own: clocks start again."""


class Gateways:
    """Judges each process by its beats: replaced, or silent while Redis could be read and written.

    That it is not shown proves nothing: it may only be cut off, or Redis was flushed. `silence` is
    the heartbeat time-out; it and `now`, this process's clock, are in seconds.
    """

    def __init__(self, silence: float) -> None:
        self._limit = FORGOTTEN_AFTER * silence
        self._boots: dict[str, int] = {}
        self._moved: dict[tuple[str, int], tuple[int, float]] = {}
        """By (id, boot): its beat, and when that moved last."""
        self._looked: float | None = None

    def look(self, states: Sequence[WorkerState], held: Iterable[Route], now: float) -> None:
        """A look at the bus, which answers; `held` are the routes of the group's requests."""
        known, self._moved = self._moved, {}
        if self._looked is None or now - self._looked > PAUSE_SECONDS:
            known = {key: (beat, now) for key, (beat, _) in known.items()}
        self._looked = now
        shown = [s for s in states if s.role == "gateway"]
        self._boots = {s.id: s.boot for s in shown}
        for route in held:
            key = (route.gateway, route.boot)
            self._moved[key] = known.get(key, (-1, now))
        for state in shown:
            key = (state.id, state.boot)
            last = known.get(key)
            self._moved[key] = last if last and last[0] == state.beat else (state.beat, now)

    def unanswered(self) -> None:
        """The bus did not answer: until it does nobody can be heard, and clocks start again."""
        self._looked = None

    def left(self, route: Route, now: float, *, leaving: bool = False) -> bool:
        """Whether nobody waits there. A group that is `leaving` does not wait for who is hidden."""
        boot = self._boots.get(route.gateway)
        if boot is None and leaving:
            return True
        if boot is not None and boot != route.boot:
            return True
        if self._looked is None:
            return False
        _, moved = self._moved.get((route.gateway, route.boot), (-1, now))
        return now - moved >= self._limit
