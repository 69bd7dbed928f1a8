"""A bus whose calls never wait, for the step loop of rank 0: threads do the waiting.

While the bus is away what was sent is kept in order, neighbours for one queue joined, and sent when
it answers again; what was not confirmed is sent again. That is bounded by what runs: nothing new
arrives meanwhile.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from minisgl.bus.base import Bus, BusError, Entry
from minisgl.messages import Message, WorkerState

RETRY_SECONDS = 1.0
STATES_SECONDS = 1.0
RECEIVE_SECONDS = 0.5
CLOSE_SECONDS = 3.0
"""What is still to be sent at the end gets so long."""


class BackgroundBus(Bus):
    """Wraps `bus` for a worker that reads queues of its own only.

    `each_second` runs in the sending thread; `guard` in both threads before any call to the bus,
    and ends the process if it has to. Whatever either of them raises beside `BusError` is raised
    again by the worker's next call.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        each_second: Callable[[], None] = lambda: None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus = bus
        self._each_second = each_second
        self._guard = guard
        self._out: deque[tuple[str, list[Message]]] = deque()
        self._wake = threading.Condition()
        self._in: queue.SimpleQueue[list[Entry]] = queue.SimpleQueue()
        self._state: WorkerState | None = None
        self._states: list[WorkerState] = []
        self._answers = False
        self._failure: BaseException | None = None
        self._closing = False
        self._threads: list[threading.Thread] = []

    @property
    def errors(self) -> int:  # type: ignore[override]
        """Entries that could not be read since the start."""
        return self._bus.errors

    @property
    def congested(self) -> bool:  # type: ignore[override]
        """The bus does not answer, or takes nothing."""
        return not self._answers

    def start(self, *, receives: bool) -> None:
        """Start both threads, after the last `subscribe`; one that subscribed to nothing sends."""
        threads = [(self._send, "bus-send")]
        if receives:
            threads.append((self._receive, "bus-receive"))
        for run, name in threads:
            thread = threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def subscribe(self, queue: str) -> None:
        self._bus.subscribe(queue)

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        if batch:
            self._raise()
            with self._wake:
                self._out.append((queue, list(batch)))
                self._wake.notify()

    def receive(self, timeout: float) -> list[Entry]:
        self._raise()
        entries: list[Entry] = []
        try:
            entries += self._in.get(timeout=timeout) if timeout > 0 else self._in.get_nowait()
            while True:
                entries += self._in.get_nowait()
        except queue.Empty:
            return entries

    def ack(self, entries: Sequence[Entry]) -> None:
        pass  # the queues of one reader need none

    def publish_state(self, state: WorkerState) -> None:
        self._raise()
        with self._wake:
            self._state = state
            self._wake.notify()

    def read_states(self) -> list[WorkerState]:
        """As they were within the last second, or when the bus last answered."""
        self._raise()
        return self._states

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        self._bus.close()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # the worker must not go on deaf or dumb
            self._failure = error
            self._in.put([])

    def _receive(self) -> None:
        while not self._closing:
            try:
                self._guard()
                entries = self._bus.receive(RECEIVE_SECONDS)
                if entries:
                    self._in.put(entries)
            except BusError:
                time.sleep(RETRY_SECONDS)

    def _send(self) -> None:
        next_second = 0.0
        deadline: float | None = None
        while True:
            now = time.monotonic()
            if self._closing:
                deadline = now + CLOSE_SECONDS if deadline is None else deadline
                if not self._out or now >= deadline:
                    return
            try:
                self._guard()
                state, self._state = self._state, None
                if state is not None:
                    self._bus.publish_state(state)
                if now >= next_second:
                    self._each_second()
                    self._states = self._bus.read_states()
                    next_second = now + STATES_SECONDS
                self._answers = True
                self._send_all()
            except BusError:
                self._answers = False
                time.sleep(RETRY_SECONDS)
                continue
            with self._wake:
                if not self._out and self._state is None and not self._closing:
                    self._wake.wait(max(0.0, next_second - time.monotonic()))

    def _send_all(self) -> None:
        while self._out:
            name = self._out[0][0]
            batch: list[Message] = []
            taken = 0
            while taken < len(self._out) and self._out[taken][0] == name:
                batch += self._out[taken][1]
                taken += 1
            self._guard()
            self._bus.send(name, batch)
            for _ in range(taken):
                self._out.popleft()
