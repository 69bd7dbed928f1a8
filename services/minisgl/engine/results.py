"""The way of sampled tokens to the host: copied behind the step, on a stream of their own."""

import time
from collections.abc import Callable

import numpy as np
import torch

from minisgl.engine.logprobs import Logprobs
from minisgl.engine.step import StepResult

RESULTS = 4
"""Steps whose tokens may be unread: the scheduler has two."""


class _Slot:
    """A place in pinned memory for the tokens of one step."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.array = self.tensor.numpy()
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.span: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Where the step begins and ends on its stream, if that is measured."""
        self.output: CudaOutput | None = None
        self.source: object = None
        """What the copy reads: its memory must not be given to others meanwhile."""
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, size: int) -> torch.Tensor:
        """The first `size` tokens; kept, because a view costs microseconds."""
        if size not in self._parts:
            self._parts[size] = self.tensor[:size]
        return self._parts[size]


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Results:
    """The ring of these places, and the stream of the copies."""

    def __init__(self, size: int, stream: torch.cuda.Stream, check: Callable[[], None]) -> None:
        """For steps of at most `size` tokens, computed on `stream`. `check` raises if a peer is
        lost."""
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._slots = [_Slot(size, device) for _ in range(RESULTS)]
        self._next = 0
        self._stream, self._copies = stream, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.check = check
        self.waited = 0.0
        """Seconds that the host has waited for the device."""
        self.busy = 0.0
        """Seconds from the beginning to the end of each step on the device, of steps that were read
        since `measure_busy`."""
        self.copied: torch.cuda.Event | None = None
        """The last copy: before it is over, nothing may overwrite what it reads."""

    def measure_busy(self) -> None:
        """Count `busy` from the next step on. It costs two events a step."""
        for slot in self._slots:
            slot.span = (_timed_event(), _timed_event())

    def begin(self) -> None:
        """The work of the next step follows on its stream, at once: time that the host still needs
        would count as the device's."""
        slot = self._slots[self._next]
        if slot.span is not None:
            if slot.output is not None:
                slot.output.wait()  # reads the two events before they are recorded anew
            slot.span[0].record(self._stream)

    def queue(self, tokens: torch.Tensor, count: int, logprobs: Logprobs | None) -> "CudaOutput":
        """Copy what was sampled to the host: the first `count` of `tokens` count. The current
        stream is that of the step, and is again when this returns."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.output is not None:
            slot.output.wait()  # takes its tokens out, if nobody has read them
        if slot.span is not None:
            slot.span[1].record(self._stream)
        self._computed.record(self._stream)
        self._copies.wait_event(self._computed)
        torch.cuda.set_stream(self._copies)  # not `with stream`, which takes ten times as long
        try:
            slot.part(len(tokens)).copy_(tokens, non_blocking=True)
            on_host = None if logprobs is None else logprobs.queue_to_host()
            slot.event.record()
        finally:
            torch.cuda.set_stream(self._stream)
        self.copied = slot.event
        slot.source = (tokens, logprobs)
        slot.output = CudaOutput(self, slot, count, on_host)
        return slot.output


class CudaOutput:
    """A queued step. Once read, it keeps its result and no place of the ring."""

    def __init__(
        self, results: Results, slot: _Slot, count: int, logprobs: Logprobs | None
    ) -> None:
        self._results, self._slot, self._count, self._logprobs = results, slot, count, logprobs
        self._span = slot.span
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        if self._result is None:
            began = time.perf_counter()
            self._slot.event.synchronize()
            self._results.waited += time.perf_counter() - began
            if self._span is not None:
                begin, end = self._span
                self._results.busy += begin.elapsed_time(end) / 1e3
            self._results.check()  # of a lost peer the collectives end, and then come garbage
            tokens = self._slot.array[: self._count].astype(np.int64)
            logprobs = None if self._logprobs is None else self._logprobs.to_host()
            self._result = StepResult(tokens, logprobs)
        return self._result
