"""The sampling kernel draws the tokens of `draw_reference`, all of them."""

import pytest
import torch

from minisgl.engine.draw import DrawBatch, draw_reference
from minisgl.engine.filters import bounds
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.filter_bounds import filter_bounds
from minisgl_kernels.sample import sample

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs compute capability 9 or higher", allow_module_level=True)

DEVICE = torch.device("cuda")
AT_ONCE = 32
"""Rows of a call of the reference, which takes much memory."""


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(11)


class Rows:
    """Random parameters of n rows; some are greedy."""

    def __init__(self, n, *, temperature=None, greedy=0.2):
        self.temperature = torch.empty(n, device=DEVICE).uniform_(0.05, 2.0)
        if temperature is not None:
            self.temperature.fill_(temperature)
        full = torch.iinfo(torch.int64)
        self.seeds = torch.randint(full.min, full.max, (n,), device=DEVICE)
        self.positions = torch.randint(0, 1 << 20, (n,), device=DEVICE)
        self.greedy = (torch.rand(n, device=DEVICE) < greedy).to(torch.uint8)

    def columns(self):
        return self.temperature, self.seeds, self.positions, self.greedy


def expected_tokens(logits, rows, device=DEVICE, limits=(None, None, None)):
    out = []
    for start in range(0, len(logits), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        x = logits[part].to(device).float()
        temperature, seeds, positions, greedy = (c[part].to(device) for c in rows.columns())
        top_k, top_p, min_p = (None if c is None else c[part].to(device) for c in limits)
        batch = DrawBatch(None, temperature, seeds, positions, top_k, top_p, min_p)
        largest = x.argmax(dim=1)
        out.append(torch.where(greedy.bool(), largest, draw_reference(x, largest, batch)))
    return torch.cat(out).to(DEVICE, torch.int32)


def assert_same(logits, rows):
    tokens = torch.full((len(logits),), -7, device=DEVICE, dtype=torch.int32)
    assert sample(logits, *rows.columns(), out=tokens) is tokens
    expected = expected_tokens(logits, rows)
    wrong = torch.nonzero(tokens != expected).flatten().tolist()
    assert not wrong, [(i, int(tokens[i]), int(expected[i])) for i in wrong[:10]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "vocab_size", [1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 4097, 32003, 49152, 151936, 256000]
)
def test_it_draws_the_tokens_of_the_reference_for_any_vocabulary(vocab_size, dtype):
    for batch, scale in ((1, 3.0), (5, 0.1), (37, 10.0)):
        logits = (torch.randn(batch, vocab_size, device=DEVICE) * scale).to(dtype)
        assert_same(logits, Rows(batch))


@pytest.mark.parametrize("batch", [1, 2, 16, 100, 256, 512])
def test_it_draws_the_tokens_of_the_reference_for_any_batch(batch):
    logits = torch.randn(batch, 151936, device=DEVICE, dtype=torch.bfloat16) * 2
    assert_same(logits, Rows(batch, greedy=0.0))


def test_an_empty_batch_has_no_tokens():
    assert sample(torch.empty(0, 100, device=DEVICE), *Rows(0).columns()).shape == (0,)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.6, 1.0, 100.0])
def test_temperatures_from_the_least_to_far_too_much(temperature):
    for scale in (1e-4, 1.0, 30.0, 1e30):
        logits = torch.randn(40, 20000, device=DEVICE) * scale
        assert_same(logits, Rows(40, temperature=temperature))


def test_ties_of_logits_are_broken_by_noise_and_those_of_greedy_rows_by_the_lowest_id():
    for levels in (1, 2, 5):
        logits = torch.randint(0, levels, (64, 30011), device=DEVICE).float()
        for temperature in (1e-6, 1.0):
            assert_same(logits, Rows(64, temperature=temperature, greedy=0.5))


def test_zeros_of_both_signs_are_equal():
    logits = torch.full((4, 5000), -1.0, device=DEVICE)
    logits[:, 4000], logits[:, 100] = 0.0, -0.0
    rows = Rows(4, greedy=1.0)
    assert sample(logits, *rows.columns()).tolist() == [100] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_with_infinities_and_nan_take_the_token_of_the_reference(dtype):
    logits = torch.randn(60, 12345, device=DEVICE).to(dtype)
    columns = torch.randint(0, 12345, (60, 3), device=DEVICE)
    for row, value in enumerate([torch.nan, -torch.nan, torch.inf, -torch.inf] * 10):
        logits[row, columns[row]] = value
    logits[40:44] = -torch.inf
    logits[44:48] = torch.inf
    logits[48:52] = torch.nan
    logits[52:56, 7:] = -torch.inf
    logits[56:, columns[56:, 0]] = torch.nan
    logits[56:, columns[56:, 1]] = torch.inf
    assert_same(logits, Rows(60))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_may_be_apart_and_may_start_anywhere(dtype):
    whole = torch.randn(20 * 1201 + 8, device=DEVICE).to(dtype)
    for offset, width in ((0, 1201), (1, 1201), (3, 1200), (8, 1200)):
        logits = whole[offset : offset + 20 * width].view(20, width)[:, :1000]
        assert_same(logits, Rows(20))


def test_it_draws_what_the_engine_draws_on_a_cpu():
    logits = torch.randn(16, 50000, device=DEVICE, dtype=torch.bfloat16) * 4
    rows = Rows(16)
    expected = expected_tokens(logits, rows, torch.device("cpu"))
    assert torch.equal(sample(logits, *rows.columns()), expected)


def test_a_token_does_not_depend_on_the_other_rows_of_its_batch():
    logits = torch.randn(300, 32000, device=DEVICE, dtype=torch.bfloat16)
    rows = Rows(300)
    together = sample(logits, *rows.columns())
    for i in (0, 17, 299):
        columns = [c[i : i + 1] for c in rows.columns()]
        assert sample(logits[i : i + 1], *columns).item() == together[i].item()


def test_positions_and_flags_may_be_of_other_types():
    logits = torch.randn(9, 5000, device=DEVICE)
    rows = Rows(9, greedy=0.5)
    expected = sample(logits, *rows.columns())
    found = sample(logits, rows.temperature, rows.seeds, rows.positions.int(), rows.greedy.bool())
    assert torch.equal(found, expected)


def test_filters_come_as_bounds():
    n, vocab_size = 48, 40000
    for levels in (None, 50):  # with many ties, the last id that passes matters
        logits = torch.randn(n, vocab_size, device=DEVICE) * 3
        if levels:
            logits = (logits * 5).round() / 5
        rows = Rows(n)
        top_k = torch.randint(2, 60, (n,), device=DEVICE)
        top_k[::3] = 1 << 31
        top_p = torch.empty(n, device=DEVICE, dtype=torch.float64).uniform_(0.1, 0.99)
        top_p[::4] = 1.0
        min_p = torch.empty(n, device=DEVICE, dtype=torch.float64).uniform_(0, 0.2)
        min_p[::5] = 0.0
        y = (logits - logits.amax(dim=1, keepdim=True)) / rows.temperature[:, None]
        least, last = bounds(y, top_k, top_p, min_p)
        found = sample(logits, *rows.columns(), least, last)
        assert torch.equal(found, expected_tokens(logits, rows, limits=(top_k, top_p, min_p)))


def passing(y, least, last):
    ids = torch.arange(y.shape[1], device=DEVICE)
    return (y > least[:, None]) | ((y == least[:, None]) & (ids <= last[:, None]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 9, 1000, 4097, 151936, 256000])
@pytest.mark.parametrize("levels", [None, 40, 1])
def test_the_bounds_of_filters_pass_the_tokens_that_filters_pass(vocab_size, levels, dtype):
    n = 24
    logits = torch.randn(n, vocab_size, device=DEVICE) * 3
    if levels is not None:  # many ties
        logits = torch.randint(0, levels, (n, vocab_size), device=DEVICE) * 0.25
    logits = logits.to(dtype)
    logits[0, : vocab_size // 2] = -torch.inf
    temperature = torch.empty(n, device=DEVICE).uniform_(0.1, 2)
    top_k = torch.randint(2, 400, (n,), device=DEVICE)
    top_k[::3] = 1 << 31
    top_p = torch.empty(n, device=DEVICE, dtype=torch.float64).uniform_(0.05, 0.999)
    top_p[1::3] = 1.0
    min_p = torch.empty(n, device=DEVICE, dtype=torch.float64).uniform_(0, 0.1)
    min_p[::2] = 0.0
    x = logits.float()
    y = (x - x.amax(dim=1, keepdim=True)) / temperature[:, None]
    for limits in (
        (top_k, None, None), (None, top_p, None), (None, None, min_p), (top_k, top_p, min_p),
        (None, None, None),
    ):  # fmt: skip
        found = filter_bounds(logits, temperature, *limits)
        expected = bounds(y, *limits)
        differ = (passing(y, *found) != passing(y, *expected)).sum(dim=1)
        if limits[1] is None:
            assert not differ.any(), differ
        else:  # a sum so close to its limit that its rounding decides ends one token off
            assert int(differ.max()) <= 1, differ
            assert int(differ.sum()) <= 1, differ


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_tokens_go_to_their_places_in_the_token_pool_and_nowhere_else(index):
    logits = torch.randn(33, 7000, device=DEVICE)
    rows = Rows(33)
    pool = torch.full((500,), -1, device=DEVICE, dtype=torch.int32)
    places = torch.randperm(500, device=DEVICE)[:33].to(index)
    tokens = sample(logits, *rows.columns(), token_pool=pool, output_index=places)
    assert torch.equal(pool[places.long()], tokens)
    assert int((pool != -1).sum()) == 33


def test_a_graph_draws_anew_at_each_replay():
    logits = torch.randn(8, 151936, device=DEVICE, dtype=torch.bfloat16)
    rows = Rows(8, greedy=0.0)
    sample(logits, *rows.columns())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, *rows.columns())
    for _ in range(3):
        logits.normal_()
        rows.positions += 1
        graph.replay()
        assert torch.equal(tokens, expected_tokens(logits, rows))


def test_a_vocabulary_beyond_shared_memory_has_a_kernel_for_draws_and_none_for_filters():
    logits = torch.randn(3, 1 << 20, device=DEVICE)
    assert_same(logits, Rows(3, greedy=0.0))
    with pytest.raises(KernelUnavailable, match="1048576"):
        filter_bounds(logits, torch.ones(3, device=DEVICE), None, None, None)
