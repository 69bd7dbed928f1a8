"""What each rule of sampling lets through, that draws follow the distribution, and that a
request's tokens depend on nothing but the request."""

import numpy as np
import pytest
import torch

from minisgl.engine.draw import draw, draw_reference
from minisgl.engine.filters import bounds
from minisgl.engine.logprobs import stable_topk
from minisgl.engine.sampler import Sampler
from minisgl.engine.sampling_table import (
    LOGPROBS,
    MIN_P,
    SAMPLED,
    TOP_K,
    TOP_P,
    SamplingTable,
)
from minisgl.messages import SamplingParams
from minisgl_kernels import build
from minisgl_kernels.sampling import gumbel_draw_function
from tests.unit.sanitizer import needs_compiler, run_sanitized

NOTHING = np.zeros(0, np.int32)


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def way(request, monkeypatch):
    """Every test here runs with the C++ kernel and without."""
    if request.param == "torch":
        monkeypatch.setenv(build.DISABLE_ENV, "1")
    gumbel_draw_function.cache_clear()
    if request.param == "kernel" and gumbel_draw_function() is None:
        pytest.skip("the kernel cannot be compiled here")
    yield request.param
    gumbel_draw_function.cache_clear()


def sampler_of(requests, vocab_size, prompt=NOTHING, output=NOTHING):
    sampler = Sampler(vocab_size, "cpu", max_rows=len(requests) + 3)
    for row, params in enumerate(requests):
        sampler.admit(row, params, np.asarray(prompt, np.int32), np.asarray(output, np.int32))
    return sampler


def sample(logits, requests, positions=None):
    """One step of a fresh sampler: the tokens as a list."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    if logits.ndim == 1:
        logits = logits.repeat(len(requests), 1)
    sampler = sampler_of(requests, logits.shape[1])
    at = np.zeros(len(requests), np.int32) if positions is None else positions
    batch = sampler.prepare(np.arange(len(requests)), at)
    return sampler.sample(logits.clone(), batch).tokens.tolist()


def draws(logits, n, **params):
    """n tokens of one request with fixed logits, at positions 0 to n - 1."""
    logits = torch.tensor(logits, dtype=torch.float32)
    sampler = sampler_of([SamplingParams(seed=2024, **params)], len(logits))
    rows = np.zeros(n, np.int64)
    batch = sampler.prepare(rows, np.arange(n))
    return sampler.sample(logits.repeat(n, 1), batch).tokens.numpy()


def random_logits(rows, vocab_size, seed=0, ties=False):
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.to(torch.bfloat16).float() if ties else logits


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_k=5),
    SamplingParams(seed=3, top_p=0.9),
    SamplingParams(seed=4, min_p=0.1, temperature=2),
    SamplingParams(seed=-5, top_k=40, top_p=0.8, min_p=0.01, temperature=1.3),
    SamplingParams(seed=6, top_p=0.999999, temperature=2),
    SamplingParams(temperature=0, frequency_penalty=1.5, logit_bias={3: 50, 4: -100}),
    SamplingParams(seed=8, repetition_penalty=1.3, logit_bias={0: 2}, logprobs=3),
    SamplingParams(seed=9, presence_penalty=-2, top_k=2, logprobs=0),
]


# Greedy


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0, "top_p": 0},
        {"temperature": 2, "top_k": 1},
        {"temperature": 2, "min_p": 1},
        {"temperature": 2, "top_p": 0},
        {"temperature": 1e-30},
        {"temperature": 0, "top_k": 7, "seed": 3},
    ],
    ids=str,
)
def test_a_request_that_leaves_one_token_takes_the_most_likely_one(params):
    logits = random_logits(1, 1003)[0]
    requests = [SamplingParams(**{"seed": seed, **params}) for seed in range(8)]
    assert sample(logits, requests) == [int(logits.argmax())] * 8


def test_of_equal_logits_a_greedy_request_takes_the_lowest_id_also_beside_others_that_draw():
    logits = torch.zeros(4099)
    logits[[700, 701, 4000]] = 5
    greedy = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=1),
        SamplingParams(min_p=1.0),
        SamplingParams(top_p=0.0),
    ]
    assert sample(logits, [*greedy, SamplingParams(seed=1)])[:4] == [700] * 4


def test_a_batch_of_greedy_requests_prepares_nothing_for_the_device():
    batch = sampler_of([SamplingParams(temperature=0)] * 3, 10).prepare(np.arange(3), np.zeros(3))
    assert (batch.draw, batch.penalties, batch.bias, batch.logprobs) == (None,) * 4


# Filters


def test_filters_that_no_request_of_the_batch_has_are_absent():
    def filters(*requests):
        sampler = sampler_of(requests, 100)
        batch = sampler.prepare(np.arange(len(requests)), np.zeros(len(requests), np.int32)).draw
        return [batch.top_k is not None, batch.top_p is not None, batch.min_p is not None]

    assert filters(SamplingParams()) == [False] * 3
    assert filters(SamplingParams(), SamplingParams(top_k=3)) == [True, False, False]
    assert filters(SamplingParams(), SamplingParams(top_p=0.3)) == [False, True, False]
    assert filters(SamplingParams(min_p=0.3), SamplingParams()) == [False, False, True]
    # Those of greedy requests do not count.
    assert filters(SamplingParams(temperature=0, top_k=3), SamplingParams()) == [False] * 3


def allowed_by_sorting(y, top_k, top_p, min_p):
    """The tokens that pass, by the plain definition."""
    y = y.astype(np.float64)
    order = np.lexsort((np.arange(len(y)), -y))
    kept = order[: top_k if 1 <= top_k < len(y) else len(y)]
    p = torch.exp(torch.from_numpy(y.astype(np.float32)[kept])).numpy().astype(np.float64)
    if top_p < 1:
        kept = kept[: int((np.cumsum(p) < top_p * p.sum()).sum()) + 1]
    if min_p > 0:
        kept = kept[y[kept] >= np.float32(np.log(min_p))]
    return set(kept.tolist())


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab_size", [5, 255, 256, 257, 1000, 3001])
def test_filters_keep_what_a_sort_of_the_vocabulary_would_keep(vocab_size, ties):
    rng = np.random.default_rng(vocab_size)
    y = random_logits(24, vocab_size, seed=vocab_size, ties=ties).numpy()
    y[:8] *= 0.05
    y -= y.max(axis=1, keepdims=True)
    top_k = rng.choice([1, 2, 3, 50, 255, 256, 2000, 2**31 - 1], 24)
    top_p = rng.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.9999, 1.0], 24)
    min_p = rng.choice([0.0, 1e-9, 0.05, 0.5, 0.999], 24)
    for k, p, m in [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)]:
        least, last = bounds(
            torch.from_numpy(y),
            torch.from_numpy(top_k) if k else None,
            torch.from_numpy(top_p) if p else None,
            torch.from_numpy(min_p) if m else None,
        )
        for i in range(24):
            ids = np.arange(vocab_size)
            passes = (y[i] > least[i].item()) | ((y[i] == least[i].item()) & (ids <= int(last[i])))
            expected = allowed_by_sorting(
                y[i], top_k[i] if k else 0, top_p[i] if p else 1.0, min_p[i] if m else 0.0
            )
            assert set(ids[passes].tolist()) == expected, (i, top_k[i], top_p[i], min_p[i])


def test_of_equal_tokens_at_the_border_those_with_the_lowest_ids_pass():
    assert set(draws([0.0] * 403, 2000, top_k=7)) == set(range(7))
    assert set(draws([0.0] * 403, 2000, top_p=9.5 / 403)) == set(range(10))


def test_a_top_k_over_the_vocabulary_limits_nothing():
    logits = random_logits(1, 11)[0]
    same = [SamplingParams(seed=5, top_k=k) for k in (-1, 0, 11, 12, 2**31 - 1)]
    for position in range(20):
        assert len(set(sample(logits, same, np.full(5, position)))) == 1


def test_top_p_counts_probabilities_among_what_top_k_left():
    # Of 0.4, 0.3, 0.2, 0.1 top_k leaves 4/7 and 3/7: the first alone reaches 0.55.
    logits = np.log([0.1, 0.3, 0.4, 0.2])
    assert set(draws(logits, 500, top_k=2, top_p=0.55)) == {2}
    assert set(draws(logits, 500, top_p=0.55)) == {1, 2}


def test_temperature_comes_before_top_p_and_min_p():
    logits = np.log([0.7, 0.2, 0.1])
    assert set(draws(logits, 500, top_p=0.6)) == {0}
    assert set(draws(logits, 500, top_p=0.6, temperature=2)) == {0, 1}
    assert set(draws(logits, 500, min_p=0.5)) == {0}
    assert set(draws(logits, 500, min_p=0.5, temperature=2)) == {0, 1}


# Distribution


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.5}, {"temperature": 2}, {"top_k": 6}, {"top_p": 0.8}, {"min_p": 0.2},
     {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5}],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_filtered_distribution(params):
    n = 40_000
    logits = random_logits(1, 21, seed=3)[0].numpy() / 2
    y = ((logits - logits.max()) / np.float32(params.get("temperature", 1))).astype(np.float32)
    kept = sorted(
        allowed_by_sorting(
            y, params.get("top_k", 0), params.get("top_p", 1), params.get("min_p", 0)
        )
    )
    p = np.exp(y[kept].astype(np.float64))
    counts = np.bincount(draws(logits.tolist(), n, **params), minlength=len(logits))
    assert counts[kept].sum() == n
    expected = n * p / p.sum()
    seen = expected >= 5
    chi_square = ((counts[kept] - expected)[seen] ** 2 / expected[seen]).sum()
    degrees = max(int(seen.sum()) - 1, 1)
    assert chi_square < degrees + 3.5 * np.sqrt(2 * degrees) + 4


def test_draws_of_a_flat_vocabulary_reach_every_part_of_it_alike():
    counts = np.bincount(draws([0.0] * 1024, 4096) // 64, minlength=16)
    assert ((counts - 256) ** 2 / 256).sum() < 37.7  # chi-square, 15 degrees, one in a thousand


# Independence


@pytest.mark.parametrize("vocab_size", [1003, 1004, 4097])
@pytest.mark.parametrize("ties", [False, True])
def test_each_request_alone_gives_the_tokens_and_logprobs_that_it_gives_in_the_batch(
    vocab_size, ties
):
    n = len(MIXED)
    prompt, output = np.arange(50), np.arange(40, 60)
    logits = random_logits(n, vocab_size, seed=1, ties=ties)
    positions = np.arange(n) * 7
    together = sampler_of(MIXED, vocab_size, prompt, output)
    result = together.sample(logits.clone(), together.prepare(np.arange(n), positions))
    logprobs = result.logprobs.to_host()
    for i in range(n):
        alone = sampler_of(MIXED, vocab_size, prompt, output)
        batch = alone.prepare(np.array([i]), positions[i : i + 1])
        single = alone.sample(logits[i : i + 1].clone(), batch)
        assert single.tokens.tolist() == [int(result.tokens[i])]
        if i in logprobs:
            assert single.logprobs.to_host()[0] == logprobs[i]
    assert set(logprobs) == {8, 9}


def test_the_order_of_a_batch_and_its_rows_change_nothing():
    logits = random_logits(6, 2001)
    order = np.array([4, 2, 0, 5, 1, 3])
    tokens = sample(logits, MIXED[:6])
    sampler = sampler_of(MIXED[:6], 2001)
    moved = sampler.sample(logits[order], sampler.prepare(order, np.zeros(6, np.int32)))
    assert moved.tokens.tolist() == [tokens[i] for i in order]


def test_kernel_and_reference_draw_the_same_tokens(way):
    if way == "torch":
        pytest.skip("the kernel is switched off")
    for vocab_size in (1, 2, 3, 4, 5, 255, 256, 257, 1021, 9999):
        logits = random_logits(32, vocab_size, seed=vocab_size, ties=True)
        requests = [
            SamplingParams(
                seed=i * 2**57 + i, temperature=[0.01, 0.5, 1, 2][i % 4],
                top_k=[-1, 3, 300][i % 3], top_p=[1, 0.9][i // 16], min_p=[0, 0.02][i % 2],
            )
            for i in range(32)
        ]  # fmt: skip
        sampler = sampler_of(requests, vocab_size)
        batch = sampler.prepare(np.arange(32), np.arange(32) * 2**26).draw
        rows = logits if batch.index is None else logits[batch.index]
        largest = rows.argmax(dim=1)
        assert torch.equal(draw(rows, largest, batch), draw_reference(rows, largest, batch))


@pytest.mark.parametrize("spread", [0.02, 1.0, 30.0], ids=["flat", "usual", "steep"])
@pytest.mark.parametrize("ties", [False, True])
def test_the_kernel_filters_large_vocabularies_as_the_reference_does(way, spread, ties):
    if way == "torch":
        pytest.skip("the kernel is switched off")
    limits = [
        {"top_k": 2}, {"top_k": 40}, {"top_k": 20_000}, {"top_p": 0.05}, {"top_p": 0.9},
        {"top_p": 0.99999}, {"top_p": 0.95, "top_k": 1000}, {"top_p": 0.3, "min_p": 0.5},
    ]  # fmt: skip
    logits = random_logits(len(limits), 32_003, seed=9, ties=ties) * spread
    sampler = sampler_of(
        [SamplingParams(seed=i, **limit) for i, limit in enumerate(limits)], 32_003
    )
    for position in range(8):
        batch = sampler.prepare(np.arange(8), np.full(8, position)).draw
        largest = logits.argmax(dim=1)
        assert torch.equal(draw(logits, largest, batch), draw_reference(logits, largest, batch))


@needs_compiler
def test_the_kernel_reads_and_writes_nothing_outside_of_its_arrays(tmp_path, way):
    if way == "torch":
        pytest.skip("the kernel is switched off")
    program = """
        #include <vector>
        #include "gumbel_draw.cpp"
        int main() {
          for (std::int64_t v = 1; v < 600; ++v) {
            std::vector<float> x(2 * v), t(2, 0.7f);  // on the heap, without slack
            const std::vector<double> p{0.9, 1.0}, least{0.0, 1e-9};
            for (std::int64_t i = 0; i < 2 * v; ++i) x[i] = float(i * 7919 % 101) / 10 - 1e30f * (i == 3);
            x[v - 1] = x[0];
            std::vector<std::int64_t> k{v / 2 + 1, 3}, seeds{-1, 1}, at{0, 1 << 30}, tokens(2);
            for (int r = 0; r < 2; ++r)
              tokens[r] = std::max_element(&x[r * v], &x[r * v] + v) - &x[r * v];
            const Draw draw{x.data(), v, v, t.data(), k.data(), p.data(), least.data(),
                            seeds.data(), at.data(), tokens.data()};
            draw_rows(&draw, 2);
            if (std::min(tokens[0], tokens[1]) < 0 || std::max(tokens[0], tokens[1]) >= v) return 1;
          }
        }"""  # noqa: E501
    run_sanitized(program, tmp_path)


def test_the_kernel_refuses_arrays_of_another_type_or_shape(way):
    if way == "torch":
        pytest.skip("the kernel is switched off")
    kernel = gumbel_draw_function()
    floats, ints = np.zeros(2, np.float32), np.zeros(2, np.int64)
    right = {
        "logits": np.zeros((2, 8), np.float32), "temperature": floats + 1, "top_k": ints + 3,
        "top_p": np.ones(2), "min_p": None, "seeds": ints, "positions": ints,
        "tokens": np.zeros(2, np.int64),
    }  # fmt: skip
    kernel(**right)
    wrong = {
        "logits": np.zeros((2, 8)), "temperature": floats.astype(np.float64), "top_p": floats,
        "min_p": np.ones(1), "top_k": ints.astype(np.int32), "seeds": np.zeros(3, np.int64),
        "positions": np.zeros(4, np.int64)[::2], "tokens": None,
    }  # fmt: skip
    for name, bad in wrong.items():
        with pytest.raises(TypeError):
            kernel(**(right | {name: bad}))


def test_logits_that_are_part_of_a_padded_row_are_read_in_place():
    padded = random_logits(10, 1024)
    inner = padded[:, :1001]
    padded[:, 1001:] = 1000
    requests = MIXED[:7]
    assert sample(inner[:7].clone(), requests) == [
        sampler_of([r], 1001)
        .sample(inner[i : i + 1], sampler_of([r], 1001).prepare(np.array([0]), np.array([0])))
        .tokens.item()
        for i, r in enumerate(requests)
    ]


def test_logits_that_are_not_numbers_still_give_a_token_of_the_vocabulary():
    logits = random_logits(5, 103)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 50] = torch.inf
    logits[3, 7] = torch.nan
    logits[4, 9:] = -torch.inf
    for params in ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0}):
        tokens = sample(logits, [SamplingParams(seed=i, **params) for i in range(5)])
        assert all(0 <= token < 103 for token in tokens)
        assert tokens[2] == 50
        assert tokens[4] < 9


def test_a_request_that_looks_at_the_whole_vocabulary_does_not_move_the_border_of_another():
    # 0.1 of 1,000 equal tokens is reached by 100 or by 101, as the rounding of the sum decides.
    logits = torch.zeros(1000)
    narrow = SamplingParams(seed=1, top_p=0.1)
    wide = SamplingParams(seed=2, top_k=999)

    def last(*requests):
        sampler = sampler_of(requests, 1000)
        batch = sampler.prepare(np.arange(len(requests)), np.zeros(len(requests))).draw
        y = logits.repeat(len(requests), 1)
        return int(bounds(y, batch.top_k, batch.top_p, batch.min_p)[1][0])

    assert last(narrow) == last(narrow, wide) in (99, 100)


# Biases and penalties


def test_a_bias_is_added_before_the_greedy_choice():
    logits = random_logits(1, 50)[0]
    best = int(logits.argmax())
    requests = [
        SamplingParams(temperature=0, logit_bias={17: 100.0}),
        SamplingParams(temperature=0, logit_bias={best: -100.0}),
        SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(50), -100.0)),
        SamplingParams(temperature=0),
    ]
    second = int(logits.topk(2).indices[1])
    assert sample(logits, requests) == [17, second, best, best]


def test_a_bias_for_a_token_that_does_not_exist_is_refused_and_leaves_the_row_free():
    sampler = Sampler(50, "cpu", 2)
    with pytest.raises(ValueError, match=r"logit_bias names token 50.*0 to 49"):
        sampler.admit(0, SamplingParams(logit_bias={50: 1.0}), NOTHING, NOTHING)
    assert sampler.prepare(np.array([0]), np.array([0])).bias is None


def test_presence_and_frequency_count_the_output_and_repetition_the_prompt_too():
    def greedy(logits, **params):
        request = SamplingParams(temperature=0, **params)
        sampler = sampler_of([request], 4, prompt=[0], output=[1, 1, 2])
        batch = sampler.prepare(np.array([0]), np.array([3]))
        logits = torch.tensor([logits])
        sampler.sample(logits, batch)
        return logits[0].tolist()

    assert greedy([4.0, 4.0, 4.0, 4.0], presence_penalty=1.5) == [4, 2.5, 2.5, 4]
    assert greedy([4.0, 4.0, 4.0, 4.0], frequency_penalty=0.5) == [4, 3, 3.5, 4]
    assert greedy([4.0, -4.0, 0.0, 4.0], repetition_penalty=2.0) == [2, -8, 0, 4]
    # Biases come first, and repetition before the penalties that subtract.
    assert greedy(
        [1.0, 1.0, 1.0, 1.0],
        logit_bias={1: 3.0}, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5,
    ) == [0.5, -0.5, -1.0, 1.0]  # fmt: skip


def test_a_sampled_token_is_penalised_from_the_next_step_on():
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler = sampler_of([params], 4)
    tokens = []
    for position in range(4):
        batch = sampler.prepare(np.array([0]), np.array([position]))
        logits = torch.tensor([[3.0, 2.5, 2.0, 0.0]])
        tokens.append(sampler.sample(logits, batch).tokens.item())
    assert tokens == [0, 1, 2, 0]


def test_the_dropped_sample_of_a_chunk_counts_for_nothing():
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler = sampler_of([params, params], 3)
    logits = torch.tensor([[3.0, 2.0, 0.0]] * 2)
    first = sampler.prepare(np.arange(2), np.zeros(2), draws=np.array([False, True]))
    assert sampler.sample(logits.clone(), first).tokens.tolist() == [0, 0]
    second = sampler.prepare(np.arange(2), np.array([0, 1]))
    assert sampler.sample(logits.clone(), second).tokens.tolist() == [0, 1]


def test_a_request_that_is_admitted_again_with_its_output_goes_on_exactly():
    params = SamplingParams(seed=11, frequency_penalty=0.7, repetition_penalty=1.2, top_p=0.95)
    steps = [random_logits(1, 300, seed=s) for s in range(12)]

    def run(sampler, row, start, tokens):
        for position in range(start, start + 6):
            batch = sampler.prepare(np.array([row]), np.array([position]))
            tokens.append(sampler.sample(steps[position].clone(), batch).tokens.item())
        return tokens

    whole = Sampler(300, "cpu", 4)
    whole.admit(0, params, np.arange(9, dtype=np.int32), NOTHING)
    expected = run(whole, 0, 6, run(whole, 0, 0, []))
    again = Sampler(300, "cpu", 4)
    again.admit(3, params, np.arange(9, dtype=np.int32), np.array(expected[:6], np.int32))
    assert run(again, 3, 6, expected[:6]) == expected


def test_a_row_that_is_released_leaves_nothing_to_the_next_request():
    sampler = Sampler(8, "cpu", 2)
    heavy = SamplingParams(
        temperature=0, frequency_penalty=2.0, repetition_penalty=9.0,
        logit_bias={0: -100.0}, logprobs=5, top_k=3,
    )  # fmt: skip
    said = np.zeros(5, np.int32)
    for _ in range(20):
        sampler.admit(0, heavy, said, said)
        sampler.release(0)
    sampler.release(0)
    sampler.admit(0, SamplingParams(temperature=0, repetition_penalty=2.0), NOTHING, NOTHING)
    batch = sampler.prepare(np.array([0]), np.array([0]))
    assert batch.bias is None and batch.logprobs is None
    logits = torch.arange(8.0).flip(0)[None]
    assert sampler.sample(logits.clone(), batch).tokens.tolist() == [0]
    batch = sampler.prepare(np.array([0]), np.array([1]))
    changed = logits.clone()
    sampler.sample(changed, batch)
    assert changed.tolist() == [[3.5, 6, 5, 4, 3, 2, 1, 0]]


def test_more_requests_with_penalties_than_first_slots_keep_their_own_counts():
    n = 21
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler = Sampler(n, "cpu", n)
    for row in range(n):
        sampler.admit(row, params, NOTHING, np.array([row], np.int32))
    logits = torch.ones(n, n)
    sampler.sample(logits, sampler.prepare(np.arange(n), np.ones(n)))
    assert torch.equal(logits, 1 - 2 * torch.eye(n))


@pytest.mark.parametrize("first", [True, False])
def test_requests_may_be_admitted_inside_inference_mode_and_sampled_outside_or_the_reverse(first):
    params = SamplingParams(seed=1, presence_penalty=1.0, logit_bias={1: 1.0}, top_p=0.9)
    with torch.inference_mode(first):
        sampler = sampler_of([params], 10)
    with torch.inference_mode(not first):
        logits = torch.zeros(1, 10)
        for position in range(3):
            batch = sampler.prepare(np.array([0]), np.array([position]))
            sampler.sample(logits.clone(), batch)
        sampler.admit(1, params, NOTHING, NOTHING)


def test_an_empty_batch_gives_no_tokens():
    sampler = sampler_of(MIXED, 100)
    none = np.zeros(0, np.int64)
    result = sampler.sample(torch.zeros(0, 100), sampler.prepare(none, none))
    assert result.tokens.shape == (0,)


# Log probabilities


def test_a_chunk_reports_no_logprobs():
    requests = [SamplingParams(temperature=0, logprobs=2)] * 2
    sampler = sampler_of(requests, 7)
    batch = sampler.prepare(np.arange(2), np.zeros(2), draws=np.array([False, True]))
    assert list(sampler.sample(random_logits(2, 7), batch).logprobs.to_host()) == [1]
    chunks = sampler.prepare(np.arange(2), np.zeros(2), draws=np.array([False, False]))
    assert sampler.sample(random_logits(2, 7), chunks).logprobs is None


def test_logprobs_are_of_the_models_own_distribution():
    logits = random_logits(1, 40)
    own = torch.log_softmax(logits[0], 0)
    params = SamplingParams(
        seed=1, temperature=0.3, top_k=2, logit_bias={9: 100.0}, repetition_penalty=3.0, logprobs=4
    )
    sampler = sampler_of([params], 40, prompt=range(20))
    result = sampler.sample(logits.clone(), sampler.prepare(np.array([0]), np.array([0])))
    (reported,) = result.logprobs.to_host().values()
    assert result.tokens.item() == 9
    assert reported.logprob == pytest.approx(own[9].item(), abs=1e-6)
    top = own.topk(4)
    assert reported.top_ids == top.indices.tolist()
    assert reported.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-6)


def test_each_request_gets_as_many_top_logprobs_as_it_asked_for():
    requests = [SamplingParams(temperature=0, logprobs=n) for n in (None, 0, 3, 20)]
    sampler = sampler_of(requests, 7)
    batch = sampler.prepare(np.arange(4), np.zeros(4))
    reported = sampler.sample(random_logits(4, 7), batch).logprobs.to_host()
    assert {place: len(entry.top_ids) for place, entry in reported.items()} == {1: 0, 2: 3, 3: 7}


def test_the_most_likely_of_equal_tokens_are_those_with_the_lowest_ids():
    x = torch.zeros(3, 500)
    x[1, 400:] = 1
    x[2, [3, 490]] = 2
    assert stable_topk(x, 3).tolist() == [[0, 1, 2], [400, 401, 402], [3, 490, 0]]
    logits = random_logits(8, 3000, ties=True)
    expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :20]
    assert torch.equal(stable_topk(logits, 20), expected)


# The table


def test_the_table_tells_what_its_rows_need():
    table = SamplingTable(6)
    for row, params in enumerate(
        [
            SamplingParams(temperature=0, top_p=0.5),
            SamplingParams(top_k=5),
            SamplingParams(top_p=0.5, logprobs=0),
            SamplingParams(min_p=0.5),
        ]
    ):
        table.set(row, params)
    assert table.needs.tolist() == [
        0,
        SAMPLED | TOP_K,
        SAMPLED | TOP_P | LOGPROBS,
        SAMPLED | MIN_P,
        0,
        0,
    ]
    table.clear(3)
    assert table.needs[3] == 0
