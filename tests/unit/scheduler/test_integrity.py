"""The integrity check is no good unless it finds each kind of fault."""

from collections.abc import Callable

import numpy as np
import pytest

from minisgl.scheduler import integrity

from .harness import World

COMPUTED = list(range(2, 22))


def _lose_a_page(world: World) -> None:
    world.scheduler.cache.allocate(1)


def _free_a_page_twice(world: World) -> None:
    cache = world.scheduler.cache
    cache._put(cache.free_list()[:1] * cache.page_size)


def _share_a_page(world: World) -> None:
    table = world.scheduler.table
    rows = [r.row for r in table.reqs if r is not None]
    table.page_table[rows[0], 20:24] = table.page_table[rows[1], 20:24]


def _leave_the_tree(world: World) -> None:
    world.scheduler.table.page_table[_row(world), 0] += 1


def _lock_for_nobody(world: World) -> None:
    prefix = world.scheduler.cache.prefix
    prefix.lock(prefix.match(np.array(COMPUTED, np.int32))[0])


def _unlock_what_runs(world: World) -> None:
    req = world.scheduler.table.reqs[_row(world)]
    assert req is not None
    world.scheduler.cache.prefix.unlock(req.handle)


def _miscount_lengths(world: World) -> None:
    world.scheduler.table.device_len[_row(world)] = 0


def _row(world: World) -> int:
    return next(r.row for r in world.scheduler.table.reqs if r is not None)


@pytest.mark.parametrize(
    "fault",
    [
        _lose_a_page, _free_a_page_twice, _share_a_page, _leave_the_tree, _lock_for_nobody,
        _unlock_what_runs, _miscount_lengths,
    ],
)  # fmt: skip
def test_a_fault_is_found_while_requests_run(fault: Callable[[World], None]) -> None:
    world = World(num_pages=60, max_prefill_tokens=64)
    world.add(COMPUTED, max_tokens=1, ignore_eos=True)
    world.run()
    for first in (2, 3):
        world.add([first] * 21, max_tokens=20, ignore_eos=True)
    for _ in range(6):
        world.step()
    fault(world)
    with pytest.raises(RuntimeError):
        integrity.check(world.scheduler)
