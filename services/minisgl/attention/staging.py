"""Pinned host memory that copies to the device read while the next step is prepared."""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream, as `torch.cuda.Event`."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def pinned(nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 in host memory that the device reads by itself."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class PinnedRing:
    """Buffers that are used in turn, none before the copies out of its last use have ended.

    An asynchronous copy reads its source when the stream gets there, which under overlap scheduling
    is a step later: written again by then, it would send the lengths of step N + 1 into step N, and
    a kernel would follow pages that are not there.
    """

    def __init__(
        self, nbytes: int, depth: int = 2, *, allocate: Callable[[int], torch.Tensor] = pinned,
        event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:  # fmt: skip
        self._buffers = [allocate(nbytes) for _ in range(depth)]
        self._events = [event() for _ in range(depth)]
        self._used = [False] * depth
        self.number = depth - 1
        """Which buffer was taken last."""

    def take(self) -> torch.Tensor:
        """The next buffer [nbytes] uint8, to write to; blocks while it is still read."""
        self.number = (self.number + 1) % len(self._buffers)
        if self._used[self.number]:
            self._events[self.number].synchronize()
        return self._buffers[self.number]

    def sent(self) -> None:
        """The copies out of the buffer that was taken last are queued on the current stream."""
        self._events[self.number].record()
        self._used[self.number] = True
