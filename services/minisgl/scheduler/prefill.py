"""The queue of waiting requests, and the choice of those whose prompts are computed next."""

import bisect
from collections.abc import Iterator

from minisgl.engine.step import StepEngine
from minisgl.scheduler.cache import CacheManager
from minisgl.scheduler.request import ChunkedReq, PendingReq, Req
from minisgl.scheduler.table import TableManager


class PrefillAdder:
    """Fills one step with prompts, within its token budget and the pages that are not spoken for.

    A request is admitted only if the pages for its uncached prompt and its reserved output are
    left beside the reservations of all that run. That is checked twice: locking the prefix that
    was found turns evictable pages into protected ones, and may leave too few.
    """

    def __init__(
        self,
        table: TableManager,
        cache: CacheManager,
        engine: StepEngine,
        reserve_tokens: int,
        token_budget: int,
        reserved_pages: int,
        decode_pages: int,
    ) -> None:
        self._table = table
        self._cache = cache
        self._engine = engine
        self._reserve_tokens = reserve_tokens
        self._budget = token_budget
        self._reserved = reserved_pages
        self._taken = decode_pages  # pages that this step takes for others, in mixed batches

    @property
    def full(self) -> bool:
        """No token of the budget is left."""
        return self._budget <= 0

    def try_add(self, pending: PendingReq) -> Req | None:
        """The request with its lengths set for this step, or None if it must wait."""
        begun = pending.req is not None
        req = pending.req or self._admit(pending)
        if req is None:
            return None
        cached, total = req.cached_len, len(pending.input_ids)
        size = min(total - cached, self._budget)
        if begun:
            # It was admitted in an earlier step; others may have outgrown their reservation.
            need = self._cache.pages_for(cached + size) - self._cache.pages_for(cached)
            if need > self._cache.available_pages - self._taken:
                return None
        kind = ChunkedReq if cached + size < total else Req
        if type(req) is not kind:
            req = kind(pending, req.row, self._table, req.handle)
            self._table.reqs[req.row] = req
        pending.req = req
        self._table.device_len[req.row] = cached + size
        self._budget -= size
        return req

    def _admit(self, pending: PendingReq) -> Req | None:
        if not self._table.free_rows:
            return None
        cache, ids = self._cache, pending.input_ids
        handle, slots = cache.match(ids)
        stored = min(pending.max_device_len - 1, len(ids) + self._reserve_tokens)
        need = cache.pages_for(stored) - cache.pages_for(handle.cached_len)
        if need > cache.available_pages - self._reserved:
            return None
        cache.prefix.lock(handle)
        if need > cache.available_pages - self._reserved:
            cache.prefix.unlock(handle)
            return None
        self._reserved += need
        req = Req(pending, self._table.take_row(), self._table, handle)
        self._table.occupy(req, slots)
        if pending.cached_tokens is None:
            pending.cached_tokens = min(handle.cached_len, pending.prompt_len)
        prompt, output = ids[: pending.prompt_len], ids[pending.prompt_len :]
        self._engine.admit(req.row, pending.sampling, prompt, output)
        return req


class PrefillManager:
    """Waiting requests: the one whose chunks are being computed first, then by their order."""

    def __init__(self) -> None:
        self._queue: list[PendingReq] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[PendingReq]:
        return iter(self._queue)

    def add(self, pending: PendingReq) -> None:
        """Queue a request behind those of its priority that came earlier."""
        begun = sum(p.req is not None for p in self._queue[:1])
        at = bisect.bisect_right(self._queue, pending.order, lo=begun, key=lambda p: p.order)
        self._queue.insert(at, pending)

    def remove(self, pending: PendingReq) -> None:
        """Take a request out; its row and pages, if it has any, are the caller's."""
        self._queue.remove(pending)

    def schedule(self, adder: PrefillAdder) -> list[Req]:
        """The prompts of this step, first come, first served: nobody overtakes who must wait."""
        chosen: list[Req] = []
        while self._queue and not adder.full:
            pending = self._queue[0]
            req = adder.try_add(pending)
            if req is None:
                break
            chosen.append(req)
            if req.is_chunk:
                break  # it used up the budget, and stays at the head
            del self._queue[0]
        return chosen

    def pages_reserved(self, cache: CacheManager, reserve_tokens: int) -> int:
        """Pages that the begun request at the head will still take."""
        if not self._queue or self._queue[0].req is None:
            return 0
        pending, req = self._queue[0], self._queue[0].req
        stored = min(pending.max_device_len - 1, len(pending.input_ids) + reserve_tokens)
        return cache.pages_for(stored) - cache.pages_for(req.cached_len)
