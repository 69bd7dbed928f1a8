"""What a worker needs of a bus, and nothing else.

A queue is a name. `tok` is shared: each entry goes to one of its readers. Every other queue has
one reader, the worker that it is named after. An entry is a batch of messages; entries of one
writer to one queue arrive in order. Delivery is at least once and may lose: see messages.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.messages import Message, WorkerState

TOK = "tok"
"""Requests for the tokenizers: the one queue with several readers."""


def req_queue(group: str, incarnation: int) -> str:
    """The queue of rank 0 of this incarnation of this group."""
    return f"req:{group}:{incarnation:016x}"


def detok_queue(detokenizer: str) -> str:
    """The queue of one detokenizer."""
    return f"detok:{detokenizer}"


def reply_queue(gateway: str) -> str:
    """The queue of one gateway."""
    return f"reply:{gateway}"


class BusError(Exception):
    """The bus does not answer or takes nothing, and has logged it. The caller may try again."""


REPLACED_CODE = 5
"""The exit code of a process whose place another one has taken."""


class ReplacedError(Exception):
    """Another process has taken this worker's place: this one must end."""


@dataclass(slots=True)
class Entry:
    """One received entry."""

    queue: str
    messages: list[Message]
    raw: bytes
    """As it travelled: rank 0 hands the same bytes to its peers."""
    token: object = None
    """What the bus needs to acknowledge it."""
    deliveries: int = 1
    """How often it was handed out without being acknowledged, this time included."""


class Bus(ABC):
    """One worker's end of the bus.

    `send` and `receive` may be called from two different threads, each always from the same one.
    Malformed entries are logged, counted in `errors` and dropped; they are never returned.
    """

    errors: int = 0
    """Entries that could not be read since the start; whoever finds a message in one that makes no
    sense adds to it."""
    congested: bool = False
    """What was sent cannot leave at present: say nothing that can be said later."""

    @abstractmethod
    def subscribe(self, queue: str) -> None:
        """Read this queue too, from now on. Called before the first `receive`."""

    @abstractmethod
    def send(self, queue: str, batch: Sequence[Message]) -> None:
        """Append one entry with these messages. Does not wait for a reader.

        An empty batch is not sent.
        """

    @abstractmethod
    def receive(self, timeout: float) -> list[Entry]:
        """Entries of the subscribed queues, or none after `timeout` seconds (0: at once)."""

    @abstractmethod
    def ack(self, entries: Sequence[Entry]) -> None:
        """These entries are done: what follows from them has been sent."""

    @abstractmethod
    def publish_state(self, state: WorkerState) -> None:
        """Show this worker's own state to everyone until it is replaced or the bus is closed."""

    @abstractmethod
    def read_states(self) -> list[WorkerState]:
        """The states of all workers of the service, this one's too."""

    @abstractmethod
    def close(self) -> None:
        """Take the own state back and let go of everything. What was sent still arrives."""
