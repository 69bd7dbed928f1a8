"""Which heads and entries a rank holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.config import UsageError
from minisgl.layers.sharding import Shard, even_shard, head_shard, padded_shard


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "local", "q", "kv"),
    [
        (32, 8, 4, (8, 2), [(0, 8), (8, 8), (16, 8), (24, 8)], [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (9, 3, 1, (9, 3), [(0, 9)], [(0, 3)]),
        (9, 3, 2, (6, 2), [(0, 6), (6, 3)], [(0, 2), (2, 1)]),
        (9, 3, 4, (3, 1), [(0, 3), (3, 3), (6, 3), (9, 0)], [(0, 1), (1, 1), (2, 1), (3, 0)]),
        (4, 1, 2, (2, 1), [(0, 2), (2, 2)], [(0, 1), (0, 1)]),
        (4, 1, 4, (1, 1), [(0, 1), (1, 1), (2, 1), (3, 1)], [(0, 1)] * 4),
        (4, 2, 4, (1, 1), [(0, 1), (1, 1), (2, 1), (3, 1)], [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (14, 2, 4, (4, 1), [(0, 4), (4, 3), (7, 4), (11, 3)], [(0, 1), (0, 1), (1, 1), (1, 1)]),
        (2, 1, 4, (1, 1), [(0, 1), (1, 1), (2, 0), (2, 0)], [(0, 1)] * 4),
        (4, 2, 3, (2, 1), [(0, 2), (2, 2), (4, 0)], [(0, 1), (1, 1), (2, 0)]),
    ],
)  # fmt: skip
def test_the_heads_of_each_rank(
    heads: int, kv_heads: int, ranks: int, local: tuple[int, int],
    q: list[tuple[int, int]], kv: list[tuple[int, int]],
) -> None:  # fmt: skip
    shards = [head_shard(heads, kv_heads, rank, ranks) for rank in range(ranks)]
    assert [(s.q.local, s.kv.local) for s in shards] == [local] * ranks
    assert [(s.q.start, s.q.count) for s in shards] == q
    assert [(s.kv.start, s.kv.count) for s in shards] == kv


@given(kv_heads=st.integers(1, 16), group=st.integers(1, 16), ranks=st.integers(1, 16))
def test_every_query_head_is_on_one_rank_beside_its_kv_head(
    kv_heads: int, group: int, ranks: int
) -> None:
    seen = []
    for rank in range(ranks):
        shard = head_shard(kv_heads * group, kv_heads, rank, ranks)
        local_group = shard.q.local // shard.kv.local
        assert shard.q.local % shard.kv.local == 0
        for i in range(shard.q.count):
            seen.append(shard.q.start + i)
            assert shard.kv.start + i // local_group == seen[-1] // group
    assert seen == list(range(kv_heads * group))


@given(size=st.integers(1, 500), ranks=st.integers(1, 32))
def test_padded_parts_cover_a_dimension_once(size: int, ranks: int) -> None:
    shards = [padded_shard(size, rank, ranks) for rank in range(ranks)]
    covered = [i for s in shards for i in range(size)[s.take]]
    assert covered == list(range(size))
    assert len({s.local for s in shards}) == 1


def test_a_size_that_does_not_divide_is_named() -> None:
    assert even_shard("intermediate_size", 12, 2, 3) == Shard(8, 4, 4)
    with pytest.raises(UsageError, match=r"intermediate_size 12 .* 5 ranks.*--tensor-parallel"):
        even_shard("intermediate_size", 12, 0, 5)
