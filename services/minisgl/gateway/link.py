"""Between the bus, which blocks, and the event loop, which must not.

Two threads: one receives, one sends, in order, and exchanges states. Each hands a whole batch to
the loop at once, so that a busy bus does not wake it for every message.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from itertools import groupby

from minisgl.bus.base import Bus, BusError, reply_queue
from minisgl.messages import Message, WorkerState

log = logging.getLogger(__name__)

PUBLISH_SECONDS = 1.0
LOOK_SECONDS = 0.25
RETRY_SECONDS = 1.0
BUS_SILENCE_SECONDS = 3.0
"""Without a look at the bus for so long it counts as away."""
RECEIVE_SECONDS = 0.5
STOP_SECONDS = 3.0
"""At the end what is still to be sent has this long."""

_FAILURES = (BusError, OSError)


class Link:
    """This gateway's end of the bus. All callbacks run on the loop.

    `take` gets received messages, `look` the states of all workers, `fail` an error that no
    retry can mend. `state` makes this worker's own state; it is called in the sending thread.
    """

    def __init__(
        self,
        bus: Bus,
        gateway: str,
        clock: Callable[[], float],
        *,
        state: Callable[[], WorkerState],
        take: Callable[[list[Message]], None],
        look: Callable[[list[WorkerState]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._clock = clock
        self._state = state
        self._take = take
        self._look = look
        self._fail = fail
        self._out: queue.SimpleQueue[list[tuple[str, Message]]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._looked: float | None = None
        self._strays = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start both threads; called on the loop."""
        self._loop = asyncio.get_running_loop()
        self._bus.subscribe(reply_queue(self._gateway))
        for run, name in ((self._receive, "bus-receive"), (self._send, "bus-send")):
            thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def errors(self) -> int:
        """Entries that could not be read, and messages that are not for a gateway."""
        return self._bus.errors + self._strays

    def count_stray(self) -> None:
        """One more message that is not for a gateway."""
        self._strays += 1

    def healthy(self) -> bool:
        """Whether the bus answered lately."""
        return self._looked is not None and self._clock() - self._looked < BUS_SILENCE_SECONDS

    def send(self, messages: list[tuple[str, Message]]) -> None:
        """Send (queue, message) pairs, after all given before; does not wait."""
        if messages:
            self._out.put(messages)

    def stop(self) -> None:
        """Send what is left, end both threads and close the bus. Blocks for a few seconds."""
        self._stopping.set()
        self._out.put([])
        for thread in self._threads:
            thread.join(STOP_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            self._bus.close()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # a thread that ends unseen would leave a deaf gateway
            log.exception("the thread %s failed", threading.current_thread().name)
            self._call(self._fail, error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _receive(self) -> None:
        while not self._stopping.is_set():
            try:
                entries = self._bus.receive(RECEIVE_SECONDS)
                if entries:
                    self._call(self._take, [m for entry in entries for m in entry.messages])
                    self._bus.ack(entries)
            except _FAILURES as error:
                _tell("the bus cannot be read", error)
                self._stopping.wait(RETRY_SECONDS)

    def _send(self) -> None:
        pending: list[tuple[str, list[Message]]] = []
        publish_at = look_at = self._clock()
        while not (self._stopping.is_set() and self._out.empty() and not pending):
            now = self._clock()
            try:
                if now >= publish_at:
                    self._bus.publish_state(self._state())
                    publish_at = now + PUBLISH_SECONDS
                if now >= look_at:
                    self._call(self._seen, self._bus.read_states())
                    look_at = now + LOOK_SECONDS
                while pending:
                    self._bus.send(*pending[0])
                    pending.pop(0)
            except _FAILURES as error:
                _tell("the bus takes nothing", error)
                if self._stopping.wait(RETRY_SECONDS):
                    return
                continue
            pending = self._next_batches(max(0.0, min(publish_at, look_at) - now))

    def _next_batches(self, timeout: float) -> list[tuple[str, list[Message]]]:
        """All that waits to be sent, neighbours of one queue joined."""
        waiting: list[tuple[str, Message]] = []
        try:
            waiting += self._out.get(timeout=timeout)
            while True:
                waiting += self._out.get_nowait()
        except queue.Empty:
            pass
        return [
            (name, [message for _, message in pairs])
            for name, pairs in groupby(waiting, key=lambda pair: pair[0])
        ]

    def _seen(self, states: Sequence[WorkerState]) -> None:
        self._looked = self._clock()
        self._look(list(states))


def _tell(what: str, error: Exception) -> None:
    """Log a failure; a `BusError` has been logged by the bus."""
    log.log(
        logging.DEBUG if isinstance(error, BusError) else logging.WARNING, "%s: %s", what, error
    )
