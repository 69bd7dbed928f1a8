"""The noise of sampling, against published vectors and against the logarithm it approximates."""

import math

import numpy as np
import pytest
import torch

from minisgl.engine import philox

WORD = 2**32 - 1


def words(counter, key):
    def tensors(values):
        return tuple(torch.tensor([value]) for value in values)

    return [int(word) for word in philox.philox(tensors(counter), tensors(key))]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that come with Random123
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_are_those_of_the_published_generator(counter, key, expected):
    assert words(counter, key) == list(expected)


def test_a_token_takes_its_word_from_the_block_of_four_it_lies_in():
    seed = -(2**63) + 12345
    noise = philox.block_noise(torch.tensor([seed]), torch.tensor([77]), torch.tensor([0, 9]))
    raw = words((9, 77, 0, 0), (seed & WORD, (seed >> 32) & WORD))
    assert noise[1].tolist() == philox.gumbel(torch.tensor(raw)).tolist()
    assert noise.shape == (2, 4)


def test_all_64_bits_of_the_seed_and_the_position_change_the_noise():
    def of(seed, position):
        return tuple(
            philox.block_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([3]))
            .flatten()
            .tolist()
        )

    seeds = [0, 1, -1, 2**31, 2**32, 2**62, -(2**63)]
    assert len({of(seed, 0) for seed in seeds} | {of(0, p) for p in (1, 2, 2**31 - 1)}) == 10


def test_the_logarithm_is_that_of_the_reals_up_to_rounding():
    values = np.concatenate(
        [
            np.random.default_rng(0).random(20000),
            1 - 0.5 ** np.arange(1, 34),
            0.5 ** np.arange(0, 34),
            np.linspace(0.7, 0.72, 999),
            np.linspace(1, 30, 999)[1:],
        ]
    )
    for value, got in zip(values, philox.log(torch.from_numpy(values)).tolist(), strict=True):
        assert got == pytest.approx(math.log(value), rel=1e-15, abs=0)


def test_the_noise_of_certain_words_keeps_its_bits():
    # Anything that changes these changes what a seed means for every user.
    noise = philox.gumbel(torch.tensor([0, 1, 2**31, 0xDEADBEEF, WORD])).numpy().view(np.uint64)
    assert [hex(bits) for bits in noise.tolist()] == [
        "0xc0090a3aa15a0b5d",
        "0xc008a56cb66869f4",
        "0x3fd774f29c39c0bd",
        "0x3fff8564bfa1e55d",
        "0x4036dfb516f1cbbe",
    ]


def test_noise_is_finite_and_lies_within_the_bounds_that_pruning_relies_on():
    low, high = philox.gumbel(torch.tensor([0, WORD])).tolist()
    assert philox.MIN_NOISE < low < philox.MIN_NOISE + 1e-3
    assert philox.MAX_NOISE - 1e-3 < high < philox.MAX_NOISE
    assert pytest.approx(high - low, abs=1e-3) == philox.NOISE_SPREAD


def test_noise_follows_the_gumbel_distribution():
    blocks = torch.arange(50_000)
    noise = philox.block_noise(torch.tensor([42]), torch.tensor([7]), blocks).flatten().numpy()
    uniform = np.sort(np.exp(-np.exp(-noise)))
    n = len(uniform)
    deviation = np.abs(uniform - (np.arange(n) + 0.5) / n).max()
    assert deviation * math.sqrt(n) < 1.95  # Kolmogorov-Smirnov, one in a thousand
