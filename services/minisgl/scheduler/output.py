"""Where the scheduler's results go: interface, and what one step produced."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from minisgl.messages import ErrorInfo, FinishReason, TokenLogprobs
from minisgl.scheduler.request import PendingReq, Req

Index = npt.NDArray[np.int64]


@dataclass(slots=True)
class Emission:
    """The tokens of one step, one a request, for requests that are still wanted."""

    rows: Index
    """[K] rows of the tables; their requests are still there."""
    tokens: Index
    """[K]"""
    pos: npt.NDArray[np.int32]
    """[K] output tokens of the request before this one."""
    fresh: list[Req] = field(default_factory=list)
    """Requests of these rows that get their first token since they took their row."""
    finished: dict[int, FinishReason] = field(default_factory=dict)
    """By index: the token is the last one."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By index, where asked for."""


class OutputSink(Protocol):
    """Takes results: towards a detokenizer, or into the lists of an offline run."""

    def emit(self, emission: Emission) -> None:
        """One step's tokens."""

    def complete(self, pending: PendingReq, reason: FinishReason) -> None:
        """Replayed though its output was complete: only the end is missing."""

    def refuse(self, pending: PendingReq, error: ErrorInfo) -> None:
        """It cannot be computed. It was never queued."""

    def aborted(self, pending: PendingReq) -> None:
        """Ended because somebody asked for it."""


class NullSink:
    """For ranks that compute along with rank 0 but answer nobody."""

    def emit(self, emission: Emission) -> None:
        pass

    def complete(self, pending: PendingReq, reason: FinishReason) -> None:
        pass

    def refuse(self, pending: PendingReq, error: ErrorInfo) -> None:
        pass

    def aborted(self, pending: PendingReq) -> None:
        pass
