"""The integrity check: every page has exactly one owner, and every count is right.

Run by tests after each operation and by a rank when it has nothing to do. It looks at all pages,
rows and nodes, so it costs time in proportion to the cache.
"""

import numpy as np
import numpy.typing as npt

from minisgl.scheduler.scheduler import Scheduler

Ids = npt.NDArray[np.int32]


def check(scheduler: Scheduler) -> None:
    """Raises `RuntimeError` that says which page, row or count is wrong."""
    cache, table = scheduler.cache, scheduler.table
    size = cache.page_size
    cache.prefix.check()
    owners = np.zeros(cache.num_pages, np.int64)

    def own(pages: Ids, who: str) -> None:
        if len(pages) and (pages.min() < 0 or pages.max() >= cache.num_pages):
            raise RuntimeError(f"{who} refers to a page outside of the cache")
        np.add.at(owners, pages, 1)

    own(cache.free_list(), "the free list")
    own(cache.prefix.held()[::size] // size, "the prefix cache")
    locked = [np.empty(0, np.int32)]
    for row, req in enumerate(table.reqs):
        if req is None:
            continue
        if req.row != row:
            raise RuntimeError(f"row {row} holds the request of row {req.row}")
        shared = req.handle.cached_len
        if not shared <= req.cached_len <= req.device_len <= req.max_device_len:
            raise RuntimeError(f"row {row}: {shared=} {req.cached_len=} {req.device_len=}")
        tree = cache.prefix.slots(req.handle)
        if not np.array_equal(table.page_table[row, :shared], tree):
            raise RuntimeError(f"row {row} does not refer to the slots of its locked prefix")
        end = cache.pages_for(req.cached_len) * size
        own(table.page_table[row, shared:end:size] // size, f"row {row}")
        locked.append(tree)
    wrong = np.flatnonzero(owners != 1)
    if len(wrong):
        raise RuntimeError(f"page {wrong[0]} has {owners[wrong[0]]} owners ({len(wrong)} wrong)")
    in_use = len(np.unique(np.concatenate(locked)))
    if in_use != cache.prefix.protected:
        raise RuntimeError(
            f"{cache.prefix.protected} tokens are protected, and rows refer to {in_use}"
        )
    if scheduler.idle and scheduler.running:
        raise RuntimeError(f"{scheduler.running} rows are taken, and nothing is held")
