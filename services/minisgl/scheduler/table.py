"""The tables: which row a request has, its lengths, and where each of its tokens is stored.

Every quantity that a step reads or moves is an array by row, because a loop over 256 requests in
Python would take longer than the GPU needs for a step. The page table and the token pool exist
twice: here, for decisions and cache keys, and on the device, which learns of every change through
`TableWrites`, in step order. The last row belongs to the dummy request that pads a CUDA graph.
"""

import numpy as np
import numpy.typing as npt

from minisgl.engine.step import TableWrites
from minisgl.scheduler.request import Req

Ids = npt.NDArray[np.int32]
Index = npt.NDArray[np.int64]


class _Journal:
    """Collects the writes to one table between two steps."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._index: list[Index] = []
        self._values: list[Ids] = []

    def add(self, rows: int | Index, columns: Index, values: Ids) -> None:
        self._index.append(rows * self._width + columns)
        self._values.append(values)

    def take(self) -> TableWrites | None:
        if not self._index:
            return None
        if len(self._index) == 1:
            writes = TableWrites(self._index[0], self._values[0])
        else:
            # A place may be written twice between steps; scatter order is undefined on a device,
            # so only the last write of each may be left.
            index, values = np.concatenate(self._index), np.concatenate(self._values)
            index, last = np.unique(index[::-1], return_index=True)
            writes = TableWrites(index, values[::-1][last])
        self._index, self._values = [], []
        return writes


class TableManager:
    """Rows for `max_running` requests and one dummy, `max_seq_len` tokens each."""

    def __init__(self, max_running: int, max_seq_len: int) -> None:
        rows = max_running + 1
        self.max_running = max_running
        self.max_seq_len = max_seq_len
        self.dummy_row = max_running
        self.page_table = np.zeros((rows, max_seq_len), np.int32)
        self.token_pool = np.zeros((rows, max_seq_len), np.int32)
        self.cached_len = np.zeros(rows, np.int32)
        self.device_len = np.zeros(rows, np.int32)
        self.max_device_len = np.zeros(rows, np.int32)
        self.known_len = np.zeros(rows, np.int32)
        """Tokens whose ids the host has seen; sampled ones follow a step later."""
        self.prompt_len = np.zeros(rows, np.int32)
        self.inflight = np.zeros(rows, np.int32)
        """Steps with this row that are queued and whose result is not read."""
        self.dead = np.zeros(rows, np.bool_)
        """Finished or aborted while in flight: released when the last result is read."""
        self.ignore_eos = np.zeros(rows, np.bool_)
        self.own_stops = np.zeros(rows, np.bool_)
        """The request has stop ids of its own."""
        self.wants_logprobs = np.zeros(rows, np.bool_)
        self.uid = np.zeros((rows, 16), np.uint8)
        self.attempt = np.zeros(rows, np.int32)
        self.run = np.zeros(rows, np.int64)
        self.reqs: list[Req | None] = [None] * rows
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._slot_journal = _Journal(max_seq_len)
        self._token_journal = _Journal(max_seq_len)

    @property
    def free_rows(self) -> int:
        """Rows that no request has."""
        return len(self._free_rows)

    def take_row(self) -> int:
        """A free row. The caller has checked that there is one."""
        return self._free_rows.pop()

    def occupy(self, req: Req, cached: Ids) -> None:
        """Fill the row of an admitted request; the slots of its cached prefix are `cached`."""
        row, pending = req.row, req.pending
        n = len(pending.input_ids)
        self.reqs[row] = req
        self.cached_len[row] = self.device_len[row] = len(cached)
        self.max_device_len[row] = pending.max_device_len
        self.known_len[row] = n
        self.prompt_len[row] = pending.prompt_len
        self.inflight[row] = 0
        self.dead[row] = False
        self.ignore_eos[row] = pending.sampling.ignore_eos
        self.own_stops[row] = bool(pending.sampling.stop_token_ids)
        self.wants_logprobs[row] = pending.sampling.logprobs is not None
        self.uid[row] = np.frombuffer(pending.uid, np.uint8)
        self.attempt[row] = pending.attempt
        self.run[row] = pending.run
        self.write_slots(row, 0, cached)
        self.token_pool[row, :n] = pending.input_ids
        self._token_journal.add(row, np.arange(n), pending.input_ids)

    def release_row(self, req: Req) -> None:
        """Give the row back."""
        self.reqs[req.row] = None
        self.dead[req.row] = False
        self._free_rows.append(req.row)

    def write_slots(self, row: int, start: int, slots: Ids) -> None:
        """Positions from `start` of this row are stored in `slots`."""
        if len(slots):
            self.page_table[row, start : start + len(slots)] = slots
            self._slot_journal.add(row, np.arange(start, start + len(slots)), slots)

    def write_slots_at(self, rows: Index, positions: Index, slots: Ids) -> None:
        """The same for single positions of many rows."""
        self.page_table[rows, positions] = slots
        self._slot_journal.add(rows, positions, slots)

    def take_writes(self) -> tuple[TableWrites | None, TableWrites | None]:
        """What the device must be told before the next step: slots, and tokens."""
        return self._slot_journal.take(), self._token_journal.take()
