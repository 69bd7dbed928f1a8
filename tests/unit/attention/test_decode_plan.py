"""Decode work is shared out evenly, every tile once, and parts know whom they belong to."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_kernels.decode_attention import BALANCE, TILE, owned_chunks, plan_reference

GROUP, STAGES = 2, 3
LENS = st.lists(st.integers(1, 3000), min_size=1, max_size=60)
WORKERS = st.sampled_from([1, 7, 132, 352])
SHARES = st.sampled_from([0, 2, 8])


def plan(lens: list[int], workers: int, share: int) -> tuple[npt.NDArray[np.int32], ...]:
    rows = np.arange(len(lens), dtype=np.int32)[::-1].copy()
    return plan_reference(
        np.array(lens, np.int32), rows, workers, group=GROUP, stages=STAGES, spare_share=share
    )


@settings(deadline=None)
@given(lens=LENS, workers=WORKERS, share=SHARES)
def test_chunks_cover_every_tile_once_and_those_of_warps_are_equal(
    lens: list[int], workers: int, share: int
) -> None:
    chunks, requests = plan(lens, workers, share)
    spare = int(chunks[0, 3])
    total = sum(-(-n // TILE) for n in lens)
    least = int(np.ceil(np.sqrt(-(-max(lens) // TILE) * GROUP / BALANCE)))
    owned = min(workers, -(-total // least))
    used = chunks[: owned + spare]
    assert not (chunks[owned + spare :, 1:3]).any()
    assert requests[-1, 0] == total
    covered = np.concatenate([np.arange(start, end) for _, start, end in used[:, :3]])
    assert covered.tolist() == list(range(total))
    sizes = used[:, 2] - used[:, 1]
    assert sizes[:owned].max() - sizes[:owned].min() <= 1
    if spare:  # then every warp has a chunk, and the copies are in one chunk ahead at most
        assert owned == workers and sizes.min() >= STAGES
        assert sizes[owned:].sum() == total // share


@settings(deadline=None)
@given(lens=LENS, workers=WORKERS, share=SHARES)
def test_a_request_knows_the_chunks_that_have_parts_of_it(
    lens: list[int], workers: int, share: int
) -> None:
    chunks, requests = plan(lens, workers, share)
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
    warps = owned_chunks(132, kv_heads) * kv_heads
    assert 132 * 8 - kv_heads < warps <= 132 * 8
