"""Redis as the workers see it, with every way in which it lets them down.

Queues keep the order of writing. A queue with one reader is read from its start, and what was taken
is deleted at the next reading; `tok` has a consumer group. Faults take entries away, or undo their
deletion, as a flush or a restart from an old file does.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl.bus.base import TOK, Entry
from minisgl.messages import (
    Message,
    TokenizeMsg,
    WorkerState,
    decode,
    decode_state,
    encode,
    encode_state,
)

REMEMBERED = 200
"""Deleted entries that a restart may bring back."""


@dataclass(slots=True, eq=False)
class Item:
    """One entry of one queue."""

    queue: str
    number: int
    written: float
    data: bytes
    deleted: float = 0.0
    owner: str = ""
    """Of `tok`: who has it in hand, if anybody."""
    since: float = 0.0
    """When it was handed out last, in seconds."""
    deliveries: int = 0


class SimBus:
    """All queues and states. `silence` is the heartbeat time-out in seconds."""

    def __init__(self, clock: Callable[[], float], silence: float) -> None:
        self.away = False
        self.queues: dict[str, list[Item]] = defaultdict(list)
        self.poisonous: set[bytes] = set()
        """uids of requests whose `TokenizeMsg` was handed out three times or more."""
        self._clock = clock
        self._silence = silence
        self._states: dict[tuple[str, str], tuple[bytes, float]] = {}
        self._deleted: list[Item] = []
        self._count = 0

    # --- what workers do ------------------------------------------------------------------------

    def append(self, queue: str, batch: Sequence[Message]) -> None:
        """Write one entry."""
        self._count += 1
        self.queues[queue].append(Item(queue, self._count, self._clock(), encode(batch)))

    def first(self, queue: str, count: int) -> list[Item]:
        """The oldest entries of a queue with one reader; they stay."""
        return self.queues[queue][:count]

    def waiting(self, queue: str) -> bool:
        """Whether a queue has something that nobody has in hand."""
        return not self.away and any(not item.owner for item in self.queues[queue])

    def delete(self, items: Sequence[Item]) -> None:
        """Exactly these entries go, where they are still there."""
        for item in items:
            if item in self.queues[item.queue]:
                self.queues[item.queue].remove(item)
                item.deleted = self._clock()
                self._deleted.append(item)
        del self._deleted[:-REMEMBERED]

    def hand_out(self, consumer: str, count: int, *, recovers: bool = False) -> list[Item]:
        """New entries of `tok`, or those that others left for T; after a start its own."""
        now = self._clock()

        def due(item: Item) -> bool:
            if recovers:
                return item.owner == consumer
            return not item.owner or now - item.since >= self._silence

        items = [item for item in self.queues[TOK] if due(item)][:count]
        for item in items:
            item.owner, item.since = consumer, now
            item.deliveries += 1
            if item.deliveries >= 3:
                self.poisonous.update(
                    m.uid for m in decode(item.data) if isinstance(m, TokenizeMsg)
                )
        return items

    def publish(self, state: WorkerState, *, first: bool) -> bool:
        """Show a state. False: another process has taken this worker's place meanwhile."""
        key = (str(state.role), state.id)
        shown = self._states.get(key)
        if not first and shown is not None and decode_state(shown[0]).boot != state.boot:
            return False
        self._states[key] = (encode_state(state), self._clock() + 3 * self._silence)
        return True

    def read_states(self) -> list[WorkerState]:
        """All states that have not expired."""
        now = self._clock()
        return [decode_state(data) for data, until in self._states.values() if now < until]

    # --- faults ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Everything is gone, states and the consumer group too."""
        self.queues.clear()
        self._states.clear()

    def lose_newest(self, queue: str, count: int) -> None:
        """One queue loses its last entries."""
        del self.queues[queue][-count:]

    def lose_oldest(self, queue: str, count: int) -> None:
        """One queue is cut at its length limit."""
        del self.queues[queue][:count]

    def go_back(self, to: float) -> None:
        """Restart from a file as old as `to`: later writes are lost, later deletions undone."""
        for queue, items in list(self.queues.items()):
            self.queues[queue] = [item for item in items if item.written <= to]
        self.bring_back(lambda item: item.written <= to < item.deleted)

    def bring_back(self, chosen: Callable[[Item], bool]) -> None:
        """Undo deletions."""
        back = [item for item in self._deleted if chosen(item)]
        self._deleted = [item for item in self._deleted if item not in back]
        for item in back:
            items = self.queues[item.queue]
            items.append(item)
            items.sort(key=lambda item: item.number)


def read(items: Sequence[Item]) -> list[Entry]:
    """What a worker gets of these entries, from their bytes."""
    return [
        Entry(item.queue, decode(item.data), item.data, item, max(1, item.deliveries))
        for item in items
    ]
