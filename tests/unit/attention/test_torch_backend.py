"""The reference backend against the definition of attention, in any mix of requests."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.attention.torch_backend import QUERY_BLOCK, TorchBackend, _buckets
from minisgl.kvcache.pool import KVPool
from tests.unit.models.stepper import make_batch


def check(work: list[tuple[int, int]], heads: int, kv_heads: int, dim: int = 8) -> None:
    """`work` is (cached, new) tokens for each request."""
    random = torch.Generator().manual_seed(1)
    longest = max(c + n for c, n in work)
    slots = len(work) * longest
    pool = KVPool(
        layers=2, pages=slots, page_size=1, kv_heads=kv_heads, head_dim=dim,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=random))
    table = torch.randperm(slots, generator=random).view(len(work), longest).int()
    for row, (cached, new) in enumerate(work):
        table[row, cached + new :] = 2**31 - 1  # never read: it would be out of range
    order = list(reversed(range(len(work))))  # rows of the table are not those of the batch
    batch = make_batch([(row, [0] * work[row][1], work[row][0]) for row in order], table)
    q = torch.randn(len(batch.positions), heads, dim, generator=random)
    backend = TorchBackend()
    backend.prepare_metadata(batch)
    got = backend.forward(q, 1, pool, batch)
    assert got.shape == q.shape
    start = 0
    for row in order:
        cached, new = work[row]
        for i in range(new):
            seen = table[row, : cached + i + 1].long()
            k = pool.k(1)[seen].repeat_interleave(heads // kv_heads, dim=1)
            v = pool.v(1)[seen].repeat_interleave(heads // kv_heads, dim=1)
            weight = (torch.einsum("hd,lhd->hl", q[start + i], k) / dim**0.5).softmax(-1)
            want = torch.einsum("hl,lhd->hd", weight, v)
            torch.testing.assert_close(got[start + i], want, rtol=1e-4, atol=1e-5)
        start += new


@pytest.mark.parametrize(
    "work",
    [
        [(0, 1)],
        [(9, 1)],
        [(9, 1)] * 3,
        [(0, 7)],
        [(3, 7)],
        [(3, 1), (0, 5), (900, 1), (6, 2), (0, 1), (20, 1)],
        [(5, QUERY_BLOCK + 3)],
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_any_mix_of_requests(work: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
    check(work, heads, kv_heads)


@settings(max_examples=30, deadline=None)
@given(work=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), min_size=1, max_size=6))
def test_random_mixes(work: list[tuple[int, int]]) -> None:
    check(work, 4, 2)


@given(lens=st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_buckets_hold_each_request_once_and_waste_little(lens: list[int]) -> None:
    lengths = np.array(lens)
    buckets = _buckets(lengths, np.arange(len(lens)))
    assert sorted(np.concatenate(buckets).tolist()) == list(range(len(lens)))
    for bucket in buckets:
        assert 2 * lengths[bucket].min() + 128 >= lengths[bucket].max()
