"""A batch of requests, and the arrays that the engine needs to compute it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minisgl.engine.step import StepInput
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.request import Req
from minisgl.scheduler.table import TableManager

Index = npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """Requests that are computed together: decoding ones first, then those of prefill."""

    rows: Index
    step: StepInput
    prefill: Sequence[Req]
    """The last rows of the batch. The others decode."""

    def complete_one(self, table: TableManager) -> None:
        """The step is queued: what it computes is cached, and its sample is the next input.

        A chunk has no sample; its next chunk sets how far the device goes.
        """
        table.cached_len[self.rows] = self.step.device_lens
        table.device_len[self.rows] = self.step.device_lens + self.step.samples
        table.inflight[self.rows] += 1


def make_batch(
    table: TableManager, cache: CacheManager, decode_rows: Index, prefill: Sequence[Req]
) -> Batch:
    """Allocate the pages of a step and write down where everything is.

    The caller has seen to it that there are enough pages.
    """
    cached = table.cached_len[decode_rows]
    cache.extend_decode(decode_rows, cached)
    rows, positions, token_rows = decode_rows, cached.astype(np.int64), decode_rows
    samples = np.ones(len(decode_rows), np.bool_)
    if prefill:
        for req in prefill:
            cache.extend(req.row, req.cached_len, req.device_len)
        new = np.array([req.row for req in prefill], np.int64)
        start, extend = table.cached_len[new], table.device_len[new] - table.cached_len[new]
        rows = np.concatenate([decode_rows, new])
        # [start, start + extend) of each request, one after the other.
        first = np.cumsum(extend) - extend
        ranges = np.arange(int(extend.sum())) - np.repeat(first, extend) + np.repeat(start, extend)
        positions = np.concatenate([positions, ranges])
        token_rows = np.concatenate([decode_rows, np.repeat(new, extend)])
        samples = np.concatenate([samples, [not req.is_chunk for req in prefill]])
    device = table.device_len[rows]
    width = table.max_seq_len
    output_index = rows * width + device
    if prefill:
        output_index[~samples] = table.dummy_row * width
    slot_writes, token_writes = table.take_writes()
    step = StepInput(
        rows=rows,
        cached_lens=table.cached_len[rows],
        device_lens=device,
        positions=positions,
        input_index=token_rows * width + positions,
        out_loc=table.page_table[token_rows, positions],
        output_index=output_index,
        output_pos=device - table.prompt_len[rows],
        samples=samples,
        is_decode=not prefill,
        wants_logprobs=bool(table.wants_logprobs[rows].any()),
        slot_writes=slot_writes,
        token_writes=token_writes,
    )
    return Batch(rows, step, prefill)
