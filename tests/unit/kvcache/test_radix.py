"""The radix tree by itself: what it finds, what it keeps, and what it gives up first."""

import tracemalloc

import numpy as np
import pytest

from minisgl.kvcache import Handle, RadixCache
from minisgl.kvcache.radix import _Node


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def _insert(cache: RadixCache, *ids: int, slots: int) -> Handle:
    """Insert these ids with the slots from `slots` on."""
    return cache.insert(_ids(*ids), np.arange(slots, slots + len(ids), dtype=np.int32)).handle


def _found(cache: RadixCache, *ids: int) -> list[int]:
    cache.check()
    handle, slots = cache.match(_ids(*ids))
    assert handle.cached_len == len(slots)
    cache.check()
    return slots.tolist()


def test_a_prefix_is_found_with_its_slots_and_no_further() -> None:
    cache = RadixCache(1)
    _insert(cache, 5, 6, 7, 8, slots=20)
    assert _found(cache, 5, 6, 7, 8, 9) == [20, 21, 22, 23]
    assert _found(cache, 5, 6) == [20, 21]
    assert _found(cache, 6, 7) == []


def test_a_lookup_that_ends_inside_a_node_splits_it_and_both_parts_stay() -> None:
    cache = RadixCache(1)
    _insert(cache, 1, 2, 3, 4, slots=10)
    _insert(cache, 1, 2, 9, slots=30)
    assert _found(cache, 1, 2, 3, 4) == [10, 11, 12, 13]
    assert _found(cache, 1, 2, 9) == [10, 11, 32]
    assert sorted(cache.held()) == [10, 11, 12, 13, 32]


def test_matches_end_at_whole_pages() -> None:
    cache = RadixCache(4)
    _insert(cache, 1, 2, 3, 4, 5, 6, 7, 8, slots=0)
    assert _found(cache, 1, 2, 3, 4, 5, 6, 7) == [0, 1, 2, 3]
    assert _found(cache, 1, 2, 3) == []
    # the first page decides between children, not the first token
    _insert(cache, 1, 2, 3, 9, slots=8)
    assert _found(cache, 1, 2, 3, 9) == [8, 9, 10, 11]


def test_an_insert_says_what_was_there_and_keeps_those_slots() -> None:
    cache = RadixCache(1)
    _insert(cache, 1, 2, 3, slots=10)
    done = cache.insert(_ids(1, 2, 3, 4), np.array([50, 51, 52, 53], np.int32))
    assert done.present == 3 and done.handle.cached_len == 4
    assert _found(cache, 1, 2, 3, 4) == [10, 11, 12, 53]


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache(1)
    _insert(cache, 1, 1, slots=10)
    _insert(cache, 2, 2, slots=20)
    _insert(cache, 3, 3, slots=30)
    assert _found(cache, 1, 1) == [10, 11]  # used again since
    assert sorted(cache.evict(2)) == [20, 21]
    assert sorted(cache.evict(2)) == [30, 31]
    assert sorted(cache.evict(2)) == [10, 11]
    cache.check()


def test_a_leaf_gives_up_its_end_in_whole_pages_and_keeps_its_start() -> None:
    cache = RadixCache(2)
    _insert(cache, 1, 2, 3, 4, 5, 6, slots=0)
    assert cache.evict(1).tolist() == [4, 5]
    assert _found(cache, 1, 2, 3, 4, 5, 6) == [0, 1, 2, 3]


def test_a_node_is_evicted_only_after_all_its_children() -> None:
    cache = RadixCache(1)
    _insert(cache, 1, 2, slots=0)
    _insert(cache, 1, 3, slots=10)
    assert sorted(cache.evict(2)) == [1, 11]
    assert cache.evict(1).tolist() == [0]


def test_a_locked_path_is_never_evicted_and_is_again_once_each_lock_is_taken_back() -> None:
    cache = RadixCache(1)
    handle = _insert(cache, 1, 2, 3, slots=0)
    _insert(cache, 1, 2, 9, slots=10)
    cache.lock(handle)
    cache.lock(handle)
    assert (cache.protected, cache.evictable) == (3, 1)
    assert cache.evict(1).tolist() == [12]
    with pytest.raises(ValueError, match="cannot evict 1 tokens: 0 are evictable"):
        cache.evict(1)
    cache.unlock(handle)
    assert cache.evictable == 0
    cache.unlock(handle)
    assert sorted(cache.evict(3)) == [0, 1, 2]
    cache.check()


def test_a_lock_holds_both_parts_of_a_node_that_is_split_under_it() -> None:
    cache = RadixCache(1)
    handle = _insert(cache, 1, 2, 3, 4, slots=0)
    cache.lock(handle)
    assert _found(cache, 1, 2) == [0, 1]
    assert (cache.protected, cache.evictable) == (4, 0)
    assert cache.slots(handle).tolist() == [0, 1, 2, 3]
    cache.unlock(handle)
    assert (cache.protected, cache.evictable) == (0, 4)


def test_eviction_compares_few_leaves_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O(log n): a heap, and no walk over all leaves."""
    cache = RadixCache(1)
    for i in range(2000):
        _insert(cache, i, slots=i)
    monkeypatch.setattr(cache, "_nodes", lambda: pytest.fail("eviction walked the tree"))
    pushed = 0
    offer = cache._offer

    def counted(node: _Node) -> None:
        nonlocal pushed
        pushed += 1
        offer(node)

    monkeypatch.setattr(cache, "_offer", counted)
    for _ in range(100):
        cache.evict(1)
    assert pushed <= 200


def test_the_heap_holds_each_leaf_once_however_often_it_is_used() -> None:
    cache = RadixCache(1)
    for i in range(10):
        _insert(cache, i, i, slots=2 * i)
    for i in range(1000):
        handle, _ = cache.match(_ids(i % 10, i % 10))
        cache.lock(handle)
        cache.unlock(handle)
    assert len(cache._heap) == 10


@pytest.mark.parametrize("way", ["split", "eviction"])
def test_a_short_prefix_does_not_keep_the_memory_of_the_long_prompt_it_came_from(way: str) -> None:
    cache, size, prompts = RadixCache(1), 20_000, 50
    tracemalloc.start()
    try:
        for i in range(prompts):
            ids = np.arange(i * size, (i + 1) * size, dtype=np.int32)
            cache.insert(ids, ids)
            if way == "split":  # someone shares the first ten tokens, and uses them again
                handle, _ = cache.match(ids[:10])
                cache.lock(handle)
            cache.evict(size - 10)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(cache.held()) == prompts * 10
    assert held < 2 * size * 4, "less than one of the prompts, not all of them"


@pytest.mark.parametrize("fault", ["lock", "counter", "lost leaf", "child"])
def test_the_check_finds_what_is_wrong(fault: str) -> None:
    cache = RadixCache(1)
    handle = _insert(cache, 1, 2, 3, slots=0)
    _insert(cache, 1, 2, 4, slots=10)
    cache.check()
    node = handle.node
    if fault == "lock":
        node.locks += 1
    elif fault == "counter":
        cache._evictable += 1
    elif fault == "lost leaf":
        cache._heap.clear()
    else:
        node.parent.locks = -1
    with pytest.raises(RuntimeError):
        cache.check()
