"""Steps on a CUDA device: queued and not waited for.

A step is one copy of all its arrays from pinned memory, then either the replay of a CUDA graph
(decode) or the launches of the model one by one, then sampling. All of it is queued on the
engine's own stream. Its tokens go into the token pool, where the next step finds them, and on a
second stream to pinned memory, behind an event: `StepOutput.wait` waits for that event alone.

Stream order is what makes it right: the next step's copy of arrays, its table writes and its
kernels come after this step's on the same stream. Only the copy of the tokens is on another one, so
the next step waits for it (`_copied`) before anything that could write where it reads.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from minisgl.attention.base import ForwardBatch
from minisgl.engine import sampling_table as table_
from minisgl.engine.graph_sizes import size_for
from minisgl.engine.logprobs import Logprobs
from minisgl.engine.runner import Parts
from minisgl.engine.staging import Array, Layout, Staging
from minisgl.engine.step import StepInput, StepOutput, StepResult, TableWrites
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.decode_inputs import decode_inputs_function
from minisgl_kernels.sample import sample_function

_log = logging.getLogger(__name__)

WRITES_AT_ONCE = 65_536
"""Table writes that a block has room for beside the arrays of the largest step; more go first, in
pieces."""
_WRITE_BYTES = 12
RESULTS = 4
"""Steps whose tokens may be unread: the scheduler has two."""

Fields = list[tuple[str, type[np.generic], int]]


def request_fields(count: int) -> Fields:
    """What every step has, for so many requests."""
    return [
        ("seeds", np.int64, count), ("output_pos", np.int64, count),
        ("output_index", np.int64, count), ("rows", np.int32, count), ("lens", np.int32, count),
        ("temperature", np.float32, count), ("greedy", np.uint8, count),
    ]  # fmt: skip


def token_fields(count: int, tokens: int) -> Fields:
    """What an eager step has beside them: a graph computes it from the tables."""
    return [
        ("input_index", np.int64, tokens), ("positions", np.int32, tokens),
        ("out_loc", np.int32, tokens), ("last_indices", np.int32, count),
        ("cu_seqlens_q", np.int32, count + 1),
    ]  # fmt: skip


def fill_requests(arrays: dict[str, Array], step: StepInput, table: table_.SamplingTable,
                  dummy_row: int, width: int) -> None:  # fmt: skip
    """Write the requests of a step; arrays that are longer get dummy requests of one token."""
    n, rows = len(step.rows), step.rows
    arrays["rows"][:n], arrays["rows"][n:] = rows, dummy_row
    arrays["lens"][:n], arrays["lens"][n:] = step.device_lens, 1
    arrays["output_index"][:n], arrays["output_index"][n:] = step.output_index, dummy_row * width
    arrays["output_pos"][:n], arrays["output_pos"][n:] = step.output_pos, 0
    arrays["seeds"][:n], arrays["seeds"][n:] = table.seed[rows], 0
    arrays["temperature"][:n], arrays["temperature"][n:] = table.temperature[rows], 1
    arrays["greedy"][:n] = table.needs[rows] & table_.SAMPLED == 0
    arrays["greedy"][n:] = 1


def fill_tokens(arrays: dict[str, Array], step: StepInput) -> None:
    """Write the tokens of a step."""
    ends = np.cumsum(step.device_lens - step.cached_lens)
    arrays["input_index"][:] = step.input_index
    arrays["positions"][:] = step.positions
    arrays["out_loc"][:] = step.out_loc
    arrays["last_indices"][:] = ends - 1
    arrays["cu_seqlens_q"][0], arrays["cu_seqlens_q"][1:] = 0, ends


class _Slot:
    """A place in pinned memory for the tokens of one step."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.array = self.tensor.numpy()
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.output: CudaOutput | None = None
        self.source: object = None
        """What the copy reads: its memory must not be given to others meanwhile."""


class CudaOutput:
    """A queued step. Once read, it keeps its result and no place of the ring."""

    def __init__(
        self, slot: _Slot, count: int, logprobs: Logprobs | None, check: Callable[[], None]
    ) -> None:
        self._slot, self._count, self._logprobs, self._check = slot, count, logprobs, check
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        if self._result is None:
            self._slot.event.synchronize()
            self._check()  # of a lost peer the collectives end, and what follows is garbage
            tokens = self._slot.array[: self._count].astype(np.int64)
            logprobs = None if self._logprobs is None else self._logprobs.to_host()
            self._result = StepResult(tokens, logprobs)
        return self._result


@dataclasses.dataclass(slots=True)
class _Graph:
    """A captured decode step of one batch size."""

    graph: torch.cuda.CUDAGraph
    layout: Layout
    batch: ForwardBatch
    output_index: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor | None
    """None: sampling is no part of the graph."""


class CudaRunner:
    """Queues steps on `stream`."""

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
        self._stream, self._copies = stream, torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._vocab_size, self._dtype, self._check = vocab_size, dtype, check
        self._device = parts.tables.pages.device
        fields = request_fields(max_requests) + token_fields(max_requests, max_tokens)
        room = Layout(fields).end + WRITES_AT_ONCE * _WRITE_BYTES + 256
        self._staging = Staging(room, self._device)
        self._slots = [_Slot(max_requests, self._device) for _ in range(RESULTS)]
        self._next_slot = 0
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._graphs: dict[int, _Graph] = {}
        self._sizes: list[int] = []
        self._pool: Any = None
        self._logits: torch.Tensor | None = None
        self._sample_kernel, self._inputs_kernel = sample_function(), decode_inputs_function()
        self._try_kernels()

    def _try_kernels(self) -> None:
        """Compile the kernels of this object, and do without one that this device cannot have."""
        ones = torch.ones(1, dtype=torch.int32, device=self._device)
        try:
            if self._sample_kernel is not None:
                logits = torch.zeros((1, self._vocab_size), dtype=self._dtype, device=self._device)
                self._sample_kernel(logits, ones.float(), ones.long(), ones.long(), ones.byte())
        except KernelUnavailable as error:
            _log.warning("sampling runs in torch: %s", error)
            self._sample_kernel = None
        try:
            if self._inputs_kernel is not None:
                tables, out = self.parts.tables, (ones.clone(), ones.clone(), ones.clone())
                self._inputs_kernel(ones * 0, ones, tables.pages, tables.tokens, *out)
        except KernelUnavailable as error:
            _log.warning("decode inputs are gathered in torch: %s", error)
            self._inputs_kernel = None

    @torch.inference_mode()
    def forward(self, step: StepInput) -> StepOutput:
        with torch.cuda.stream(self._stream):
            count, table = len(step.rows), self.parts.sampler.table
            size = size_for(self._sizes, count) if step.is_decode else None
            union = int(np.bitwise_or.reduce(table.needs[step.rows], initial=0))
            plain = not union & ~table_.SAMPLED and self._sample_kernel is not None
            if size is not None:
                graph = self._graphs[size]
                self._replay(graph, step, size)
                logits, tokens = graph.logits[:count], graph.tokens
                index = graph.output_index[:count]
            else:
                logits, tensors = self._launch(step)
                tokens, index = None, tensors["output_index"]
                if plain:
                    tokens = self._draw(logits, tensors)
            logprobs = None
            if not plain or tokens is None:
                tokens, logprobs = self._sample(logits, step, index)
            return self._output(tokens, count, logprobs)

    # --- steps ---------------------------------------------------------------------------------

    def _launch(self, step: StepInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Queue an eager step: its logits, and its arrays on the device."""
        count, parts, tables = len(step.rows), self.parts, self.parts.tables
        layout = Layout(request_fields(count) + token_fields(count, len(step.positions)))
        self._stage(step, layout, eager=True)
        at = layout.tensors(self._staging.block)
        batch = ForwardBatch(
            input_ids=tables.flat_tokens.index_select(0, at["input_index"]),
            positions=at["positions"],
            out_loc=at["out_loc"],
            rows=at["rows"],
            page_table=tables.pages,
            cached_lens=step.cached_lens,
            device_lens=step.device_lens,
            last_indices=at["last_indices"],
            is_decode=step.is_decode,
            device_lens_dev=at["lens"],
            cu_seqlens_q=at["cu_seqlens_q"],
        )
        parts.attention.prepare_metadata(batch)
        return parts.model.forward(batch, parts.attention, parts.pool), at

    def _replay(self, graph: _Graph, step: StepInput, size: int) -> None:
        """Queue a decode step by its graph of `size` requests."""
        self._stage(step, graph.layout, eager=False)
        lens = np.ones(size, np.int32)
        lens[: len(step.rows)] = step.device_lens
        graph.batch.device_lens, graph.batch.cached_lens = lens, lens - 1
        self.parts.attention.replay_metadata(graph.batch)
        graph.graph.replay()

    def _draw(self, logits: torch.Tensor, at: dict[str, torch.Tensor]) -> torch.Tensor:
        """Greedy and temperature rows by one kernel, which also writes to the token pool."""
        assert self._sample_kernel is not None
        return self._sample_kernel(
            logits, at["temperature"], at["seeds"], at["output_pos"], at["greedy"],
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

    def _output(self, tokens: torch.Tensor, count: int, logprobs: Logprobs | None) -> CudaOutput:
        """Queue the copy of what was sampled to the host."""
        slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % len(self._slots)
        if slot.output is not None:
            slot.output.wait()  # takes its tokens out, if nobody has read them
        self._computed.record(self._stream)
        self._copies.wait_event(self._computed)
        with torch.cuda.stream(self._copies):
            slot.tensor[:count].copy_(tokens[:count], non_blocking=True)
            on_host = None if logprobs is None else logprobs.queue_to_host()
            slot.event.record()
        self._copied = slot.event
        slot.source = (tokens, logprobs)
        slot.output = CudaOutput(slot, count, on_host, self._check)
        return slot.output

    # --- arrays --------------------------------------------------------------------------------

    def _stage(self, step: StepInput, layout: Layout, *, eager: bool) -> None:
        """Queue the copy of a step's arrays, and its table writes behind it."""
        writes = _split_off(step.slot_writes), _split_off(step.token_writes)
        if layout.end + _WRITE_BYTES * sum(len(w.index) for w in writes) + 256 > self._staging.size:
            self._write_in_pieces(writes)
            writes = _NO_WRITES, _NO_WRITES
        tail = _write_layout(writes, layout.end)
        number, block = self._staging.begin()
        arrays, tables = layout.arrays(block), self.parts.tables
        fill_requests(arrays, step, self.parts.sampler.table, tables.dummy_row, tables.width)
        if eager:
            fill_tokens(arrays, step)
        self._send(number, block, tail, writes)

    def _write_in_pieces(self, writes: tuple[TableWrites, TableWrites]) -> None:
        """Queue writes that no block has room for: each place occurs once, so any order will do."""
        size = WRITES_AT_ONCE // 2
        longest = max(len(w.index) for w in writes)
        for start in range(0, longest, size):
            part = slice(start, start + size)
            slots, tokens = (TableWrites(w.index[part], w.values[part]) for w in writes)
            number, block = self._staging.begin()
            self._send(number, block, _write_layout((slots, tokens), 0), (slots, tokens))

    def _send(
        self, number: int, block: Array, tail: Layout, writes: tuple[TableWrites, TableWrites]
    ) -> None:
        slots, tokens = writes
        any_writes = len(slots.index) or len(tokens.index)
        if any_writes:
            at = tail.arrays(block)
            at["slot_index"][:], at["slots"][:] = slots.index, slots.values
            at["token_index"][:], at["tokens"][:] = tokens.index, tokens.values
        self._staging.send(number, tail.end)
        if self._copied is not None:
            self._stream.wait_event(self._copied)
        if any_writes:
            on = tail.tensors(self._staging.block)
            tables = self.parts.tables
            if len(slots.index):
                tables.flat_pages.index_copy_(0, on["slot_index"], on["slots"])
            if len(tokens.index):
                tables.flat_tokens.index_copy_(0, on["token_index"], on["tokens"])

    # --- graphs --------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture decode steps of these batch sizes, rising; earlier ones are let go."""
        self.drop_graphs()
        if not sizes:
            return
        began = time.monotonic()
        with torch.cuda.stream(self._stream):
            shape = (sizes[-1], self._vocab_size)
            self._logits = torch.empty(shape, dtype=self._dtype, device=self._device)
            self.parts.attention.init_capture(sizes[-1])
            self._pool = torch.cuda.graph_pool_handle()
            # Each row starts at a multiple of 16 bytes.
            width = -(-sizes[-1] // 4) * 4
            inputs = torch.zeros((3, width), dtype=torch.int32, device=self._device)
            for size in reversed(sizes):
                self._graphs[size] = self._capture(size, inputs)
            self._stream.synchronize()
        self._check()
        self._sizes = list(sizes)
        _log.debug("graphs=%d seconds=%.2f", len(sizes), time.monotonic() - began)

    def drop_graphs(self) -> None:
        """Let go of all graphs and their memory."""
        self._stream.synchronize()
        self._graphs.clear()
        self._sizes, self._pool, self._logits = [], None, None

    def _capture(self, size: int, inputs: torch.Tensor) -> _Graph:
        parts, tables = self.parts, self.parts.tables
        layout = Layout(request_fields(size))
        at = layout.tensors(self._staging.block)
        ids, positions, out_loc = inputs[:, :size].unbind(0)
        assert self._logits is not None
        logits = self._logits[:size]
        batch = ForwardBatch(
            input_ids=ids, positions=positions, out_loc=out_loc, rows=at["rows"],
            page_table=tables.pages, cached_lens=np.zeros(size, np.int32),
            device_lens=np.ones(size, np.int32), last_indices=at["rows"], is_decode=True,
            device_lens_dev=at["lens"],
        )  # fmt: skip

        def compute() -> torch.Tensor | None:
            self._decode_inputs(at["rows"], at["lens"], ids, positions, out_loc)
            parts.attention.capture_metadata(batch)
            parts.model.forward(batch, parts.attention, parts.pool, out=logits)
            return self._draw(logits, at) if self._sample_kernel is not None else None

        step = tables.dummy_step(np.zeros(size), np.ones(size))
        self._stage(step, layout, eager=False)
        parts.attention.replay_metadata(batch)
        compute()  # libraries choose their kernels, and ours are compiled
        parts.attention.replay_metadata(batch)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (of NCCL, of the bus) may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            tokens = compute()
        finally:
            graph.capture_end()
        return _Graph(graph, layout, batch, at["output_index"], logits, tokens)

    def _decode_inputs(
        self, rows: torch.Tensor, lens: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor,
        out_loc: torch.Tensor,
    ) -> None:  # fmt: skip
        """Where each request's new token stands, what it is, and where its KV goes."""
        tables = self.parts.tables
        if self._inputs_kernel is not None:
            self._inputs_kernel(rows, lens, tables.pages, tables.tokens, ids, positions, out_loc)
            return
        torch.sub(lens, 1, out=positions)
        places = rows.long() * tables.width + positions
        torch.index_select(tables.flat_tokens, 0, places, out=ids)
        torch.index_select(tables.flat_pages, 0, places, out=out_loc)


_NO_WRITES = TableWrites(np.zeros(0, np.int64), np.zeros(0, np.int32))


def _split_off(writes: TableWrites | None) -> TableWrites:
    return _NO_WRITES if writes is None else writes


def _write_layout(writes: tuple[TableWrites, TableWrites], start: int) -> Layout:
    slots, tokens = (len(w.index) for w in writes)
    fields: Fields = [
        ("slot_index", np.int64, slots), ("token_index", np.int64, tokens),
        ("slots", np.int32, slots), ("tokens", np.int32, tokens),
    ]  # fmt: skip
    return Layout(fields, start)
