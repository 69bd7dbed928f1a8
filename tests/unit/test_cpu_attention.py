"""The CPU's paged attention against its definition, with each instruction set that it has."""

import dataclasses
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl.attention.base import AttentionContext, ForwardBatch
from minisgl.attention.cpu_backend import CpuBackend
from minisgl.attention.registry import make_backend
from minisgl.kvcache.pool import KVPool
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cpu_decoder import CpuAttention
from minisgl_kernels.cpu_matmul import ISAS, best_isa
from tests.unit.models.stepper import make_batch
from tests.unit.sanitizer import needs_compiler

pytestmark = needs_compiler


def isas() -> list[str]:
    try:
        best = best_isa()
    except KernelUnavailable:
        return []
    # Where there are tiles attention uses none of them, but no vdpbf16ps either.
    return list(ISAS[: best + 1 + (ISAS[best] == "avx512")])


every_isa = pytest.mark.parametrize("isa", isas())


@dataclasses.dataclass
class Case:
    """Requests of (cached, new) tokens, whose pages are dealt out in random order."""

    work: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    page_size: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        pages = max(-(-(c + n) // self.page_size) for c, n in self.work)
        self.pool = KVPool(
            layers=1, pages=pages * len(self.work), page_size=self.page_size,
            kv_heads=self.kv_heads, head_dim=self.dim, dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.pool.buffer.copy_(torch.randn(self.pool.buffer.shape, generator=random) * 1.5)
        order = torch.randperm(pages * len(self.work), generator=random).view(len(self.work), -1)
        slots = order.unsqueeze(2) * self.page_size + torch.arange(self.page_size)
        self.table = slots.view(len(self.work), -1).int()
        for row, (cached, new) in enumerate(self.work):
            self.table[row, cached + new :] = 2**31 - 1  # never read: it would be out of range
        self.order = list(reversed(range(len(self.work))))
        tokens = sum(new for _, new in self.work)
        # queries stand between keys and values, as the QKV product leaves them
        wide = torch.randn(tokens, self.heads + 2 * self.kv_heads, self.dim, generator=random)
        self.q = wide.bfloat16()[:, : self.heads]

    def batch(self, rows: list[int] | None = None) -> ForwardBatch:
        rows = self.order if rows is None else rows
        return make_batch([(r, [0] * self.work[r][1], self.work[r][0]) for r in rows], self.table)

    def computed(self, isa: str, threads: int = 1) -> torch.Tensor:
        attention = CpuAttention(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.dim, isa=ISAS.index(isa),
            threads=threads,
        )  # fmt: skip
        batch = self.batch()
        attention.plan(batch.rows, batch.cached_lens, batch.device_lens, self.table)
        out = attention.forward(self.q, self.pool.k(0), self.pool.v(0))
        attention.close()
        return out

    def expected(self) -> torch.Tensor:
        out, start, group = [], 0, self.heads // self.kv_heads
        for row in self.order:
            cached, new = self.work[row]
            slots = self.table[row, : cached + new].long()
            k = self.pool.k(0)[slots].float().repeat_interleave(group, dim=1)
            v = self.pool.v(0)[slots].float().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", self.q[start : start + new].float(), k)
            scores /= math.sqrt(self.dim)
            later = torch.arange(cached + new) > cached + torch.arange(new).unsqueeze(1)
            weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v))
            start += new
        return torch.cat(out)


def assert_attends(case: Case, isa: str, threads: int = 1) -> None:
    # Weights are rounded to 8 bits, and so is the result.
    torch.testing.assert_close(
        case.computed(isa, threads).float(), case.expected(), rtol=2**-7, atol=2e-2
    )


@every_isa
@pytest.mark.parametrize("group", range(1, 9))
def test_any_number_of_query_heads_shares_a_kv_head(group: int, isa: str) -> None:
    work = [(130, 1), (0, 37), (11, 5), (0, 1)]
    assert_attends(Case(work, heads=2 * group, kv_heads=2), isa)


@every_isa
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 128, 144, 256])
def test_heads_are_any_multiple_of_16_wide(dim: int, isa: str) -> None:
    assert_attends(Case([(77, 1), (3, 40)], heads=3, kv_heads=1, dim=dim), isa)


@every_isa
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_pages_have_any_size(page_size: int, isa: str) -> None:
    assert_attends(Case([(100, 1), (0, 33), (64, 64)], page_size=page_size), isa)


@every_isa
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1024, 1025, 3000])
def test_a_decode_sees_all_its_tokens(length: int, isa: str) -> None:
    assert_attends(Case([(length - 1, 1)], heads=3, kv_heads=1), isa)


@every_isa
@pytest.mark.parametrize("cached", [0, 1, 127, 128, 2900])
@pytest.mark.parametrize("new", [2, 31, 33, 130])
def test_a_prefill_sees_what_is_cached_and_its_own_tokens(cached: int, new: int, isa: str) -> None:
    assert_attends(Case([(cached, new)], heads=3, kv_heads=1), isa)


@every_isa
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_share_the_work_and_change_no_bit(threads: int, isa: str) -> None:
    case = Case([(700, 1), (40, 70), (0, 1), (65, 1)])
    assert torch.equal(case.computed(isa, threads), case.computed(isa))
    assert_attends(case, isa, threads)


@every_isa
def test_a_request_gets_the_same_bits_alone_and_among_others(isa: str) -> None:
    case = Case([(700, 1), (40, 70), (1500, 1)])
    together, start = case.computed(isa), 0
    for row in case.order:
        new = case.work[row][1]
        alone = dataclasses.replace(case)
        alone.pool, alone.table, alone.order = case.pool, case.table, [row]
        alone.q = case.q[start : start + new]
        assert torch.equal(alone.computed(isa), together[start : start + new])
        start += new


@every_isa
def test_scores_of_any_size_give_finite_weights(isa: str) -> None:
    case = Case([(90, 1), (0, 50)], heads=2, kv_heads=1)
    case.q = case.q * 200
    got = case.computed(isa).float()
    torch.testing.assert_close(got, case.expected(), rtol=2**-7, atol=2e-2)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_mixes(data: st.DataObject) -> None:
    lengths = st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(1, 150)))
    kv_heads = data.draw(st.integers(1, 3))
    case = Case(
        data.draw(st.lists(lengths, min_size=1, max_size=5)),
        heads=kv_heads * data.draw(st.integers(1, 8)), kv_heads=kv_heads,
        dim=16 * data.draw(st.integers(1, 10)), page_size=data.draw(st.sampled_from([1, 3, 16])),
        seed=data.draw(st.integers(0, 2**31)),
    )  # fmt: skip
    assert_attends(case, data.draw(st.sampled_from(isas())), data.draw(st.sampled_from([1, 2])))


def test_requests_without_new_tokens_are_refused() -> None:
    case = Case([(5, 1), (5, 1)])
    attention = CpuAttention(heads=6, kv_heads=2, head_dim=64, isa=0, threads=1)
    lens = np.array([5, 6], np.int32)
    with pytest.raises(ValueError, match="each request must have new tokens"):
        attention.plan(torch.tensor([0, 1]), np.array([5, 5], np.int32), lens, case.table)
    with pytest.raises(TypeError, match="lengths must be int32"):
        attention.plan(torch.tensor([0, 1]), lens.astype(np.int64), lens, case.table)
    with pytest.raises(TypeError, match=r"expected contiguous torch\.int64"):
        attention.plan(torch.tensor([0, 1]).int(), lens, lens + 1, case.table)


def test_heads_of_another_width_are_refused() -> None:
    with pytest.raises(KernelUnavailable, match="heads of 20 dimensions are no multiple of 16"):
        CpuAttention(heads=2, kv_heads=1, head_dim=20, isa=0, threads=1)


def test_a_child_of_fork_computes_with_threads_of_its_own() -> None:
    case = Case([(700, 1), (40, 70)])
    attention = CpuAttention(heads=6, kv_heads=2, head_dim=64, isa=0, threads=3)
    batch = case.batch()
    attention.plan(batch.rows, batch.cached_lens, batch.device_lens, case.table)
    before = attention.forward(case.q, case.pool.k(0), case.pool.v(0))
    child = os.fork()
    if child == 0:
        same = torch.equal(attention.forward(case.q, case.pool.k(0), case.pool.v(0)), before)
        attention.close()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(attention.forward(case.q, case.pool.k(0), case.pool.v(0)), before)


def test_the_backend_computes_the_layers_of_a_model_that_torch_computes_the_rest_of() -> None:
    case = Case([(30, 1), (0, 20)])
    ctx = AttentionContext(
        device=torch.device("cpu"), dtype=torch.bfloat16, num_qo_heads=6, num_kv_heads=2,
        head_dim=64, page_size=1, max_running=4, max_seq_len=128,
    )  # fmt: skip
    backend, batch = make_backend(("cpu",), ctx), case.batch()
    assert isinstance(backend, CpuBackend)
    backend.prepare_metadata(batch)
    got = backend.forward(case.q, 0, case.pool, batch)
    torch.testing.assert_close(got.float(), case.expected(), rtol=2**-7, atol=2e-2)
