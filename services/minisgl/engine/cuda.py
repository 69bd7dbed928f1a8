"""Steps on a CUDA device: queued and not waited for.

A step is one copy of all its arrays from pinned memory, then either the replay of a CUDA graph
(decode, and short prompts) or the launches of the model one by one, then sampling. All of it is
queued on the engine's own stream. Its tokens go into the token pool, where the next step finds
them, and on a second stream to pinned memory, behind an event: `StepOutput.wait` waits for that
event alone.

Stream order is what makes it right: the next step's copy of arrays, its table writes and its
kernels come after this step's on the same stream. Only the copy of the tokens is on another one, so
the next step waits for it before anything that could write where it reads.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from minisgl.attention.base import PROMPT_REQUESTS, ForwardBatch
from minisgl.engine import sampling_table as table_
from minisgl.engine.graph_sizes import size_for
from minisgl.engine.logprobs import Logprobs
from minisgl.engine.results import Results
from minisgl.engine.runner import Parts
from minisgl.engine.staging import Array, Layout, Staging
from minisgl.engine.step import StepInput, StepOutput, TableWrites
from minisgl.engine.step_arrays import (
    Fields,
    fill_limits,
    fill_requests,
    fill_tokens,
    padded_lens,
    request_fields,
    token_fields,
)
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Variant, collected, prepare
from minisgl_kernels.decode_inputs import decode_inputs_function, decode_inputs_reference
from minisgl_kernels.filter_bounds import filter_bounds_function
from minisgl_kernels.sample import sample_function
from minisgl_kernels.tuned_linear import measuring

_log = logging.getLogger(__name__)

WRITES_AT_ONCE = 65_536
"""Table writes that a block has room for beside the arrays of the largest step; more go first, in
pieces."""
_WRITE_BYTES = 12


@dataclasses.dataclass(slots=True)
class _Graph:
    """A captured step of one size."""

    requests: int
    tokens: int
    """As many as requests, if it decodes."""
    graph: torch.cuda.CUDAGraph
    layout: Layout
    batch: ForwardBatch
    at: dict[str, torch.Tensor]
    """Its arrays."""
    logits: torch.Tensor
    drawn: torch.Tensor | None
    """The tokens. None: sampling is no part of the graph."""


class CudaRunner:
    """Queues steps on `stream`."""

    synchronous = False

    def __init__(
        self,
        parts: Parts,
        stream: torch.cuda.Stream,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        max_requests: int,
        max_tokens: int,
        check: Callable[[], None],
    ) -> None:
        """A step has at most `max_requests` requests and `max_tokens` new tokens. `check` raises
        if a peer is lost. Memory is taken on the current stream, which must be `stream`."""
        self.parts = parts
        self._stream = stream
        self._vocab_size, self._dtype = vocab_size, dtype
        self._device = parts.tables.pages.device
        fields = request_fields(max_requests) + token_fields(max_requests, max_tokens)
        fields += request_fields(PROMPT_REQUESTS)
        room = Layout(fields).end + WRITES_AT_ONCE * _WRITE_BYTES + 256
        self._staging = Staging(room, self._device)
        self.results = Results(max(max_requests, PROMPT_REQUESTS), stream, check)
        self._decodes: dict[int, _Graph] = {}
        self._prompts: dict[int, _Graph] = {}
        self._sizes: list[int] = []
        self._prompt_sizes: list[int] = []
        self._pool: Any = None
        self._logits: torch.Tensor | None = None
        self._sample_kernel, self._inputs_kernel = sample_function(), decode_inputs_function()
        self._bounds_kernel = filter_bounds_function()

    def kernels_of(self, steps: Sequence[StepInput]) -> list[Variant]:
        """The kernels that these steps call and that are not compiled yet."""
        with collected() as wanted:
            self._try_kernels()
            for step in steps:
                self.forward(step).wait()
        return wanted

    def compile_kernels(self, wanted: Iterable[Variant]) -> None:
        """Compile kernels at the same time and not one by one, and do without one of this object's
        own that the device cannot have."""
        prepare(wanted)
        self._try_kernels()

    @torch.inference_mode()
    def _try_kernels(self) -> None:
        ones = torch.ones(1, dtype=torch.int32, device=self._device)
        try:
            if self._sample_kernel is not None:
                logits = torch.zeros((1, self._vocab_size), dtype=self._dtype, device=self._device)
                self._sample_kernel(logits, ones.float(), ones.long(), ones.long(), ones.byte())
        except KernelUnavailable as error:
            _log.warning("sampling runs in torch: %s", error)
            self._sample_kernel = None
        try:
            if self._bounds_kernel is not None:
                logits = torch.zeros((1, self._vocab_size), dtype=self._dtype, device=self._device)
                self._bounds_kernel(logits, ones.float(), ones.long(), ones.double(), ones.double())
        except KernelUnavailable as error:
            _log.warning("filters run in torch: %s", error)
            self._bounds_kernel = None
        try:
            if self._inputs_kernel is not None:
                tables, out = self.parts.tables, (ones.clone(), ones.clone(), ones.clone())
                self._inputs_kernel(ones * 0, ones, tables.pages, tables.tokens, *out)
        except KernelUnavailable as error:
            _log.warning("decode inputs are gathered in torch: %s", error)
            self._inputs_kernel = None

    @property
    def waited(self) -> float:
        """Seconds that the host has waited for the device."""
        return self.results.waited

    @property
    def busy(self) -> float:
        """Seconds that the device took for steps, once `measure_busy` was called."""
        return self.results.busy

    def measure_busy(self) -> None:
        self.results.measure_busy()

    @torch.inference_mode()
    def forward(self, step: StepInput) -> StepOutput:
        with torch.cuda.stream(self._stream):
            count, table = len(step.rows), self.parts.sampler.table
            union = int(np.bitwise_or.reduce(table.needs[step.rows], initial=0))
            limits = bool(union & table_.LIMITS)
            plain = not union & ~(table_.SAMPLED | table_.LIMITS)
            plain &= self._sample_kernel is not None
            plain &= not limits or self._bounds_kernel is not None
            graph = self._graph_for(step)
            if graph is not None:
                self._replay(graph, step, limits)
                logits, at, drawn = graph.logits, graph.at, graph.drawn
            else:
                logits, at = self._launch(step, limits)
                drawn = None
            if not plain:
                tokens, logprobs = self._sample(logits[:count], step, at["output_index"][:count])
                return self.results.queue(tokens, count, logprobs)
            if drawn is None or limits:
                drawn = self._draw(logits, at, limits)
            return self.results.queue(drawn, count, None)

    # --- steps ---------------------------------------------------------------------------------

    def _graph_for(self, step: StepInput) -> _Graph | None:
        """The smallest graph that holds the step, if there is one."""
        count = len(step.rows)
        if step.is_decode:
            size = size_for(self._sizes, count)
            return None if size is None else self._decodes[size]
        size = size_for(self._prompt_sizes, len(step.positions))
        return None if size is None or count >= PROMPT_REQUESTS else self._prompts[size]

    def _launch(
        self, step: StepInput, limits: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Queue an eager step: its logits, and its arrays on the device."""
        count, parts = len(step.rows), self.parts
        layout = Layout(request_fields(count) + token_fields(count, len(step.positions)))
        self._stage(step, layout, tokens=True, limits=limits)
        at = layout.tensors(self._staging.block)
        batch = self._batch(at, self._gathered(at), step.cached_lens, step.device_lens)
        batch.is_decode = step.is_decode
        parts.attention.prepare_metadata(batch)
        self.results.begin()
        return parts.model.forward(batch, parts.attention, parts.pool), at

    def _replay(self, graph: _Graph, step: StepInput, limits: bool) -> None:
        """Queue a step by its graph."""
        self._stage(step, graph.layout, tokens=not graph.batch.is_decode, limits=limits)
        batch = graph.batch
        if batch.is_decode:
            lens = np.ones(graph.requests, np.int32)
            lens[: len(step.rows)] = step.device_lens
            batch.cached_lens, batch.device_lens = lens - 1, lens
        else:
            batch.cached_lens, batch.device_lens = padded_lens(step, graph.requests, graph.tokens)
        self.parts.attention.replay_metadata(batch)
        self.results.begin()
        graph.graph.replay()

    def _gathered(self, at: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.parts.tables.flat_tokens.index_select(0, at["input_index"])

    def _batch(
        self, at: dict[str, torch.Tensor], ids: torch.Tensor, before: Any, after: Any
    ) -> ForwardBatch:
        return ForwardBatch(
            input_ids=ids,
            positions=at["positions"],
            out_loc=at["out_loc"],
            rows=at["rows"],
            page_table=self.parts.tables.pages,
            cached_lens=before,
            device_lens=after,
            last_indices=at["last_indices"],
            is_decode=False,
            device_lens_dev=at["lens"],
            cu_seqlens_q=at["cu_seqlens_q"],
        )

    def _draw(
        self, logits: torch.Tensor, at: dict[str, torch.Tensor], limits: bool = False
    ) -> torch.Tensor:
        """Greedy rows and draws, by one kernel or two, which also write to the token pool."""
        least = last = None
        if limits and self._bounds_kernel is not None:
            columns = at["top_k"], at["top_p"], at["min_p"]
            least, last = self._bounds_kernel(logits, at["temperature"], *columns)
        assert self._sample_kernel is not None
        return self._sample_kernel(
            logits, at["temperature"], at["seeds"], at["output_pos"], at["greedy"], least, last,
            token_pool=self.parts.tables.flat_tokens, output_index=at["output_index"],
        )  # fmt: skip

    def _sample(
        self, logits: torch.Tensor, step: StepInput, index: torch.Tensor
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Any rows, by torch operations; what a graph has drawn of these logits is overwritten."""
        sampler = self.parts.sampler
        batch = sampler.prepare(step.rows, step.output_pos, step.samples)
        sampled = sampler.sample(logits, batch)
        tokens = sampled.tokens.int()
        self.parts.tables.flat_tokens.index_copy_(0, index, tokens)
        return tokens, sampled.logprobs

    # --- arrays --------------------------------------------------------------------------------

    def _stage(
        self, step: StepInput, layout: Layout, *, tokens: bool, limits: bool = False
    ) -> None:
        """Queue the copy of a step's arrays, and its table writes behind it."""
        writes = step.slot_writes or _NO_WRITES, step.token_writes or _NO_WRITES
        if layout.end + _WRITE_BYTES * sum(len(w.index) for w in writes) + 256 > self._staging.size:
            self._write_in_pieces(writes)
            writes = _NO_WRITES, _NO_WRITES
        block = self._staging.begin()
        arrays, tables = layout.arrays(block), self.parts.tables
        fill_requests(arrays, step, self.parts.sampler.table, tables)
        if tokens:
            fill_tokens(arrays, step, tables)
        if limits:
            fill_limits(arrays, step, self.parts.sampler.table)
        self._send(block, layout.end, writes)

    def _write_in_pieces(self, writes: tuple[TableWrites, TableWrites]) -> None:
        """Queue writes that no block has room for: each place occurs once, so any order will do."""
        size = WRITES_AT_ONCE // 2
        longest = max(len(w.index) for w in writes)
        for start in range(0, longest, size):
            part = slice(start, start + size)
            slots, tokens = (TableWrites(w.index[part], w.values[part]) for w in writes)
            self._send(self._staging.begin(), 0, (slots, tokens))

    def _send(self, block: Array, end: int, writes: tuple[TableWrites, TableWrites]) -> None:
        """Queue the copy of a block of `end` bytes with writes behind them, and the writes."""
        tables = self.parts.tables
        both = list(zip((tables.flat_pages, tables.flat_tokens), writes, strict=True))
        layouts = []
        for _, change in both:
            layout = Layout(_write_fields(len(change.index)), end)
            if len(change.index):
                at = layout.arrays(block)
                at["index"][:], at["values"][:] = change.index, change.values
                end = layout.end
            layouts.append(layout)
        self._staging.send(end)
        if self.results.copied is not None:
            self._stream.wait_event(self.results.copied)
        for (table, change), layout in zip(both, layouts, strict=True):
            if len(change.index):
                on = layout.tensors(self._staging.block)
                table.index_copy_(0, on["index"], on["values"])

    # --- graphs --------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], prompt_sizes: Sequence[int] = ()) -> None:
        """Capture decode steps of these batch sizes, rising, and steps of so many prompt tokens,
        rising; earlier graphs are let go."""
        self.drop_graphs()
        if not sizes:
            return
        began = time.monotonic()
        with torch.cuda.stream(self._stream):
            rows = max(sizes[-1], PROMPT_REQUESTS)
            self._logits = torch.empty(
                (rows, self._vocab_size), dtype=self._dtype, device=self._device
            )
            self.parts.attention.init_capture(rows)
            self._pool = torch.cuda.graph_pool_handle()
            # Each row starts at a multiple of 16 bytes.
            width = -(-sizes[-1] // 4) * 4
            inputs = torch.zeros((3, width), dtype=torch.int32, device=self._device)
            for size in reversed(sizes):
                self._decodes[size] = self._capture_decode(size, inputs)
            for size in reversed(prompt_sizes):
                self._prompts[size] = self._capture_prompts(size)
            self._stream.synchronize()
        self.results.check()
        self._sizes, self._prompt_sizes = list(sizes), list(prompt_sizes)
        _log.debug("graphs=%d seconds=%.2f", len(sizes), time.monotonic() - began)

    def drop_graphs(self) -> None:
        """Let go of all graphs and their memory."""
        self._stream.synchronize()
        self._decodes.clear()
        self._prompts.clear()
        self._sizes, self._prompt_sizes, self._pool, self._logits = [], [], None, None

    def _capture_decode(self, size: int, inputs: torch.Tensor) -> _Graph:
        layout = Layout(request_fields(size))
        at = layout.tensors(self._staging.block)
        ids, positions, out_loc = inputs[:, :size].unbind(0)
        ones = np.ones(size, np.int32)
        batch = ForwardBatch(
            input_ids=ids, positions=positions, out_loc=out_loc, rows=at["rows"],
            page_table=self.parts.tables.pages, cached_lens=ones - 1, device_lens=ones,
            last_indices=at["rows"], is_decode=True, device_lens_dev=at["lens"],
        )  # fmt: skip
        step = self.parts.tables.dummy_step(ones - 1, ones)
        return self._capture(
            layout, at, batch, step,
            lambda: self._decode_inputs(at["rows"], at["lens"], ids, positions, out_loc),
        )  # fmt: skip

    def _capture_prompts(self, tokens: int) -> _Graph:
        count = PROMPT_REQUESTS
        layout = Layout(request_fields(count) + token_fields(count, tokens))
        at = layout.tensors(self._staging.block)
        step = self.parts.tables.dummy_step([0], [tokens])
        before, after = padded_lens(step, count, tokens)
        ids = torch.zeros(tokens, dtype=torch.int32, device=self._device)
        batch = self._batch(at, ids, before, after)
        flat = self.parts.tables.flat_tokens
        return self._capture(
            layout, at, batch, step,
            lambda: torch.index_select(flat, 0, at["input_index"], out=ids),
        )  # fmt: skip

    def _capture(
        self, layout: Layout, at: dict[str, torch.Tensor], batch: ForwardBatch, step: StepInput,
        fill: Callable[[], object],
    ) -> _Graph:  # fmt: skip
        """A graph of `fill`, the model and the draw, on buffers that hold `step` meanwhile."""
        parts, count = self.parts, len(batch.device_lens)
        assert self._logits is not None
        logits = self._logits[:count]

        def compute() -> torch.Tensor | None:
            fill()
            parts.attention.capture_metadata(batch)
            parts.model.forward(batch, parts.attention, parts.pool, out=logits)
            return self._draw(logits, at) if self._sample_kernel is not None else None

        self._stage(step, layout, tokens=not batch.is_decode)
        parts.attention.replay_metadata(batch)
        with measuring():
            compute()  # libraries choose their kernels, and ours are compiled
        parts.attention.replay_metadata(batch)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (of NCCL, of the bus) may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            drawn = compute()
        finally:
            graph.capture_end()
        return _Graph(count, len(batch.input_ids), graph, layout, batch, at, logits, drawn)

    def _decode_inputs(
        self, rows: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor,
        out_loc: torch.Tensor,
    ) -> None:  # fmt: skip
        """Where each request's new token stands, what it is, and where its KV goes."""
        tables, fill = self.parts.tables, self._inputs_kernel or decode_inputs_reference
        fill(rows, lens, tables.pages, tables.tokens, ids, positions, out_loc)


_NO_WRITES = TableWrites(np.zeros(0, np.int64), np.zeros(0, np.int32))


def _write_fields(count: int) -> Fields:
    return [("index", np.int64, count), ("values", np.int32, count)]
