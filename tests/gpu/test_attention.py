"""Every attention backend on the device against float32 attention, request by request.

Errors are ||out - exact|| / ||exact|| of one request: bf16 results and probabilities leave about
2e-3 of it, a wrong key far more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention.base import (
    PROMPT_REQUESTS,
    AttentionBackend,
    AttentionContext,
    ForwardBatch,
)
from minisgl.attention.fa_backend import FlashAttentionBackend
from minisgl.attention.registry import make_backend
from minisgl.attention.torch_backend import TorchBackend
from minisgl.kvcache.pool import KVPool
from minisgl_kernels.block_table import block_table_function, block_table_reference
from minisgl_kernels.cuda_build import prepare
from minisgl_kernels.decode_attention import (
    DecodeAttention,
    _attention,
    decode_attention_reference,
    plan_reference,
    shares_of,
)
from minisgl_kernels.decode_shares import multiprocessor_speeds
from minisgl_kernels.qk_rope_store import qk_rope_store_reference

DEVICE = torch.device("cuda")
TOLERANCE = 8e-3
BATCH = 12
MAX_SEQ_LEN = 1500
LAYERS = 2
SHAPES = [(16, 8, 128), (40, 8, 128), (8, 2, 64), (9, 3, 64), (8, 1, 128)]
DECODERS = ["fi", "fa", "mini", "boxes"]
"""`boxes` is `mini` with few requests computed as many are."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All variants of the kernel of our own at the same time."""
    halves = torch.bfloat16
    shapes = [(halves, 128, g) for g in (2, 5, 8)] + [(halves, 64, g) for g in (2, 3, 4, 8)]
    shapes.append((torch.float16, 128, 2))
    boxes = [False, True] if torch.cuda.get_device_capability()[0] == 9 else [False]
    variants: list[tuple[Any, ...]] = [(*shape, b) for shape in shapes for b in boxes]
    variants += [(halves, 128, 5, True), (halves, 64, 1, True)] if True in boxes else []
    fused = ((halves, 128, 2), (halves, 128, 5), (halves, 64, 3))
    variants += [(*shape, False, n) for shape in fused for n in (1, 2)]
    prepare((_attention, variant) for variant in variants)


@dataclass
class Case:
    """A pool of random keys and values whose pages are dealt to requests in random order."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    dtype: torch.dtype = torch.bfloat16
    batch: int = BATCH
    max_seq_len: int = MAX_SEQ_LEN

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.page_size + 1000 * self.heads)
        torch.manual_seed(self.page_size)
        each = -(-self.max_seq_len // self.page_size)
        self.pool = KVPool(
            layers=LAYERS, pages=self.batch * each, page_size=self.page_size,
            kv_heads=self.kv_heads, head_dim=self.dim, dtype=self.dtype, device=DEVICE,
        )  # fmt: skip
        self.pool.buffer.normal_()
        pages = self.random.permutation(self.batch * each).reshape(self.batch, each)
        slots = pages[:, :, None] * self.page_size + np.arange(self.page_size)
        table = np.full((self.batch + 1, self.max_seq_len), 0, np.int32)
        table[:-1] = slots.reshape(self.batch, -1)[:, : self.max_seq_len]
        table[-1] = self.pool.dummy_page * self.page_size
        self.page_table = torch.from_numpy(table).to(DEVICE)

    def backend(self, name: str) -> AttentionBackend:
        return make_backend(name.split(","), self.context())

    def context(self) -> AttentionContext:
        return AttentionContext(
            device=DEVICE, dtype=self.dtype, num_qo_heads=self.heads, num_kv_heads=self.kv_heads,
            head_dim=self.dim, page_size=self.page_size, max_running=self.batch,
            max_seq_len=self.max_seq_len, capability=torch.cuda.get_device_capability(),
        )  # fmt: skip

    def step(self, cached: np.ndarray, new: np.ndarray) -> ForwardBatch:
        """Requests of random rows with so many tokens each."""
        rows = self.random.permutation(self.batch)[: len(new)]
        lens = (cached + new).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(new)])
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(cached, new, strict=True)])
        return ForwardBatch(
            input_ids=ints(positions), positions=ints(positions), out_loc=ints(positions),
            rows=ints(rows), page_table=self.page_table, cached_lens=cached.astype(np.int32),
            device_lens=lens, last_indices=ints(starts[1:] - 1), is_decode=bool((new == 1).all()),
            device_lens_dev=ints(lens), cu_seqlens_q=ints(starts),
        )  # fmt: skip

    def queries(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, self.heads, self.dim, device=DEVICE).to(self.dtype)

    def exact(self, q: torch.Tensor, layer: int, batch: ForwardBatch) -> list[torch.Tensor]:
        """Per request, [new, heads, dim] float32."""
        out, start = [], 0
        group = self.heads // self.kv_heads
        rows = batch.rows.tolist()
        for row, cached, length in zip(rows, batch.cached_lens, batch.device_lens, strict=True):
            slots = self.page_table[row, :length].long()
            k = self.pool.k(layer)[slots].float().repeat_interleave(group, 1)
            v = self.pool.v(layer)[slots].float().repeat_interleave(group, 1)
            new = int(length - cached)
            scores = torch.einsum("qhd,khd->hqk", q[start : start + new].float(), k)
            later = torch.arange(length, device=DEVICE) > torch.arange(
                int(cached), int(length), device=DEVICE
            ).unsqueeze(1)
            weights = (scores * self.dim**-0.5).masked_fill(later, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v))
            start += new
        return out

    def assert_right(self, got: torch.Tensor, q: torch.Tensor, batch: ForwardBatch) -> None:
        start = 0
        for i, exact in enumerate(self.exact(q, 1, batch)):
            mine = got[start : start + len(exact)].float()
            error = ((mine - exact).norm() / exact.norm()).item()
            assert error < TOLERANCE, (  # also for NaN
                f"request {i} of {len(batch.device_lens)}, {batch.cached_lens[i]} + {len(exact)} "
                f"tokens: error {error:.4f}"
            )
            start += len(exact)

    def check_eager(self, backend: AttentionBackend, cached: np.ndarray, new: np.ndarray) -> None:
        batch = self.step(cached, new)
        q = self.queries(int(new.sum()))
        backend.prepare_metadata(batch)
        self.assert_right(backend.forward(q, 1, self.pool, batch), q, batch)


def ints(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int32)).to(DEVICE)


def lengths(case: Case, count: int) -> np.ndarray:
    """Of 1 to the longest, edges of tiles and pages among them."""
    edges = [1, 2, 15, 16, 17, 64, 65, case.max_seq_len]
    some = case.random.integers(1, case.max_seq_len + 1, count)
    some[: min(count, len(edges))] = edges[:count]
    return case.random.permutation(some)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", DECODERS)
def test_decode_is_exact_for_any_lengths(
    name: str, shape: tuple[int, int, int], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = name in ("mini", "boxes")
    if name == "boxes":
        monkeypatch.setattr("minisgl.attention.mini_backend.FUSED_TOKENS", 0)
    case = Case(*shape, page_size)
    backend = case.backend("fi,mini" if own else name)
    if own:  # the rows of a tile that are nobody's hold what somebody left there
        shorter = slice(0, case.max_seq_len - case.max_seq_len % 16 - 3)
        used = case.page_table[:-1, shorter].flatten().long()
        rest = torch.ones(case.pool.k(1).shape[0], dtype=torch.bool, device=DEVICE)
        rest[used] = False
        case.pool.k(1)[rest] = case.pool.v(1)[rest] = torch.nan
        case.max_seq_len = shorter.stop
    for count in (1, 3, BATCH):
        lens = lengths(case, count)
        case.check_eager(backend, lens - 1, np.ones(count, np.int64))


@pytest.mark.parametrize("shape", [(16, 8, 128), (40, 8, 128), (8, 1, 128)])
def test_a_long_request_is_shared_out_over_many_warps(shape: tuple[int, int, int]) -> None:
    """Over more of them than one look at their parts takes."""
    case = Case(*shape, 64, batch=2, max_seq_len=9000)
    backend = case.backend("fi,mini")
    for lens in (np.array([9000]), np.array([8999, 1])):
        case.check_eager(backend, lens - 1, np.ones(len(lens), np.int64))


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_kernel_of_our_own_takes_float16(page_size: int) -> None:
    case = Case(16, 8, 128, page_size, torch.float16)
    lens = lengths(case, BATCH)
    kernel = DecodeAttention(
        max_batch=BATCH, num_qo_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.float16,
        device=DEVICE, page_size=page_size,
    )  # fmt: skip
    batch, q = case.step(lens - 1, np.ones(BATCH, np.int64)), case.queries(BATCH)
    assert batch.device_lens_dev is not None
    kernel.plan(batch.device_lens_dev, batch.rows)
    k, v = case.pool.k(1), case.pool.v(1)
    out = kernel.attention(q, k, v, case.page_table)
    case.assert_right(out, q, batch)
    reference = decode_attention_reference(
        q, k, v, case.page_table, batch.device_lens.tolist(), batch.rows.tolist()
    )
    assert (out.float() - reference).norm() < TOLERANCE * reference.norm()


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("shape", [(16, 8, 128), (40, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("name", ["fi", "fa", "torch"])
def test_prefill_is_exact_for_prompts_chunks_and_mixed_batches(
    name: str, shape: tuple[int, int, int], page_size: int
) -> None:
    case = Case(*shape, page_size)
    backend = case.backend(name)
    for cached, new in (
        ([0], [1]),
        ([0], [300]),
        ([0, 0, 0], [5, 130, 17]),
        ([page_size, 0, 640, 1000], [20, 7, 256, 1]),
        ([600, 3, 0, 64, 900], [1, 1, 77, 128, 1]),
    ):
        case.check_eager(backend, np.array(cached), np.array(new))


def static_batch(case: Case, size: int) -> tuple[ForwardBatch, Callable[..., None]]:
    """Buffers of a captured decode batch, and what fills them for one step without waiting."""
    rows = torch.full((size,), case.batch, dtype=torch.int32, device=DEVICE)
    lens = torch.ones(size, dtype=torch.int32, device=DEVICE)
    batch = ForwardBatch(
        input_ids=rows, positions=rows, out_loc=rows, rows=rows, page_table=case.page_table,
        cached_lens=np.zeros(size, np.int32), device_lens=np.ones(size, np.int32),
        last_indices=rows, is_decode=True, device_lens_dev=lens,
        cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip

    def fill(step: ForwardBatch) -> None:
        count = len(step.device_lens)
        rows.fill_(case.batch)
        lens.fill_(1)
        rows[:count] = step.rows
        lens[:count] = step.device_lens_dev
        host = np.ones(size, np.int32)
        host[:count] = step.device_lens
        batch.device_lens, batch.cached_lens = host, host - 1

    return batch, fill


def captured(case: Case, backend: AttentionBackend, batch: ForwardBatch, q: torch.Tensor):  # type: ignore[no-untyped-def]
    """The graph of LAYERS layers over `batch`, and the result of the last one."""

    def compute() -> torch.Tensor:
        backend.capture_metadata(batch)
        backend.forward(q, 0, case.pool, batch)
        return backend.forward(q, 1, case.pool, batch)

    backend.replay_metadata(batch)
    compute()
    backend.replay_metadata(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    return graph, out


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("name", ["fi", "fa", "fi,mini"])
def test_a_captured_decode_follows_new_lengths_and_rows_and_is_filled_up_by_the_dummy_row(
    name: str, page_size: int
) -> None:
    case = Case(16, 8, 128, page_size)
    backend = case.backend(name)
    backend.init_capture(8)
    graphs = {}
    for size in (8, 2):
        batch, fill = static_batch(case, size)
        q = case.queries(size)
        graphs[size] = (fill, q, batch, *captured(case, backend, batch, q))
    for count, size in ((1, 2), (5, 8), (8, 8), (2, 2), (3, 8), (1, 8)):
        fill, q, batch, graph, out = graphs[size]
        step = case.step(lengths(case, count) - 1, np.ones(count, np.int64))
        q.normal_()
        out.fill_(float("nan"))
        fill(step)
        backend.replay_metadata(batch)
        graph.replay()
        case.assert_right(out[:count], q[:count], step)


@pytest.mark.parametrize("name", ["fi", "fa", "fi,mini"])
def test_steps_that_are_queued_ahead_keep_their_own_lengths(name: str) -> None:
    """E03: metadata of step N + 1 is made while the device has not read that of step N."""
    case = Case(16, 8, 128, 16)
    backend = case.backend(name)
    backend.init_capture(4)
    batch, fill = static_batch(case, 4)
    q = case.queries(4)
    graph, out = captured(case, backend, batch, q)
    steps = [case.step(lengths(case, 4) - 1, np.ones(4, np.int64)) for _ in range(6)]
    torch.cuda.synchronize()
    results = []
    for step in steps:
        torch.cuda._sleep(20_000_000)  # cycles: the host is far ahead of the device
        fill(step)
        backend.replay_metadata(batch)
        graph.replay()
        results.append(out.clone())
    for step, result in zip(steps, results, strict=True):
        case.assert_right(result, q, step)


@pytest.mark.parametrize("name", ["fi", "fa"])
def test_prompts_that_are_queued_ahead_keep_their_own_lengths(name: str) -> None:
    case = Case(16, 8, 128, 16)
    backend = case.backend(name)
    work = [(np.array([0, 160]), np.array([200, 33])), (np.array([64, 0]), np.array([5, 700]))] * 2
    steps = [case.step(cached, new) for cached, new in work]
    queries = [case.queries(int(new.sum())) for _, new in work]
    torch.cuda.synchronize()
    results = []
    for step, q in zip(steps, queries, strict=True):
        torch.cuda._sleep(20_000_000)
        backend.prepare_metadata(step)
        results.append(backend.forward(q, 1, case.pool, step))
    for step, q, result in zip(steps, queries, results, strict=True):
        case.assert_right(result, q, step)


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
def test_the_device_plans_as_the_reference_does(kv_heads: int) -> None:
    random = np.random.default_rng(kv_heads)
    kernel = DecodeAttention(
        max_batch=700, num_qo_heads=2 * kv_heads, num_kv_heads=kv_heads, head_dim=64,
        dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    for count, longest in ((1, 5), (1, 4000), (7, 40), (256, 2000), (700, 3000), (64, 1)):
        lens = random.integers(1, longest + 1, count).astype(np.int32)
        rows = random.permutation(count).astype(np.int32)
        kernel.plan(ints(lens), ints(rows))
        chunks, requests = plan_reference(lens, rows, len(kernel.chunks), group=2)
        np.testing.assert_array_equal(kernel.chunks.cpu().numpy(), chunks)
        np.testing.assert_array_equal(kernel.requests.cpu().numpy()[: count + 1], requests)


@pytest.mark.parametrize("shape", [(16, 8, 128), (40, 8, 128), (32, 4, 64)])
def test_the_kernel_of_our_own_gives_the_same_bits_each_time(shape: tuple[int, int, int]) -> None:
    """Whichever warp ends last adds the parts up in the same order: a race would change bits."""
    case = Case(*shape, 16, batch=64)
    lens = lengths(case, 64)
    batch, q = case.step(lens - 1, np.ones(64, np.int64)), case.queries(64)
    backend = case.backend("fi,mini")
    backend.prepare_metadata(batch)
    first = backend.forward(q, 1, case.pool, batch)
    case.assert_right(first, q, batch)
    for _ in range(50):
        assert torch.equal(backend.forward(q, 1, case.pool, batch), first)


@pytest.mark.parametrize(
    "shape", [(16, 8, 128), (5, 1, 128), (12, 4, 64), (9, 3, 64), (32, 32, 64)]
)
def test_multiprocessors_have_shares_by_their_speed(shape: tuple[int, int, int]) -> None:
    """And the same bits come out, launch after launch, whichever of them computes what."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    heads, kv_heads, dim = shape
    case = Case(*shape, 16, batch=64, max_seq_len=3000)
    lens = lengths(case, 64)
    kernel = DecodeAttention(
        max_batch=64, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        dtype=torch.bfloat16, device=DEVICE, page_size=16,
    )  # fmt: skip
    speeds = multiprocessor_speeds(
        kernel, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=torch.bfloat16,
        device=DEVICE,
    )  # fmt: skip
    for some in (speeds, case.random.uniform(0.75, 1.5, kernel.places), None):
        kernel.share_out(some)
        shares = None if some is None else shares_of(some, len(kernel.chunks), kv_heads)
        step = case.step(lens - 1, np.ones(64, np.int64))
        assert step.device_lens_dev is not None
        kernel.plan(step.device_lens_dev, step.rows)
        chunks, _ = plan_reference(
            step.device_lens, step.rows.cpu().numpy(), len(kernel.chunks),
            group=heads // kv_heads, shares=shares,
        )  # fmt: skip
        np.testing.assert_array_equal(kernel.chunks.cpu().numpy(), chunks)
        q, slots = case.queries(64), (case.pool.k(1), case.pool.v(1))
        first = kernel.attention(q, *slots, case.page_table)
        case.assert_right(first, q, step)
        for _ in range(30):
            assert torch.equal(kernel.attention(q, *slots, case.page_table), first)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("shape", [(16, 8, 128), (40, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize(("batch", "page_size"), [(1, 16), (7, 1), (7, 16), (64, 1), (64, 64)])
def test_attention_of_the_qkv_product_is_rope_and_store_and_attention(
    shape: tuple[int, int, int], normalised: bool, batch: int, page_size: int
) -> None:
    heads, kv_heads, dim = shape
    case = Case(*shape, page_size, batch=batch)
    lens = np.maximum(lengths(case, batch), 2)
    step = case.step(lens - 1, np.ones(batch, np.int64))
    assert step.device_lens_dev is not None
    kernel = DecodeAttention(
        max_batch=batch, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
        dtype=torch.bfloat16, device=DEVICE, page_size=page_size,
    )  # fmt: skip
    kernel.plan(step.device_lens_dev, step.rows)
    k, v = case.pool.k(1), case.pool.v(1)
    qkv = torch.randn(batch, (heads + 2 * kv_heads) * dim, device=DEVICE).bfloat16()
    weights = torch.rand(2, dim, device=DEVICE).add(0.5).bfloat16() if normalised else (None, None)
    angles = torch.randn(MAX_SEQ_LEN, dim // 2, device=DEVICE)
    turn = (*weights, 1e-6, torch.cat((angles.cos(), angles.sin()), dim=1))
    positions = step.device_lens_dev - 1
    slots = case.page_table[step.rows.long(), positions.long()]
    k[slots.long()] = v[slots.long()] = torch.nan  # of no use before it is stored
    out = kernel.attention_of_qkv(qkv, *turn, k, v, case.page_table)
    mine = k[slots.long()].clone(), v[slots.long()].clone()
    q = qk_rope_store_reference(qkv, *turn, positions, slots, k, v, heads, kv_heads)
    torch.testing.assert_close(mine[0], k[slots.long()], rtol=2**-7, atol=1e-4)
    assert torch.equal(mine[1], v[slots.long()])
    case.assert_right(out, q, step)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_block_tables_name_the_pages_of_each_request(page_size: int) -> None:
    case = Case(16, 8, 128, page_size)
    step = case.step(lengths(case, 5) - 1, np.ones(5, np.int64))
    pages = -(-step.device_lens // page_size)
    starts = ints(np.concatenate([[0], np.cumsum(pages)]))
    fill = block_table_function()
    assert fill is not block_table_reference, "the kernel does not compile"
    width = -(-MAX_SEQ_LEN // page_size)
    results = []
    for function in (fill, block_table_reference):
        table = torch.full((5, width), -1, dtype=torch.int32, device=DEVICE)
        flat = torch.full((5 * width + 1,), -1, dtype=torch.int32, device=DEVICE)
        function(table, case.page_table, step.rows, step.device_lens_dev, page_size)
        function(flat, case.page_table, step.rows, step.device_lens_dev, page_size, starts)
        used = torch.arange(width, device=DEVICE) < ints(pages).unsqueeze(1)
        assert torch.equal(flat[: int(pages.sum())], table[used])
        results.append(table[used])
    assert torch.equal(*results)


def test_flash_attention_shares_out_its_work_once_a_step() -> None:
    """With and without that, the results are the same."""
    case = Case(16, 8, 128, 64)
    backend = case.backend("fa")
    assert isinstance(backend, FlashAttentionBackend)
    batch = case.step(lengths(case, BATCH) - 1, np.ones(BATCH, np.int64))
    q = case.queries(BATCH)
    backend.prepare_metadata(batch)
    assert batch.metadata.schedule is not None
    for _ in range(3):
        case.assert_right(backend.forward(q, 1, case.pool, batch), q, batch)
    batch.metadata.schedule = None
    case.assert_right(backend.forward(q, 1, case.pool, batch), q, batch)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", ["fa", "fi"])
def test_a_captured_prefill_follows_new_prompts_and_is_filled_up_by_the_dummy_row(
    name: str, page_size: int
) -> None:
    case = Case(16, 8, 128, page_size)
    backend = case.backend(name)
    backend.init_capture(8)
    tokens = 128
    buffers = {
        "rows": torch.full((PROMPT_REQUESTS,), case.batch, dtype=torch.int32, device=DEVICE),
        "lens": torch.ones(PROMPT_REQUESTS, dtype=torch.int32, device=DEVICE),
        "starts": torch.zeros(PROMPT_REQUESTS + 1, dtype=torch.int32, device=DEVICE),
    }
    places = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)

    def batch_of(rows: list[int], cached: list[int], new: list[int]) -> ForwardBatch:
        """Real requests, then the dummy row with what is left, then requests without a token."""
        rest = PROMPT_REQUESTS - len(new)
        rows += [case.batch] * rest
        new += [tokens - sum(new)] + [0] * (rest - 1)
        cached += [0] + [1] * (rest - 1)
        if new[-rest] == 0:
            cached[-rest] = 1
        lens = np.array(cached) + np.array(new)
        buffers["rows"].copy_(ints(np.array(rows)))
        buffers["lens"].copy_(ints(lens))
        buffers["starts"].copy_(ints(np.concatenate([[0], np.cumsum(new)])))
        return ForwardBatch(
            input_ids=places, positions=places, out_loc=places, rows=buffers["rows"],
            page_table=case.page_table, cached_lens=np.array(cached, np.int32),
            device_lens=lens.astype(np.int32), last_indices=buffers["lens"], is_decode=False,
            device_lens_dev=buffers["lens"], cu_seqlens_q=buffers["starts"],
        )  # fmt: skip

    q = case.queries(tokens)
    batch = batch_of([], [], [])
    graph, out = captured(case, backend, batch, q)
    for cached, new in (([0], [128]), ([64, 0, 1000], [20, 7, 100]), ([0, 600], [1, 1])):
        real = len(new)
        rows = case.random.permutation(case.batch)[:real].tolist()
        now = batch_of(rows, cached, new)
        q.normal_()
        out.fill_(float("nan"))
        backend.replay_metadata(now)
        graph.replay()
        exact, start = case.exact(q, 1, now), 0
        for i in range(real):
            mine = out[start : start + now.device_lens[i] - now.cached_lens[i]].float()
            assert (mine - exact[i]).norm() < TOLERANCE * exact[i].norm()
            start += len(mine)


def test_the_torch_backend_is_the_same_reference_on_the_device() -> None:
    case = Case(9, 3, 64, 16)
    backend = TorchBackend()
    case.check_eager(backend, lengths(case, BATCH) - 1, np.ones(BATCH, np.int64))


@pytest.mark.parametrize("shape", [(16, 8, 128), (40, 8, 128)])
def test_trtllm_decodes_where_it_cannot_prefill(shape: tuple[int, int, int]) -> None:
    """Its kernel is compiled here, which takes most of a minute."""
    case = Case(*shape, 64)
    backend = case.backend("fi,trtllm")
    lens = lengths(case, 8)
    case.check_eager(backend, lens - 1, np.ones(8, np.int64))
    backend.init_capture(4)
    batch, fill = static_batch(case, 4)
    q = case.queries(4)
    graph, out = captured(case, backend, batch, q)
    step = case.step(lengths(case, 3) - 1, np.ones(3, np.int64))
    fill(step)
    graph.replay()
    case.assert_right(out[:3], q[:3], step)
