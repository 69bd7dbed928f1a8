"""All host arrays of a step in one block of bytes, which reaches the device in one copy.

A copy from pinned memory is asynchronous: the block must not change before the device has read it,
so there are several blocks, used in turn.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.staging import Event, PinnedRing

Array = npt.NDArray[Any]
_ALIGN = 16
MOST_VIEWS = 1024

_TORCH_TYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.uint8): torch.uint8,
}


class Layout:
    """Where named arrays lie in a block: each starts at a multiple of 16 bytes."""

    def __init__(self, fields: Iterable[tuple[str, type[np.generic], int]], start: int = 0) -> None:
        """`fields` are (name, type, length); the first one lies at `start` bytes or behind it."""
        self._places: dict[str, tuple[int, int, np.dtype[Any]]] = {}
        at = start
        for name, kind, length in fields:
            dtype = np.dtype(kind)
            at += -at % _ALIGN
            self._places[name] = (at, at + length * dtype.itemsize, dtype)
            at += length * dtype.itemsize
        self.end = at
        """Bytes from the start of the block to the end of the last array."""

    def arrays(self, block: npt.NDArray[np.uint8]) -> dict[str, Array]:
        """The arrays as views of a block on the host."""
        return {name: block[a:b].view(t) for name, (a, b, t) in self._places.items()}

    def tensors(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as views of a block of bytes on the device."""
        return {name: block[a:b].view(_TORCH_TYPES[t]) for name, (a, b, t) in self._places.items()}


def upload(array: Array, device: torch.device) -> torch.Tensor:
    """A copy on the device that the host does not wait for; torch keeps the pinned memory until
    the device has read it."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class _NoEvent:
    """On a CPU a copy is over when it returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def new_event(device: torch.device) -> Event:
    """An event of the current stream; on a CPU one that has always happened."""
    event: Event = torch.cuda.Event() if device.type == "cuda" else _NoEvent()  # type: ignore[no-untyped-call]
    return event


class Staging:
    """Blocks of `size` bytes in pinned memory, and the one on the device that they are copied to.

    The device reads and overwrites its block in stream order, so one is enough there. Views of it
    stay valid, which CUDA graphs rely on.
    """

    def __init__(self, size: int, device: torch.device, blocks: int = 3) -> None:
        self.size = size

        def allocate(nbytes: int) -> torch.Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

        self._ring = PinnedRing(size, blocks, allocate=allocate, event=lambda: new_event(device))
        self.block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._ends: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self) -> npt.NDArray[np.uint8]:
        """The bytes of a block to fill: waits until the device has read what it held."""
        self._filled = self._ring.take()
        return self._filled.numpy()

    def send(self, size: int) -> None:
        """Queue the copy of the block's first `size` bytes on the current stream."""
        number = self._ring.number
        ends = self._ends.get((number, size))
        if ends is None:  # graphs have the same few sizes again and again, and a view costs time
            if len(self._ends) > MOST_VIEWS:
                self._ends.clear()
            ends = self._ends[number, size] = self.block[:size], self._filled[:size]
        ends[0].copy_(ends[1], non_blocking=True)
        self._ring.sent()
