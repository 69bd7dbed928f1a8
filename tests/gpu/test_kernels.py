"""The CUDA kernels that move and transform rows, each against its reference in torch."""

import contextlib

import pytest
import torch

from minisgl_kernels import activation, decode_inputs, embedding, kv_store, norm, qk_rope_store
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import prepare

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

TOKENS = [0, 1, 5, 129]
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All variants of this file at the same time: one by one they would take minutes."""
    bytes_of_rows = [(h * dtype.itemsize,) for h, dtype in TABLES]
    prepare(
        [
            *((embedding._family, signature) for signature in bytes_of_rows),
            *((kv_store._family, (h * d * t.itemsize,)) for h, d, t in KV_ROWS),
            *((norm._plain, row) for row in ROWS),
            *((qk_rope_store._family, head) for head in HEADS),
            *((activation._family, gate) for gate in GATES),
            (decode_inputs._family, ()),
        ]
    )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


@contextlib.contextmanager
def poisoned():
    """Memory that `torch.empty` gives is full of NaN or of the largest integer."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def randn(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def assert_rounded(out, exact, steps=1.0):
    """`out` is the float64 result to within some steps of its type's precision."""
    assert torch.isfinite(out).all()
    eps = torch.finfo(out.dtype).eps
    error = (out.double() - exact).abs()
    assert (error <= steps * eps * exact.abs() + 1e-6).all(), float(error.max())


# ---- embedding ----------------------------------------------------------------------------------


TABLES = [
    (1024, torch.bfloat16), (2560, torch.float16), (5120, torch.bfloat16), (36, torch.bfloat16),
    (30, torch.float16), (7, torch.bfloat16), (33, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("hidden", "dtype"), TABLES)
def test_embedding_takes_rows_of_its_range_and_zeros_for_other_ids(tokens, hidden, dtype, index):
    weight = randn(500, hidden, dtype=dtype)
    ids = torch.randint(0, 1500, (tokens,), device=DEVICE, dtype=index)
    for start, count in ((0, 500), (700, 500), (1200, 250)):
        with poisoned():
            out = embedding.embedding(ids, weight, start, count)
        expected = embedding.embedding_reference(ids, weight, start, count)
        assert out.dtype == dtype
        assert torch.equal(out, expected)


def test_embedding_of_rows_that_do_not_start_at_16_bytes():
    weight = randn(101 * 64 + 1)[1:].view(101, 64)
    ids = torch.arange(101, device=DEVICE, dtype=torch.int32)
    assert torch.equal(embedding.embedding(ids, weight, 0, 101), weight)


# ---- KV store -----------------------------------------------------------------------------------


KV_ROWS = [
    (8, 128, torch.bfloat16), (1, 64, torch.float16), (3, 64, torch.bfloat16),
    (2, 80, torch.bfloat16), (5, 36, torch.float16), (1, 7, torch.bfloat16),
    (4, 256, torch.bfloat16), (2, 64, torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "dim", "dtype"), KV_ROWS)
def test_store_kv_writes_strided_rows_to_their_slots_and_nothing_else(
    tokens, heads, dim, dtype, index
):
    qkv = randn(tokens, (2 + 2) * heads * dim, dtype=dtype).view(tokens, 4 * heads, dim)
    k, v = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    slots = randn(2, 300, heads, dim, dtype=dtype)
    expected = slots.clone()
    out_loc = torch.randperm(300, device=DEVICE)[:tokens].to(index)
    kv_store.store_kv(k, v, slots[0], slots[1], out_loc)
    kv_store.store_kv_reference(k, v, expected[0], expected[1], out_loc)
    assert torch.equal(slots, expected)


def test_store_kv_leaves_out_negative_slots():
    k, v = randn(2, 3, 2, 64)
    slots = torch.zeros(2, 4, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    kv_store.store_kv(k, v, slots[0], slots[1], torch.tensor([1, -1, 3], device=DEVICE))
    assert torch.equal(slots[0, [1, 3]], k[[0, 2]])
    assert torch.equal(slots[1, [1, 3]], v[[0, 2]])
    assert not slots[:, [0, 2]].any()


# ---- norms --------------------------------------------------------------------------------------


def exact_norm(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


HIDDEN = [64, 128, 576, 1024, 2560, 4096, 5120, 7168, 8192, 16384, 100, 36, 33]
ROWS = [(hidden, torch.bfloat16) for hidden in HIDDEN] + [
    (hidden, dtype) for hidden in (33, 1024, 8192) for dtype in (torch.float16, torch.float32)
]


@pytest.mark.parametrize(("hidden", "dtype"), ROWS)
def test_rms_norm_is_the_exact_one_rounded_once(hidden, dtype):
    weight = randn(hidden, dtype=dtype) + 1
    for tokens in TOKENS:
        x = randn(tokens, hidden, dtype=dtype, scale=3)
        with poisoned():
            out = norm.rms_norm(x, weight, 1e-6)
        assert_rounded(out, exact_norm(x, weight, 1e-6), 1 if dtype != torch.float32 else 16)


@pytest.mark.parametrize(("hidden", "dtype"), ROWS)
def test_add_rms_norm_updates_the_residual_in_place_and_normalises_it(hidden, dtype):
    weight = randn(hidden, dtype=dtype) + 1
    for tokens in TOKENS:
        x, residual = randn(2, tokens, hidden, dtype=dtype, scale=3)
        added = residual + x
        with poisoned():
            out = norm.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(residual, added)
        assert_rounded(out, exact_norm(added, weight, 1e-5), 1 if dtype != torch.float32 else 16)


def test_a_row_that_is_too_long_for_the_norm_has_no_kernel():
    x = randn(1, 65536)
    for _ in range(2):
        with pytest.raises(KernelUnavailable, match="65536"):
            norm.rms_norm(x, x[0], 1e-6)


def test_a_misaligned_norm_is_refused():
    x = randn(65)[1:].view(1, 64)
    with pytest.raises(RuntimeError, match="16 bytes"):
        norm.rms_norm(x, randn(64), 1e-6)


# ---- QK norm, rope and KV store -----------------------------------------------------------------


def cos_sin_table(positions, dim, scale=1.0):
    frequencies = 1e4 ** (-torch.arange(0, dim, 2, device=DEVICE) / dim)
    phases = torch.arange(positions, device=DEVICE).unsqueeze(1) * frequencies
    return torch.cat((phases.cos(), phases.sin()), dim=1) * scale


HEADS = [
    (dim, torch.bfloat16, normalised)
    for dim in (64, 80, 96, 128, 160, 256)
    for normalised in (True, False)
] + [(128, torch.float16, True), (64, torch.float16, False)]


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("dim", "dtype", "normalised"), HEADS)
def test_qk_rope_store_agrees_with_the_reference_in_float32(dim, normalised, dtype, index):
    for tokens, hq, hkv in (
        (0, 2, 1),
        (1, 16, 8),
        (5, 3, 1),
        (33, 9, 3),
        (129, 5, 1),
        (1100, 3, 2),
    ):
        qkv = randn(tokens, (hq + 2 * hkv) * dim, dtype=dtype)
        q_weight, k_weight = (randn(2, dim, dtype=dtype) + 1) if normalised else (None, None)
        table = cos_sin_table(5000, dim, 1.2)
        positions = torch.randint(0, 5000, (tokens,), device=DEVICE, dtype=index)
        out_loc = torch.randperm(1200, device=DEVICE)[:tokens].to(index)
        slots = randn(2, 1200, hkv, dim, dtype=dtype)
        expected = slots.clone()
        arguments = (qkv, q_weight, k_weight, 1e-6, table, positions, out_loc)
        before = qkv.clone()
        with poisoned():
            q = qk_rope_store.qk_rope_store(*arguments, slots[0], slots[1], hq, hkv)
        q_ref = qk_rope_store.qk_rope_store_reference(*arguments, expected[0], expected[1], hq, hkv)
        assert torch.equal(qkv, before)
        assert torch.equal(slots[1], expected[1])
        # rounding to the type may fall the other way by the order of a sum
        close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
        torch.testing.assert_close(q, q_ref, **close)
        torch.testing.assert_close(slots[0], expected[0], **close)


def test_qk_rope_store_has_no_kernel_for_odd_heads_and_float32():
    table = cos_sin_table(8, 72)
    index = torch.zeros(1, device=DEVICE, dtype=torch.int32)
    for dim, dtype in ((72, torch.bfloat16), (64, torch.float32)):
        qkv = randn(1, 3 * dim, dtype=dtype)
        slots = randn(2, 4, 1, dim, dtype=dtype)
        with pytest.raises(KernelUnavailable, match=str(dim)):
            qk_rope_store.qk_rope_store(
                qkv, None, None, 1e-6, table[:, :dim], index, index, slots[0], slots[1], 1, 1
            )


# ---- gate ---------------------------------------------------------------------------------------


GATES = [(width, torch.bfloat16) for width in (3072, 1536, 17408, 100, 34, 33, 3)] + [
    (width, dtype) for width in (3072, 33) for dtype in (torch.float16, torch.float32)
]


@pytest.mark.parametrize(("width", "dtype"), GATES)
def test_silu_and_mul_agrees_with_float64(width, dtype):
    for tokens in TOKENS:
        x = randn(tokens, 2 * width, dtype=dtype, scale=4)
        with poisoned():
            out = activation.silu_and_mul(x)
        gate, up = x.double().chunk(2, dim=-1)
        assert_rounded(out, gate * torch.sigmoid(gate) * up, 1 if dtype != torch.float32 else 32)


def test_silu_and_mul_of_extreme_gates_is_zero_or_the_product():
    x = torch.tensor([[-100.0, 100.0, -0.0, 2.0, 2.0, 2.0]], device=DEVICE, dtype=torch.bfloat16)
    assert activation.silu_and_mul(x).tolist() == [[0.0, 200.0, 0.0]]


# ---- inputs of a decode step --------------------------------------------------------------------


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 256, 512])
def test_decode_inputs_gathers_the_last_token_and_its_slot(count, index):
    page_table, token_pool = torch.randint(
        0, 1 << 30, (2, 600, 333), device=DEVICE, dtype=torch.int32
    )
    rows = torch.randperm(600, device=DEVICE)[:count].to(index)
    lens = torch.randint(1, 334, (count,), device=DEVICE, dtype=torch.int32)
    for pool in (token_pool, token_pool.view(-1)):
        found = torch.full((3, count), -1, device=DEVICE, dtype=index)
        expected = torch.full_like(found, -2)
        decode_inputs.decode_inputs(rows, lens, page_table, pool, *found)
        decode_inputs.decode_inputs_reference(rows, lens, page_table, pool, *expected)
        assert torch.equal(found, expected)


# ---- graphs and overlapping launches ------------------------------------------------------------


def test_a_chain_of_kernels_in_a_graph_gives_what_eager_references_give():
    # Each kernel may start while the one before it ends: a missing wait would show here.
    hidden, tokens, dim = 1024, 64, 128
    weight, q_weight = randn(hidden) + 1, randn(dim) + 1
    table = cos_sin_table(512, dim)
    index = torch.randperm(512, device=DEVICE)[:tokens].int()
    ids = torch.randint(0, 512, (tokens,), device=DEVICE, dtype=torch.int32)
    vocab = randn(512, hidden)
    slots = torch.zeros(2, 512, 2, dim, device=DEVICE, dtype=torch.bfloat16)

    def chain(m, slots):
        x = m["embedding"](ids, vocab, 0, 512)
        residual = x.clone()
        for _ in range(8):
            x = m["add_rms_norm"](x, residual, weight, 1e-6)
            q = m["qk_rope_store"](
                x, q_weight, q_weight, 1e-6, table, index, index, slots[0], slots[1], 4, 2
            )
            x = m["silu_and_mul"](torch.cat((q.view(tokens, 512), x, q.view(tokens, 512)), dim=1))
            x = m["rms_norm"](x, weight, 1e-6)
        return x, residual

    modules = (embedding, norm, qk_rope_store, activation)
    names = ("embedding", "rms_norm", "add_rms_norm", "qk_rope_store", "silu_and_mul")
    own = {n: next(getattr(m, n) for m in modules if hasattr(m, n)) for n in names}
    plain = {n: next(getattr(m, f"{n}_reference") for m in modules if hasattr(m, n)) for n in names}
    chain(own, slots)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, residual = chain(own, slots)
    results = []
    for _ in range(10):
        slots.zero_()
        out.fill_(torch.nan)
        graph.replay()
        results.append((out.clone(), residual.clone(), slots.clone()))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))
    plain_slots = torch.zeros_like(slots)
    expected, expected_residual = chain(plain, plain_slots)
    # Roundings add up over the rounds, but a value from the wrong round is far away.
    assert (results[0][0].float() - expected.float()).norm() < 0.05 * expected.float().norm()
    difference = (results[0][1].float() - expected_residual.float()).norm()
    assert difference < 0.05 * expected_residual.float().norm()
    assert (results[0][2].float() - plain_slots.float()).norm() < 0.05 * plain_slots.float().norm()
