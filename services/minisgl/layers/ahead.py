"""Weights on their way while memory is idle.

Between the products of few tokens stand small kernels, which hardly read. In a CUDA graph the next
product's first bytes are brought into the L2 cache meanwhile, by a kernel on a stream beside that
nobody waits for before the end.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minisgl.config import UsageError
from minisgl_kernels.prefetch import prefetch_function

AHEAD_ENV = "MINISGL_PREFETCH_MIB"
"""MiB of weights that are fetched while a small kernel runs; 0: none."""
DEFAULT_MIB = 12
TOKENS = 64
"""Beyond it a step has no idle memory to speak of."""


class Ahead:
    """The stream beside, for one step at a time."""

    def __init__(self, device: torch.device) -> None:
        """Raises `UsageError` if MINISGL_PREFETCH_MIB is no number."""
        text = os.environ.get(AHEAD_ENV, str(DEFAULT_MIB))
        if not text.isascii() or not text.isdigit():
            raise UsageError(f"{AHEAD_ENV} must be a whole number, 0 or more, not {text!r}")
        self._bytes = int(text) << 20
        self._kernel = prefetch_function() if self._bytes and device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None
        self._on = self._forked = self._compiled = False

    @contextmanager
    def step(self, x: torch.Tensor) -> Iterator[None]:
        """Within it, `fetch` works for a step of x [T, hidden] that is being captured."""
        if self._kernel is None or len(x) > TOKENS:
            yield
            return
        if not self._compiled:
            self._kernel(x, 0)
            self._compiled = True
        self._on = torch.cuda.is_current_stream_capturing()
        try:
            yield
        finally:
            if self._forked and self._stream is not None:
                end = torch.cuda.Event()  # type: ignore[no-untyped-call]
                end.record(self._stream)
                torch.cuda.current_stream().wait_event(end)
            self._on = self._forked = False

    def fetch(self, weight: torch.Tensor, times: int = 1) -> None:
        """Begin with a weight when what is queued now has ended; `times` as much, because there is
        so much time."""
        if not self._on or self._kernel is None:
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        begin = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begin.record()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(begin)
            self._kernel(weight, times * self._bytes)
        self._forked = True
