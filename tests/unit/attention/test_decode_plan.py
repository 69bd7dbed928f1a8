"""Decode work is shared out evenly, every tile once, and parts know whom they belong to."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_kernels.decode_attention import BALANCE, TILE, max_chunks, plan_reference

GROUP = 2
LENS = st.lists(st.integers(1, 3000), min_size=1, max_size=60)
CHUNKS = st.sampled_from([1, 7, 132, 352, 1056])


def plan(lens: list[int], chunks: int) -> tuple[npt.NDArray[np.int32], ...]:
    rows = np.arange(len(lens), dtype=np.int32)[::-1].copy()
    return plan_reference(np.array(lens, np.int32), rows, chunks, group=GROUP)


@settings(deadline=None)
@given(lens=LENS, most=CHUNKS)
def test_chunks_cover_every_tile_once_and_differ_by_one_at_most(lens: list[int], most: int) -> None:
    chunks, requests = plan(lens, most)
    total = sum(-(-n // TILE) for n in lens)
    least = int(np.ceil(np.sqrt(-(-max(lens) // TILE) * GROUP / BALANCE)))
    count = min(most, -(-total // least))
    assert not chunks[count:].any()
    assert requests[-1, 0] == total
    covered = np.concatenate([np.arange(start, end) for _, start, end in chunks[:count, :3]])
    assert covered.tolist() == list(range(total))
    sizes = chunks[:count, 2] - chunks[:count, 1]
    assert sizes.max() - sizes.min() <= 1


@settings(deadline=None)
@given(lens=LENS, most=CHUNKS)
def test_a_request_knows_the_chunks_that_have_parts_of_it(lens: list[int], most: int) -> None:
    chunks, requests = plan(lens, most)
    for i, length in enumerate(lens):
        first, tokens, row, parts = requests[i]
        assert (tokens, row) == (length, len(lens) - 1 - i)
        end = first + -(-length // TILE)
        having = [c for c, (_, a, b) in enumerate(chunks[:, :3]) if max(a, first) < min(b, end)]
        assert having == list(range(parts >> 16, (parts & 0xFFFF) + 1))
    for index, start, end, _, *entry in chunks:
        if start < end:
            assert entry == requests[index].tolist()
            assert requests[index, 0] <= start < requests[index + 1, 0]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
def test_the_warps_of_a_device_are_all_used_and_no_more(kv_heads: int) -> None:
    warps = max_chunks(132, kv_heads) * kv_heads
    assert 132 * 8 - kv_heads < warps <= 132 * 8
