"""The requests that decode: one token a step for each."""

import bisect

import numpy as np
import numpy.typing as npt

from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.request import Req
from minisgl.scheduler.table import TableManager

Index = npt.NDArray[np.int64]


class DecodeManager:
    """Keeps decoding requests in the order of their acceptance, which is the same on all ranks.

    It is the same in each run, too, as the random uids are not: kernels that share the work of a
    batch out add up in an order that follows from it.
    """

    def __init__(self, table: TableManager, cache: CacheManager, reserve_tokens: int) -> None:
        self._table = table
        self._cache = cache
        self._reserve = reserve_tokens
        self._order: list[tuple[int, int]] = []
        self._rows: Index | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def rows(self) -> Index:
        """Rows of all decoding requests, in order. Built anew only when one came or went."""
        if self._rows is None:
            self._rows = np.fromiter((row for _, row in self._order), np.int64, len(self._order))
        return self._rows

    def add(self, req: Req) -> None:
        """From the next step on this request decodes."""
        bisect.insort(self._order, (req.run, req.row))
        self._rows = None

    def discard(self, req: Req) -> None:
        """It does not (any more)."""
        at = bisect.bisect_left(self._order, (req.run, req.row))
        if at < len(self._order) and self._order[at] == (req.run, req.row):
            del self._order[at]
            self._rows = None

    def pages_needed(self) -> int:
        """New pages that the next decode step takes."""
        if self._cache.page_size == 1:
            return len(self._order)
        return int((self._table.cached_len[self.rows] % self._cache.page_size == 0).sum())

    def pages_reserved(self) -> int:
        """Pages that decoding requests will still take, `reserve_tokens` ahead of each at most.

        The last token of an output is sampled but never computed, so it needs no slot.
        """
        rows, size = self.rows, self._cache.page_size
        ahead = self._table.device_len[rows] + self._reserve
        stored = np.minimum(self._table.max_device_len[rows] - 1, ahead)
        return int((-(-stored // size) - -(-self._table.cached_len[rows] // size)).sum())
