"""The scheduler of one rank: decides what each step computes, and what its result means.

Every rank of a group runs this same code on the same messages and makes the same decisions; only
rank 0's results are sent. Nothing here reads a clock, iterates over a set or touches a device.

Two loops do the same work. The sequential one computes a step and reads its result. The overlap
loop queues step N before it reads the result of step N-1, so that the device never waits for the
host: a sampled token reaches the next step through the token pool on the device. Until a result
is read the host does not know whether it ended a request; such a request may be in the next step
already, is then `dead`, and keeps its row and its pages until that step's result is read too. So
there is one owner of each release, whatever the order of ends, aborts and results. With an engine
whose steps are computed when they are queued, overlap would only keep tokens back: there the
sequential loop runs in any case.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from minisgl.config import EngineConfig
from minisgl.engine.step import StepEngine, StepOutput
from minisgl.kvcache import PREFIX_CACHES
from minisgl.messages import ErrorInfo, FinishReason, Route, SamplingParams
from minisgl.scheduler.batch import Batch, make_batch
from minisgl.scheduler.cache import CacheManager, OnKept
from minisgl.scheduler.decode import DecodeManager
from minisgl.scheduler.output import Emission, OutputSink
from minisgl.scheduler.prefill import PrefillAdder, PrefillManager
from minisgl.scheduler.request import Ids, PendingReq, Req
from minisgl.scheduler.table import TableManager


class Scheduler:
    """Requests in, tokens out, one `step` at a time."""

    def __init__(
        self,
        config: EngineConfig,
        engine: StepEngine,
        sink: OutputSink,
        on_kept: OnKept | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._sink = sink
        self._overlap = config.overlaps and not engine.synchronous
        self.max_model_len = min(engine.max_seq_len, engine.num_pages * engine.page_size)
        self.table = TableManager(config.max_running_requests, engine.max_seq_len)
        prefix = PREFIX_CACHES[config.cache_type](engine.page_size)
        self.cache = CacheManager(engine.num_pages, engine.page_size, prefix, self.table, on_kept)
        self.prefill = PrefillManager()
        self.decode = DecodeManager(self.table, self.cache, config.reserve_tokens)
        self._by_uid: dict[bytes, PendingReq] = {}
        self._runs = 0
        self._last: tuple[Batch, StepOutput] | None = None
        self._is_eos = np.zeros(engine.vocab_size, np.bool_)
        self._is_eos[[t for t in engine.eos_token_ids if t < engine.vocab_size]] = True
        self.retractions = 0

    # --- requests ------------------------------------------------------------------------------

    def add(
        self,
        uid: bytes,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        attempt: int = 1,
        route: Route | None = None,
        output_ids: Ids | None = None,
        sent_chars: int = 0,
    ) -> PendingReq | None:
        """Queue a request, or answer at once one that cannot or need not be computed.

        A higher attempt replaces the request of this uid; an equal or lower one is dropped: None.
        """
        held = self._by_uid.get(uid)
        if held is not None:
            if attempt <= held.attempt:
                return None
            self.abort(uid, held.run)
        self._runs += 1
        input_ids = prompt_ids if output_ids is None else np.concatenate([prompt_ids, output_ids])
        room = self.max_model_len - len(prompt_ids)
        wanted = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        pending = PendingReq(
            uid=uid,
            attempt=attempt,
            run=self._runs,
            route=route,
            sampling=sampling,
            input_ids=np.ascontiguousarray(input_ids, np.int32),
            prompt_len=len(prompt_ids),
            max_device_len=len(prompt_ids) + wanted,
            sent_chars=sent_chars,
            received=len(input_ids) - len(prompt_ids),
        )
        error = self.unfit(pending.input_ids, sampling, pending.prompt_len)
        if error is not None:
            self._sink.refuse(pending, error)
            return pending
        reason = self._complete_already(pending)
        if reason is not None:
            self._sink.complete(pending, reason)
            return pending
        self._by_uid[uid] = pending
        self.prefill.add(pending)
        return pending

    def abort(self, uid: bytes, run: int) -> bool:
        """End a computation that nobody wants. False if it is not there (any more)."""
        pending = self._by_uid.get(uid)
        if pending is None or pending.run != run:
            return False
        req = pending.req
        if req is None or req.is_chunk:
            self.prefill.remove(pending)
        if req is not None:
            self._end(req, "abort")
        del self._by_uid[uid]
        self._sink.aborted(pending)
        return True

    def held(self) -> Iterable[PendingReq]:
        """Every request that is not answered, waiting ones too."""
        return self._by_uid.values()

    @property
    def waiting(self) -> int:
        """Requests without a row."""
        return sum(p.req is None for p in self.prefill)

    @property
    def running(self) -> int:
        """Requests with a row."""
        return self.table.max_running - self.table.free_rows

    @property
    def idle(self) -> bool:
        """Nothing to compute and nothing to read."""
        return self._last is None and not self._by_uid

    def output_pos(self, pending: PendingReq) -> int:
        """Output tokens that were sent of this request, over all attempts."""
        req = pending.req
        known = len(pending.input_ids) if req is None else int(self.table.known_len[req.row])
        return known - pending.prompt_len

    # --- steps ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn of the loop. False if there was nothing to do."""
        batch = self._schedule()
        queued = None
        if batch is not None:
            queued = (batch, self._engine.forward(batch.step))
            self._after_queueing(batch)
        last, self._last = self._last, queued
        if last is not None:
            self._process(*last)
        if not self._overlap:
            self.drain()
        return queued is not None or last is not None

    def drain(self) -> None:
        """Read the result of the step that is in flight, if one is."""
        last, self._last = self._last, None
        if last is not None:
            self._process(*last)

    def _schedule(self) -> Batch | None:
        """Prefill first, else decode; `--schedule mixed`: both, and decode first in the batch."""
        mixed = self._config.schedule == "mixed"
        if not mixed:
            chosen = self._schedule_prefill(self._config.max_prefill_tokens, 0)
            if chosen:
                return make_batch(self.table, self.cache, np.empty(0, np.int64), chosen)
        self._make_room()
        rows = self.decode.rows
        if mixed:
            budget = self._config.max_prefill_tokens - len(rows)
            # Even when decoding alone fills the budget, prompts must not starve.
            chosen = self._schedule_prefill(max(budget, 1), self.decode.pages_needed())
        else:
            chosen = []
        if not len(rows) and not chosen:
            return None
        return make_batch(self.table, self.cache, rows, chosen)

    def _schedule_prefill(self, budget: int, decode_pages: int) -> list[Req]:
        if not len(self.prefill):
            return []
        reserve = self._config.reserve_tokens
        reserved = self.decode.pages_reserved()
        reserved += self.prefill.pages_reserved(self.cache, reserve)
        adder = PrefillAdder(
            self.table, self.cache, self._engine, reserve, budget, reserved, decode_pages
        )
        return self.prefill.schedule(adder)

    def _make_room(self) -> None:
        """See to it that the decode step has its pages, if need be at the youngest's cost."""
        while self.decode.pages_needed() > self.cache.available_pages:
            if self._last is not None:
                # What is in flight may end requests; and none of them may be retracted unread.
                self.drain()
            else:
                self._retract()

    def _retract(self) -> None:
        """Take the youngest running request back into the queue, to be computed again later.

        What it has computed goes into the prefix cache, so that only what gets evicted meanwhile
        is lost.
        """
        req = max((r for r in self.table.reqs if r is not None), key=lambda r: r.run)
        pending = req.pending
        known = int(self.table.known_len[req.row])
        if req.is_chunk:
            self.prefill.remove(pending)
        else:
            self.decode.discard(req)
        pending.input_ids = self.table.token_pool[req.row, :known].copy()
        self._release(req)
        self.prefill.add(pending)
        self.retractions += 1

    def _after_queueing(self, batch: Batch) -> None:
        """Move on as if the step were computed: all that follows comes after it on the device."""
        batch.complete_one(self.table)
        for req in batch.prefill:
            if req.is_chunk:
                continue
            self.cache.keep_prefix(req)
            if req.can_decode:
                self.decode.add(req)
        if not batch.prefill or len(batch.prefill) < len(batch.rows):
            rows = batch.rows[: len(batch.rows) - len(batch.prefill)]
            full = self.table.device_len[rows] >= self.table.max_device_len[rows]
            for row in rows[full].tolist():
                self.decode.discard(self._at(row))

    def _process(self, batch: Batch, output: StepOutput) -> None:
        """Read one step's result: note the tokens, end what they end, send them on."""
        result = output.wait()
        table, step = self.table, batch.step
        table.inflight[batch.rows] -= 1
        dead = table.dead[batch.rows]
        if dead.any():
            for row in batch.rows[dead & (table.inflight[batch.rows] == 0)].tolist():
                self._release(self._at(row))
        index = np.flatnonzero(step.samples & ~dead)
        rows, tokens, at = batch.rows[index], result.tokens[index], step.device_lens[index]
        table.token_pool[rows, at] = tokens
        table.known_len[rows] = at + 1
        stop = self._is_eos[tokens] & ~table.ignore_eos[rows]
        for i in np.flatnonzero(table.own_stops[rows]).tolist():
            stop[i] |= int(tokens[i]) in self._at(rows[i]).pending.sampling.stop_token_ids
        over = stop | (at + 1 >= table.max_device_len[rows])
        emission = Emission(rows, tokens, step.output_pos[index])
        if step.wants_logprobs and result.logprobs:
            wanted = result.logprobs
            emission.logprobs = {i: wanted[j] for i, j in enumerate(index.tolist()) if j in wanted}
        for i in np.flatnonzero(over).tolist():
            emission.finished[i] = "stop" if stop[i] else "length"
        if batch.prefill:
            first = len(batch.rows) - len(batch.prefill)
            emission.fresh = [self._at(row) for row in rows[index >= first].tolist()]
        if len(rows):
            self._sink.emit(emission)
        for i, reason in emission.finished.items():
            req = self._at(rows[i])
            del self._by_uid[req.uid]
            self._end(req, reason)

    # --- ends ----------------------------------------------------------------------------------

    def _end(self, req: Req, reason: FinishReason) -> None:
        """This request gets no further step; release it now, or with its last result."""
        req.finish = reason
        self.decode.discard(req)
        if self.table.inflight[req.row]:
            self.table.dead[req.row] = True
        else:
            self._release(req)

    def _release(self, req: Req) -> None:
        # The last sampled token was never an input: it has no keys and values. A request that was
        # in one step more than it needed has them; leaving them out too keeps both loops alike.
        known = int(self.table.known_len[req.row])
        ended = req.finish in ("stop", "length")
        self.cache.release(req, min(req.cached_len, known - 1 if ended else known))
        self._engine.release(req.row)
        self.table.release_row(req)
        req.pending.req = None

    def _at(self, row: int) -> Req:
        req = self.table.reqs[row]
        if req is None:
            raise RuntimeError(f"row {row} of the tables has no request, and a step refers to it")
        return req

    def unfit(
        self, ids: npt.NDArray[np.integer], sampling: SamplingParams, prompt_len: int | None = None
    ) -> ErrorInfo | None:
        """Why a request with these input ids cannot be computed, or None if it can.

        `prompt_len` of the ids are the prompt; None: all of them.
        """
        size = len(ids) if prompt_len is None else prompt_len
        vocab = self._engine.vocab_size
        if not size:
            return ErrorInfo(status=400, message="the prompt holds no token", param="prompt")
        if size >= self.max_model_len:
            return ErrorInfo(
                status=400,
                code="context_length_exceeded",
                param="prompt",
                message=f"the prompt has {size} tokens; with room for one output "
                f"token at least, the limit is {self.max_model_len} tokens in all",
            )
        if ids.min() < 0 or ids.max() >= vocab:
            return ErrorInfo(
                status=400,
                param="prompt",
                message=f"token ids must be between 0 and {vocab - 1}",
            )
        unknown = [t for t in sampling.logit_bias or () if t >= vocab]
        if unknown:
            return ErrorInfo(
                status=400,
                param="logit_bias",
                message=f"logit_bias names token {unknown[0]}; the vocabulary ends at {vocab - 1}",
            )
        return None

    def _complete_already(self, pending: PendingReq) -> FinishReason | None:
        """An earlier attempt sent the last token, but its end was lost."""
        if not pending.received:
            return None
        last = int(pending.input_ids[-1])
        sampling = pending.sampling
        eos = self._is_eos[last] and not sampling.ignore_eos
        if eos or last in sampling.stop_token_ids:
            return "stop"
        return "length" if len(pending.input_ids) >= pending.max_device_len else None
