"""What the scheduler hands to an engine for one step, and what comes back. Host arrays only."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from minisgl.messages import SamplingParams, TokenLogprobs

Int32s = npt.NDArray[np.int32]
Index = npt.NDArray[np.int64]


@dataclass(slots=True)
class TableWrites:
    """Changes of one table since the last step: flat places (row * max_seq_len + column)."""

    index: Index
    """Each place once, so that a scatter may write in any order."""
    values: Int32s


@dataclass(slots=True)
class StepInput:
    """One batch: B requests with T new tokens in all, request after request.

    The engine applies both writes first, in step order: rows are used again by later requests.
    """

    rows: Index
    """[B] rows of the tables."""
    cached_lens: Int32s
    """[B] tokens that have keys and values before this step."""
    device_lens: Int32s
    """[B] tokens that have them after it."""
    positions: Index
    """[T] place of each new token in its sequence."""
    input_index: Index
    """[T] flat place of each new token in the token pool."""
    out_loc: Int32s
    """[T] KV slot of each new token."""
    output_index: Index
    """[B] flat place in the token pool for the sampled token; the dummy row's for a chunk."""
    output_pos: Int32s
    """[B] output tokens of the request before this draw: with the seed, it fixes the noise."""
    samples: npt.NDArray[np.bool_]
    """[B] False: a chunk, whose sample is dropped."""
    is_decode: bool
    """Every request has one new token."""
    wants_logprobs: bool
    """Some request of the batch asked for log probabilities."""
    slot_writes: TableWrites | None
    token_writes: TableWrites | None


@dataclass(slots=True)
class StepResult:
    """What a step computed, on the host."""

    tokens: Index
    """[B] sampled token ids; meaningless where `samples` is False."""
    logprobs: dict[int, TokenLogprobs] | None = None
    """By index in the batch, for the requests that asked."""


class StepOutput(Protocol):
    """A queued step."""

    def wait(self) -> StepResult:
        """Block until the step is computed and its result is on the host."""
        ...


class StepEngine(ABC):
    """Computes steps in the order they are given. The scheduler needs nothing else of it."""

    num_pages: int
    """Pages that requests may use; the dummy page comes on top."""
    page_size: int
    max_seq_len: int
    """Most tokens of prompt and output together that the tables and the model allow."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    synchronous: bool = False
    """A step is computed when `forward` returns: its result costs no wait, whenever it is read."""
    prefill_rate: float = float("inf")
    """About how many tokens of prompts it computes in a second."""
    waited: float = 0.0
    """Seconds that `StepOutput.wait` has blocked in all."""
    busy: float = 0.0
    """Seconds in which the device had a step to compute, counted from `measure_busy` on: each step
    that was read, from its first work on the device to its last. Between ranks a step includes the
    time that one waits for another."""
    report: Mapping[str, Any] = MappingProxyType({})
    """What its start took: seconds, bytes."""

    @abstractmethod
    def admit(
        self, row: int, sampling: SamplingParams, prompt_ids: Int32s, output_ids: Int32s
    ) -> None:
        """A request takes this row: set up what its sampling needs to remember."""

    @abstractmethod
    def release(self, row: int) -> None:
        """The row is free again: forget it. Steps that are queued do not need it any more."""

    @abstractmethod
    def forward(self, step: StepInput) -> StepOutput:
        """Queue one step and return at once, where the device can."""

    def measure_busy(self) -> None:  # noqa: B027 (nothing is computed)
        """Begin to count `busy`."""

    def take_phases(self) -> dict[str, float]:
        """Seconds of each phase of the CPU's kernels since the last call. The first one begins to
        count and has nothing yet; where torch or a GPU computes, there is never anything."""
        return {}

    def close(self) -> None:  # noqa: B027 (nothing to free)
        """Give the memory back; no step may follow. Harmless when repeated."""
