"""Who owns each page of the KV cache: the free list, the prefix cache, or one running request."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from minisgl.kvcache.base import Handle, PrefixCache
from minisgl.scheduler.request import Req
from minisgl.scheduler.table import TableManager

Ids = npt.NDArray[np.int32]
OnKept = Callable[[Ids, Ids], None]
"""Is told each prefix that was put into the cache: its tokens of the input, those of the output.

They do not change any more. It is called in the step loop, and must not wait or compute.
"""


class CacheManager:
    """Hands out pages and takes them back; evicts prefixes when the free list runs out."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix: PrefixCache,
        table: TableManager,
        on_kept: OnKept | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix = prefix
        self._table = table
        self._on_kept = on_kept
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack of page numbers
        self._num_free = num_pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._num_free

    @property
    def evictable_pages(self) -> int:
        """Pages of prefixes that no running request uses."""
        return self.prefix.evictable // self.page_size

    @property
    def available_pages(self) -> int:
        """Pages that `allocate` can give."""
        return self._num_free + self.evictable_pages

    def allocate(self, pages: int) -> Ids:
        """So many page numbers. Raises `ValueError` if there are fewer."""
        if pages > self._num_free:
            self._put(self.prefix.evict((pages - self._num_free) * self.page_size))
        if pages > self._num_free:
            raise ValueError(f"{pages} pages are wanted, {self._num_free} are free")
        self._num_free -= pages
        # The top of the stack, reversed: pages come out in the order they would be popped.
        return self._free[self._num_free : self._num_free + pages][::-1].copy()

    def extend(self, row: int, start: int, end: int) -> None:
        """Allocate what positions `start` to `end` of a row need beyond the pages it has."""
        first, last = self.pages_for(start), self.pages_for(end)
        if last > first:
            pages = self.allocate(last - first)
            slots = (pages[:, None] * self.page_size + self._in_page()).reshape(-1)
            width = self._table.max_seq_len - first * self.page_size
            self._table.write_slots(row, first * self.page_size, slots[:width])

    def extend_decode(self, rows: npt.NDArray[np.int64], cached: Ids) -> None:
        """One more position for each row: a new page where the last one is full."""
        crossing = rows if self.page_size == 1 else rows[cached % self.page_size == 0]
        if not len(crossing):
            return
        start = cached if self.page_size == 1 else self._table.cached_len[crossing]
        pages = self.allocate(len(crossing))
        if self.page_size == 1:
            self._table.write_slots_at(crossing, start.astype(np.int64), pages)
            return
        positions = start[:, None].astype(np.int64) + self._in_page()
        slots = pages[:, None] * self.page_size + self._in_page()
        inside = positions < self._table.max_seq_len
        rows_of = np.broadcast_to(crossing[:, None], positions.shape)
        self._table.write_slots_at(rows_of[inside], positions[inside], slots[inside])

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def match(self, ids: Ids) -> tuple[Handle, Ids]:
        """Longest cached prefix of a prompt, but never all of it.

        One position at least must be computed, to have logits for the first output token.
        """
        return self.prefix.match(ids[:-1])

    def keep_prefix(self, req: Req) -> None:
        """Put the computed prompt of a running request into the prefix cache.

            before   |-- tree, locked --|-------------- owned by the request --------------|
            after    |-- tree, locked ------------ (whole pages) --|-- owned by the request |

        Another request may have put in the same tokens meanwhile. The pages computed twice go
        back, and the row refers to the tree's from now on: were it left alone, its pages would be
        somebody else's after the next allocation.
        """
        row, old = req.row, req.handle
        length = req.cached_len - req.cached_len % self.page_size
        slots = self._table.page_table[row, :length]
        done = self.prefix.insert(self._table.token_pool[row, :length], slots)
        if done.present > old.cached_len:
            self._put(slots[old.cached_len : done.present])
            tree = self.prefix.slots(done.handle)
            self._table.write_slots(row, old.cached_len, tree[old.cached_len : done.present])
        # Lock first: what both paths share must not be evictable in between.
        self.prefix.lock(done.handle)
        self.prefix.unlock(old)
        req.handle = done.handle
        self._report(req, done.handle.cached_len)

    def release(self, req: Req, length: int) -> None:
        """Take the pages of a request that is over; its first `length` tokens may be reused.

        before   |-- tree, locked --|-------------- owned by the request --------------|
        after    |-- tree ------------------- (whole pages) --|-- free ----------------|
        """
        row, old = req.row, req.handle
        owned = self._table.page_table[row, : self.pages_for(req.cached_len) * self.page_size]
        length = max(length - length % self.page_size, old.cached_len)
        done = self.prefix.insert(self._table.token_pool[row, :length], owned[:length])
        self._put(owned[old.cached_len : done.present])
        self._put(owned[max(done.handle.cached_len, old.cached_len) :])
        self.prefix.unlock(old)
        self._report(req, done.handle.cached_len)

    def free_list(self) -> Ids:
        """The pages that nobody owns, for the integrity check."""
        return self._free[: self._num_free]

    def _report(self, req: Req, length: int) -> None:
        if self._on_kept is not None:
            # The input is never written to; the row is the next request's soon.
            ids = req.pending.input_ids[:length]
            self._on_kept(ids, self._table.token_pool[req.row, len(ids) : length].copy())

    def _put(self, slots: Ids) -> None:
        """Back to the free list, whole pages given as slots."""
        pages = slots[:: self.page_size] // self.page_size
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def _in_page(self) -> npt.NDArray[np.int32]:
        return np.arange(self.page_size, dtype=np.int32)
