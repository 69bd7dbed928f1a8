"""Signals that wait until a step is over."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

Handler = Callable[[int, FrameType | None], object]


class HeldSignals:
    """Keeps SIGINT and SIGTERM from being handled within the block, until `deliver` or its end.

    An exception of a handler would cut a step in two: pages without an owner would be left, and
    other ranks that wait in a collective. Handlers run in the main thread alone, so elsewhere this
    does nothing; nor does it where a signal has no handler in Python.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._arrive)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.deliver()

    def deliver(self) -> None:
        """Handle what has arrived; raises what the handlers raise."""
        while self._arrived:
            number, frame = self._arrived.pop(0)
            self._handlers[number](number, frame)

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))
