"""One step from the scheduler's arrays to tokens, where every call computes at once."""

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.base import AttentionBackend, ForwardBatch
from minisgl.engine.fake import Ready
from minisgl.engine.sampler import Sampler
from minisgl.engine.step import StepInput, StepOutput, StepResult, TableWrites
from minisgl.engine.tables import Tables
from minisgl.kvcache.pool import KVPool
from minisgl.models.decoder import CausalLM


@dataclass(slots=True)
class Parts:
    """What a runner puts together."""

    model: CausalLM
    attention: AttentionBackend
    tables: Tables
    sampler: Sampler
    pool: KVPool


class Runner(Protocol):
    """Computes steps in order."""

    parts: Parts
    synchronous: bool
    """As `StepEngine.synchronous`."""

    @property
    def waited(self) -> float:
        """Seconds that the host has waited for the device."""
        ...

    @property
    def busy(self) -> float:
        """Seconds that the device took for steps, once `measure_busy` was called."""
        ...

    def measure_busy(self) -> None: ...

    def forward(self, step: StepInput) -> StepOutput: ...


class HostRunner:
    """Runs the model, on a CPU; the tokens are there when `forward` returns."""

    synchronous = True
    waited = 0.0

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.busy = 0.0
        self._device = parts.tables.pages.device

    def measure_busy(self) -> None:
        self.busy = 0.0

    def forward(self, step: StepInput) -> StepOutput:
        began = time.perf_counter()
        output = self._compute(step)
        self.busy += time.perf_counter() - began
        return output

    @torch.inference_mode()
    def _compute(self, step: StepInput) -> StepOutput:
        parts, tables = self.parts, self.parts.tables
        self._write(tables.flat_pages, step.slot_writes)
        self._write(tables.flat_tokens, step.token_writes)
        lengths = step.device_lens - step.cached_lens
        batch = ForwardBatch(
            input_ids=tables.flat_tokens[self._tensor(step.input_index)].long(),
            positions=self._tensor(step.positions),
            out_loc=self._tensor(step.out_loc).long(),
            rows=self._tensor(step.rows),
            page_table=tables.pages,
            cached_lens=step.cached_lens,
            device_lens=step.device_lens,
            last_indices=self._tensor(np.cumsum(lengths, dtype=np.int64) - 1),
            is_decode=step.is_decode,
        )
        if parts.model.packed is None:  # else attention is a part of the model's one call
            parts.attention.prepare_metadata(batch)
        logits = parts.model.forward(batch, parts.attention, parts.pool)
        sampling = parts.sampler.prepare(step.rows, step.output_pos, step.samples)
        sample = parts.sampler.sample(logits, sampling)
        tables.flat_tokens[self._tensor(step.output_index)] = sample.tokens.int()
        logprobs = sample.logprobs.to_host() if sample.logprobs is not None else None
        return Ready(StepResult(sample.tokens.cpu().numpy(), logprobs))

    def _write(self, table: torch.Tensor, writes: TableWrites | None) -> None:
        if writes is not None:
            table[self._tensor(writes.index)] = self._tensor(writes.values)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
