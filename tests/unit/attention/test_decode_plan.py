"""Decode work is shared out evenly, every tile once, and parts know whom they belong to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_kernels.decode_attention import MIN_TILES, TILE, max_chunks, plan_reference


@given(
    lens=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    chunks=st.sampled_from([1, 7, 132, 352, 1056]),
)
def test_chunks_cover_every_tile_once_and_differ_by_one_at_most(
    lens: list[int], chunks: int
) -> None:
    rows = np.arange(len(lens), dtype=np.int32)
    plan, requests = plan_reference(np.array(lens, np.int32), rows, chunks)
    used = plan[plan[:, 2] > plan[:, 1]]
    total = sum(-(-n // TILE) for n in lens)
    assert requests[-1, 0] == total
    covered = np.concatenate([np.arange(start, end) for _, start, end in used[:, :3]])
    assert covered.tolist() == list(range(total))
    sizes = used[:, 2] - used[:, 1]
    assert sizes.max() - sizes.min() <= 1
    assert len(used) == 1 or len(used) == min(chunks, -(-total // MIN_TILES))


@given(
    lens=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    chunks=st.sampled_from([1, 7, 132, 352]),
)
def test_a_request_knows_the_chunks_that_have_parts_of_it(lens: list[int], chunks: int) -> None:
    rows = np.arange(len(lens), dtype=np.int32)[::-1].copy()
    plan, requests = plan_reference(np.array(lens, np.int32), rows, chunks)
    for i, length in enumerate(lens):
        first, tokens, row, parts = requests[i]
        assert (tokens, row) == (length, rows[i])
        end = first + -(-length // TILE)
        having = [c for c, (_, a, b) in enumerate(plan[:, :3]) if max(a, first) < min(b, end)]
        assert having == list(range(parts >> 16, (parts & 0xFFFF) + 1))
    for index, start, end, _, *entry in plan:
        if start < end:
            assert entry == requests[index].tolist()
            assert requests[index, 0] <= start < requests[index + 1, 0]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
def test_the_warps_of_a_device_are_all_used_and_no_more(kv_heads: int) -> None:
    workers = max_chunks(132, kv_heads) * kv_heads
    assert 132 * 8 - kv_heads < workers <= 132 * 8
