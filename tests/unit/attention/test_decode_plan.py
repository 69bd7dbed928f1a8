"""Decode work is shared out evenly, every tile once, and parts know whom they belong to."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_kernels.decode_attention import (
    BALANCE,
    PIECES,
    TILE,
    UNIT_SHARE,
    max_workers,
    plan_reference,
)

GROUP = 2
LENS = st.lists(st.integers(1, 3000), min_size=1, max_size=60)
WORKERS = st.sampled_from([1, 7, 132, 352, 1056])


def plan(lens: list[int], workers: int) -> tuple[npt.NDArray[np.int32], ...]:
    rows = np.arange(len(lens), dtype=np.int32)[::-1].copy()
    chunks = workers * (1 + len(PIECES))
    return plan_reference(np.array(lens, np.int32), rows, chunks, group=GROUP)


@settings(deadline=None)
@given(lens=LENS, most=WORKERS)
def test_chunks_cover_every_tile_once_and_shares_differ_by_one_at_most(
    lens: list[int], most: int
) -> None:
    chunks, requests = plan(lens, most)
    total = sum(-(-n // TILE) for n in lens)
    least = int(np.ceil(np.sqrt(-(-max(lens) // TILE) * GROUP / BALANCE)))
    count = min(most, -(-total // least))
    assert requests[-1, 0] == total
    used = chunks[chunks[:, 1] < chunks[:, 2]]
    used = used[used[:, 3].argsort()]
    assert used[:, 3].tolist() == list(range(len(used)))
    covered = np.concatenate([np.arange(start, end) for _, start, end in used[:, :3]])
    assert covered.tolist() == list(range(total))
    unit = total // count // UNIT_SHARE
    shares = used.reshape(count, len(used) // count, 8)
    sizes = shares[:, -1, 2] - shares[:, 0, 1]
    assert sizes.max() - sizes.min() <= 1
    assert len(used) == (count * (1 + len(PIECES)) if unit else count)
    pieces = chunks[most : most + len(used) - count]
    expected = [unit * size for size in PIECES for _ in range(count)]
    assert (pieces[:, 2] - pieces[:, 1]).tolist() == expected[: len(pieces)]


@settings(deadline=None)
@given(lens=LENS, most=WORKERS)
def test_a_request_knows_the_chunks_that_have_parts_of_it(lens: list[int], most: int) -> None:
    chunks, requests = plan(lens, most)
    used = chunks[chunks[:, 1] < chunks[:, 2]]
    for i, length in enumerate(lens):
        first, tokens, row, parts = requests[i]
        assert (tokens, row) == (length, len(lens) - 1 - i)
        end = first + -(-length // TILE)
        having = sorted(n for _, a, b, n in used[:, :4] if max(a, first) < min(b, end))
        assert having == list(range(parts >> 16, (parts & 0xFFFF) + 1))
    for index, start, _, _, *entry in used:
        assert entry == requests[index].tolist()
        assert requests[index, 0] <= start < requests[index + 1, 0]


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
def test_the_warps_of_a_device_are_all_used_and_no_more(kv_heads: int) -> None:
    warps = max_workers(132, kv_heads) * kv_heads
    assert 132 * 8 - kv_heads < warps <= 132 * 8
