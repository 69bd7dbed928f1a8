"""The CUDA kernels' own sources, run on a CPU by the emulator: their logic, where no GPU is.

tests/gpu has more shapes, and what an emulator cannot show: speed, races and graphs.
"""

import pytest
import torch

from minisgl.engine.draw import DrawBatch, draw_reference
from minisgl.engine.filters import bounds
from minisgl_kernels import (
    activation,
    cuda_build,
    decode_inputs,
    embedding,
    filter_bounds,
    kv_store,
    norm,
    qk_rope_store,
    sample,
    skinny_linear,
    wide_linear,
)
from tests.unit.emulator import emulated_module
from tests.unit.sanitizer import needs_compiler

pytestmark = needs_compiler

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(cuda_build, "cuda_module", emulated_module)
    # fewer fibers: the same logic
    monkeypatch.setattr(sample, "THREADS", 64)
    monkeypatch.setattr(filter_bounds, "THREADS", 64)
    modules = (
        embedding,
        kv_store,
        qk_rope_store,
        activation,
        decode_inputs,
        sample,
        skinny_linear,
        filter_bounds,
        wide_linear,
    )
    for module in modules:
        monkeypatch.setattr(module._family, "_made", {})
    for family in (norm._plain, norm._adding):
        monkeypatch.setattr(family, "_made", {})
    torch.manual_seed(3)


@pytest.mark.parametrize("hidden", [1024, 30, 7])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_embedding(tokens, hidden):
    weight = torch.randn(50, hidden).to(BF16)
    ids = torch.randint(0, 150, (tokens,), dtype=torch.int32)
    for start in (0, 70):
        found = embedding.embedding(ids, weight, start, 50)
        assert torch.equal(found, embedding.embedding_reference(ids, weight, start, 50))


@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (1, 7)])
def test_store_kv(heads, dim):
    qkv = torch.randn(5, 4 * heads, dim).to(BF16)
    k, v = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    slots = torch.randn(2, 9, heads, dim).to(BF16)
    expected = slots.clone()
    out_loc = torch.randperm(9)[:5].int()
    kv_store.store_kv(k, v, slots[0], slots[1], out_loc)
    kv_store.store_kv_reference(k, v, expected[0], expected[1], out_loc)
    assert torch.equal(slots, expected)


@pytest.mark.parametrize(
    ("hidden", "dtype"), [(1024, BF16), (576, torch.float16), (33, BF16), (9000, torch.float32)]
)
def test_norms(hidden, dtype):
    weight = (torch.randn(hidden) + 1).to(dtype)
    x, residual = torch.randn(2, 3, hidden).to(dtype)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    plain = norm.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(plain, norm.rms_norm_reference(x, weight, 1e-6), **close)
    expected_residual = residual.clone()
    expected = norm.add_rms_norm_reference(x, expected_residual, weight, 1e-6)
    torch.testing.assert_close(norm.add_rms_norm(x, residual, weight, 1e-6), expected, **close)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize(
    ("dim", "normalised", "tokens"),
    [(64, False, 5), (80, True, 5), (128, True, 5), (256, True, 5), (64, True, 1030)],
)
def test_qk_rope_store(dim, normalised, tokens):
    hq, hkv = 3, 2
    qkv = torch.randn(tokens, (hq + 2 * hkv) * dim).to(BF16)
    weights = (torch.randn(2, dim) + 1).to(BF16) if normalised else (None, None)
    table = torch.randn(40, dim)
    positions = torch.randint(0, 40, (tokens,), dtype=torch.int32)
    out_loc = torch.randperm(tokens + 4)[:tokens].int()
    slots = torch.randn(2, tokens + 4, hkv, dim).to(BF16)
    expected = slots.clone()
    before = (qkv, *weights, 1e-6, table, positions, out_loc)
    q = qk_rope_store.qk_rope_store(*before, slots[0], slots[1], hq, hkv)
    q_ref = qk_rope_store.qk_rope_store_reference(*before, expected[0], expected[1], hq, hkv)
    close = {"rtol": torch.finfo(BF16).eps, "atol": 1e-5}
    torch.testing.assert_close(q, q_ref, **close)
    torch.testing.assert_close(slots, expected, **close)


@pytest.mark.parametrize("width", [1536, 34, 33])
def test_silu_and_mul(width):
    x = (torch.randn(3, 2 * width) * 3).to(BF16)
    close = {"rtol": torch.finfo(BF16).eps, "atol": 1e-6}
    found = activation.silu_and_mul(x)
    torch.testing.assert_close(found, activation.silu_and_mul_reference(x), **close)


def test_decode_inputs():
    page_table, token_pool = torch.randint(0, 1 << 30, (2, 200, 33), dtype=torch.int32)
    rows = torch.randperm(200)[:150].int()
    lens = torch.randint(1, 34, (150,), dtype=torch.int32)
    found, expected = torch.full((2, 3, 150), -1, dtype=torch.int32)
    decode_inputs.decode_inputs(rows, lens, page_table, token_pool, *found)
    decode_inputs.decode_inputs_reference(rows, lens, page_table, token_pool, *expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    ["plain", "bias", "norm", "norm, silu", "residual"],
)
@pytest.mark.parametrize(("tokens", "rows", "k"), [(1, 40, 32), (9, 18, 96), (33, 40, 320)])
def test_skinny_linear(tokens, rows, k, options):
    x, weight = torch.randn(tokens, k).to(BF16), (torch.randn(rows, k) * k**-0.5).to(BF16)
    given = {}
    if "norm" in options:
        given |= {"norm": torch.randn(k).to(BF16), "eps": 1e-3}
    if options == "bias":
        given["bias"] = torch.randn(rows).to(BF16)
    if "silu" in options:
        given["silu"] = True
    residual = torch.randn(tokens, rows).to(BF16) if options == "residual" else None
    theirs = given if residual is None else {"residual": residual.float()}
    mine = given if residual is None else {"residual": residual}
    exact = skinny_linear.skinny_linear_reference(x.float(), weight.float(), **theirs)
    out = skinny_linear.skinny_linear(x, weight, **mine)
    assert (out.float() - exact).norm() < 6e-3 * exact.norm()


# ---- sampling -----------------------------------------------------------------------------------


def columns(n, temperature=0.8):
    full = torch.iinfo(torch.int64)
    return (
        torch.full((n,), temperature),
        torch.randint(full.min, full.max, (n,)),
        torch.randint(0, 1 << 20, (n,)),
        (torch.arange(n) % 3 == 2).to(torch.uint8),
    )


def expected_tokens(logits, temperature, seeds, positions, greedy, *limits):
    x = logits.float()
    limits = limits or (None, None, None)
    drawn = draw_reference(x, x.argmax(1), DrawBatch(None, temperature, seeds, positions, *limits))
    return torch.where(greedy.bool(), x.argmax(1), drawn).int()


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 8, 65, 4099])
def test_sample_draws_the_tokens_of_the_reference(vocab_size, dtype):
    logits = (torch.randn(4, vocab_size) * 2).to(dtype)
    given = columns(4)
    assert torch.equal(sample.sample(logits, *given), expected_tokens(logits, *given))


def test_sample_draws_the_tokens_of_the_reference_for_a_large_batch():
    # so many tokens that a thread has several groups of them
    logits = torch.randn(18, 20000) * torch.tensor([0.01, 1.0, 20.0]).repeat(6)[:, None]
    logits[1::2].scatter_(1, torch.randint(0, 20000, (9, 3)), 25.0)
    given = columns(18)
    assert torch.equal(sample.sample(logits, *given), expected_tokens(logits, *given))


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 50.0])
def test_sample_breaks_ties_as_the_reference(temperature):
    logits = torch.randint(0, 2, (4, 3000)).float()
    given = columns(4, temperature)
    assert torch.equal(sample.sample(logits, *given), expected_tokens(logits, *given))


@pytest.mark.parametrize(
    ("largest", "spread", "temperature"),
    [(7e4, 0.05, 0.02), (-1e3, 1.0, 0.01), (0.0, 1e30, 1e-6), (-1e38, 0.0, 1e-3), (3e38, 1, 1.0)],
)
def test_sample_draws_the_tokens_of_the_reference_far_from_zero(largest, spread, temperature):
    logits = largest - torch.randn(20, 9000).abs() * spread
    given = columns(20, temperature)
    assert torch.equal(sample.sample(logits, *given), expected_tokens(logits, *given))


def test_sample_treats_nan_and_infinities_as_the_reference():
    logits = torch.randn(7, 9000)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, -torch.nan)):
        logits[row, [777, 600 + row]] = value
    logits[4] = -torch.inf
    logits[5, 3:] = -torch.inf
    given = columns(7)
    assert torch.equal(sample.sample(logits, *given), expected_tokens(logits, *given))


def test_sample_keeps_to_bounds_and_writes_to_the_token_pool():
    logits = (torch.randn(6, 2000) * 10).round() / 5
    given = columns(6)
    limits = (
        torch.tensor([2, 5, 50, 1 << 31, 1 << 31, 9]),
        torch.tensor([1.0, 0.5, 1.0, 0.9, 1.0, 0.3]).double(),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.3, 0.0]).double(),
    )
    y = (logits - logits.amax(1, keepdim=True)) / given[0][:, None]
    pool = torch.full((20,), -1, dtype=torch.int32)
    places = torch.randperm(20)[:6]
    whole = torch.empty(6 * 2003 + 1)[1:].view(6, 2003)  # rows that start anywhere
    whole[:, :2000] = logits
    tokens = sample.sample(
        whole[:, :2000], *given, *bounds(y, *limits), token_pool=pool, output_index=places
    )
    assert torch.equal(tokens, expected_tokens(logits, *given, *limits))
    assert torch.equal(pool[places], tokens)
    assert int((pool != -1).sum()) == 6


LIMITS = {
    "top_k": ([2, 5, 300, 1 << 31, 999, 1000], None, None),
    "top_p": (None, [0.1, 0.5, 0.9, 0.999, 1e-6, 1.0], None),
    "min_p": (None, None, [0.0, 0.01, 0.5, 0.9, 1e-9, 0.2]),
    "all": (
        [2, 50, 50, 1 << 31, 1 << 31, 7],
        [0.9, 0.3, 1.0, 0.9, 1.0, 1.0],
        [0, 0, 0.3, 0.1, 0, 0],
    ),
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("levels", [None, 5, 1])
def test_filter_bounds_pass_the_tokens_of_the_filters(levels, limits):
    logits = torch.randn(6, 1000) * 4
    if levels is not None:  # many ties
        logits = torch.randint(0, levels, (6, 1000)).float()
    logits[3, 5:9] = -torch.inf
    temperature = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.01, 1.0])
    top_k, top_p, min_p = limits
    given = (
        None if top_k is None else torch.tensor(top_k),
        None if top_p is None else torch.tensor(top_p).double(),
        None if min_p is None else torch.tensor(min_p).double(),
    )
    y = (logits - logits.amax(1, keepdim=True)) / temperature[:, None]
    ids = torch.arange(1000)

    def passing(least, last):
        return (y > least[:, None]) | ((y == least[:, None]) & (ids <= last[:, None]))

    found = filter_bounds.filter_bounds(logits, temperature, *given)
    assert torch.equal(passing(*found), passing(*bounds(y, *given)))


@pytest.mark.parametrize(
    ("tokens", "rows", "k", "cut", "option"),
    [
        (5, 64, 64, wide_linear.Blocks(1), "plain"),
        (19, 72, 192, wide_linear.Blocks(1, split=2), "bias"),
        (37, 144, 448, wide_linear.Blocks(2, split=3, tiles=2), "residual"),
        (20, 176, 448, wide_linear.Blocks(1, split=2, shared=28_000), "following"),
        (21, 176, 192, wide_linear.Blocks(3, shared=80_000), "silu"),
        (10, 80, 448, wide_linear.Blocks(1, split=2, ways=2, shared=28_000), "residual"),
        (33, 80, 320, wide_linear.Blocks(1, tiles=2, shared=28_000), "normed"),
        (10, 192, 576, wide_linear.Blocks(2, split=8, tiles=2), "following"),  # 9 parts of 64 k
    ],
)
def test_wide_linear(tokens, rows, k, cut, option):
    x, weight = torch.randn(tokens, k).to(BF16), (torch.randn(rows, k) * k**-0.5).to(BF16)
    bias, residual = torch.randn(rows).to(BF16), torch.randn(tokens, rows).to(BF16)
    norm, exact, close = torch.randn(k).to(BF16), wide_linear.wide_linear_reference, 6e-3
    if option == "following":
        weight_of_norm, kept = torch.randn(rows).to(BF16), residual.float()
        expected = wide_linear.wide_add_reference(
            kept, x.float(), weight.float(), weight_of_norm.float()
        )
        found = wide_linear.wide_add(residual, x, weight, weight_of_norm, blocks=cut)
        assert (residual - kept).norm() < close * kept.norm()
        assert (found.x - expected.x).norm() < close * expected.x.norm()
        torch.testing.assert_close(
            found.squares.sum(dim=1), expected.squares[:, 0], rtol=close, atol=0
        )
        return
    if option == "normed":
        squares = x.float().square().view(tokens, 4, -1).sum(dim=2)
        x = wide_linear.Normed(x * norm, squares)
    mine, theirs = {"eps": 1e-3}, {"eps": 1e-3}
    if option == "bias":
        mine, theirs = {"bias": bias}, {"bias": bias.float()}
    elif option == "residual":
        mine, theirs = {"residual": residual.clone()}, {"residual": residual.float()}
    elif option == "silu":
        mine, theirs = {"silu": True, "norm": norm}, {"silu": True, "norm": norm.float()}
        x = x + 0
    wide = x if isinstance(x, wide_linear.Normed) else x.float()
    expected = exact(wide, weight.float(), **theirs)
    out = wide_linear.wide_linear(x, weight, blocks=cut, **mine)
    assert (out.float() - expected).norm() < close * expected.norm()


@pytest.mark.parametrize(
    ("dim", "normalised", "biased", "cut"),
    [
        (64, True, False, wide_linear.Blocks(1, tiles=2)),
        (128, True, True, wide_linear.Blocks(2, split=2, shared=100_000)),
        (128, False, False, wide_linear.Blocks(2, tiles=2)),
    ],
)
def test_wide_turn(dim, normalised, biased, cut):
    tokens, k, heads, kv_heads = 21, 192, 3, 2
    x, rows = torch.randn(tokens, k).to(BF16), (heads + 2 * kv_heads) * dim
    weight, bias = (torch.randn(rows, k) * k**-0.5).to(BF16), torch.randn(rows).to(BF16)
    x = wide_linear.Normed(x, x.float().square().view(tokens, 4, -1).sum(dim=2))
    weights = (torch.randn(2, dim) + 1).to(BF16) if normalised else (None, None)
    out_loc = torch.randperm(tokens + 4)[:tokens].int()
    slots, positions = (
        torch.randn(2, tokens + 4, kv_heads, dim).to(BF16),
        torch.randint(40, (tokens,)),
    )
    expected = slots.float()

    def turned(of):
        return wide_linear.Turned(
            *weights, 1e-3, torch.randn(40, dim, generator=torch.Generator().manual_seed(1)),
            positions.int(), out_loc, of[0], of[1], heads, kv_heads,
        )  # fmt: skip

    bias = bias if biased else None
    found = wide_linear.wide_turn(x, weight, turned(slots), eps=1e-3, bias=bias, blocks=cut)
    exact = wide_linear.wide_turn_reference(
        wide_linear.Normed(x.x.float(), x.squares), weight.float(), turned(expected), eps=1e-3,
        bias=None if bias is None else bias.float(),
    )  # fmt: skip
    for one, other in ((found, exact), (slots, expected)):
        assert one.shape == other.shape
        assert (one - other).norm() < 6e-3 * other.norm()
    free = sorted(set(range(tokens + 4)) - set(out_loc.tolist()))
    assert torch.equal(slots[:, free].float(), expected[:, free])
