"""A captured decode step as two halves of its requests, computed beside each other.

Attention of a large batch waits for memory; products, norms and gates of a small model wait for one
another, and read little. So while one half attends, the other computes what lies between.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from minisgl.config import UsageError

if TYPE_CHECKING:
    from minisgl.attention.base import ForwardBatch

HALVES_ENV = "MINISGL_HALVES"
"""Least requests of a step that is computed in halves; 0, the default: none is."""

Compute = Callable[[torch.Tensor, "ForwardBatch"], torch.Tensor]


def least_requests() -> int:
    """The value of MINISGL_HALVES. Raises `UsageError` for what is no number."""
    text = os.environ.get(HALVES_ENV, "0")
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{HALVES_ENV} must be a whole number, 0 or more, not {text!r}")
    return int(text)


class Halves:
    """The halves of a batch, and the streams that they are queued on."""

    def __init__(
        self, batch: "ForwardBatch", stream: torch.cuda.Stream, beside: torch.cuda.Stream
    ) -> None:
        """`stream` is the current one whenever the batch is computed. The halves' tensors and
        lengths are views of the batch's; sizes are multiples of 8, but for what is left over."""
        count = len(batch.rows)
        middle = min(-(-count // 16) * 8, count - 1)
        self.parts = slice(0, middle), slice(middle, count)
        self.batches = _part(batch, self.parts[0]), _part(batch, self.parts[1])
        self._stream, self._beside = stream, beside

    def compute(self, call: Compute, x: torch.Tensor) -> torch.Tensor:
        """Queue `call` of both halves of x [B, ...] at the same time: what it gives for both, one
        behind the other."""
        forked, joined = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        forked.record(self._stream)
        with torch.cuda.stream(self._beside):
            self._beside.wait_event(forked)
            second = call(x[self.parts[1]], self.batches[1])
            joined.record(self._beside)
        first = call(x[self.parts[0]], self.batches[0])
        self._stream.wait_event(joined)
        return torch.cat((first, second))


def _part(batch: "ForwardBatch", part: slice) -> "ForwardBatch":
    """Some requests of a batch that decodes, where requests are tokens."""
    lens = batch.device_lens_dev
    return dataclasses.replace(
        batch,
        input_ids=batch.input_ids[part],
        positions=batch.positions[part],
        out_loc=batch.out_loc[part],
        rows=batch.rows[part],
        cached_lens=batch.cached_lens[part],
        device_lens=batch.device_lens[part],
        last_indices=batch.last_indices[part],
        device_lens_dev=None if lens is None else lens[part],
        metadata=None,
        halves=None,
    )
