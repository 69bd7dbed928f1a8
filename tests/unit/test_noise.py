"""The noise of the sampling kernel: its exact bits, and the float32 bound that rules tokens out."""

import ctypes
import shutil

import numpy as np
import pytest
import torch

from minisgl.engine import philox
from minisgl.engine.draw import DrawBatch, draw_reference
from minisgl_kernels import build
from tests.unit.sanitizer import needs_compiler

pytestmark = needs_compiler

PROGRAM = """
#include "noise.h"
extern "C" {
void words(uint32_t block, uint32_t position, uint64_t seed, uint32_t* out) {
  const minisgl::Words w = minisgl::Philox(position, seed, seed >> 32).words(block);
  for (int i = 0; i < 4; ++i) out[i] = w.of[i];
}
void noises(const uint32_t* word, int64_t n, double* exact, float* bound) {
  for (int64_t i = 0; i < n; ++i) {
    exact[i] = minisgl::gumbel(word[i]);
    bound[i] = minisgl::noise_bound(word[i]);
  }
}
void floors(const uint32_t* word, int64_t n, float* floor) {
  for (int64_t i = 0; i < n; ++i) floor[i] = minisgl::noise_floor(word[i]);
}
float max_noise() { return minisgl::kMaxNoise; }
}
"""


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """csrc/noise.h as the CPU computes it: without a GPU's instructions, to the same bits."""
    folder = tmp_path_factory.mktemp("csrc")
    shutil.copy(build.CSRC / "noise.h", folder)
    (folder / "noise.cpp").write_text(PROGRAM)
    made = build.library("noise", ["-O2", "-ffp-contract=off"], csrc=folder)
    made.max_noise.restype = ctypes.c_float
    made.words.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p]
    made.floors.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    made.noises.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    return made


def noises(made, words):
    words = np.ascontiguousarray(words, np.uint32)
    exact, bound = np.empty(len(words)), np.empty(len(words), np.float32)
    made.noises(words.ctypes.data, len(words), exact.ctypes.data, bound.ctypes.data)
    return exact, bound


def test_words_and_noise_are_those_of_the_definition_to_the_bit(noise):
    rng = np.random.default_rng(5)
    for _ in range(50):
        block, position = rng.integers(0, 1 << 30, 2)
        seed = int(rng.integers(-(1 << 63), (1 << 63) - 1))
        found = np.empty(4, np.uint32)
        noise.words(int(block), int(position), seed % (1 << 64), found.ctypes.data)
        expected = philox.block_noise(*(torch.tensor([int(x)]) for x in (seed, position, block)))
        assert noises(noise, found)[0].tolist() == expected[0].tolist()
    words = np.concatenate([
        rng.integers(0, 1 << 32, 200_000), np.arange(3000), (1 << 32) - 1 - np.arange(3000),
        *((1 << k) + np.arange(-2, 3) for k in range(3, 32)),
    ]).astype(np.uint32)  # fmt: skip
    exact, _ = noises(noise, words)
    assert np.array_equal(exact, philox.gumbel(torch.from_numpy(words.astype(np.int64))).numpy())


def test_the_bound_is_above_the_noise_of_every_word(noise):
    # Both rise with the word. So noise(b) < bound(a) for a word a and a later b shows it for all
    # words between: the steps are small where the noise is steep, and 1 at the top.
    near_top = (1 << 32) - 1 - np.arange(1 << 17, dtype=np.int64)
    middle = np.arange(0, 1 << 32, 1 << 12, dtype=np.int64)
    tail = (1 << 32) - 1 - np.unique(np.geomspace(1 << 16, 1 << 31, 400_000).astype(np.int64))
    grid = np.unique(np.concatenate([
        np.arange(1 << 16), np.unique(np.geomspace(1, 1 << 32, 400_000).astype(np.int64)) - 1,
        middle, tail, near_top,
    ]))  # fmt: skip
    assert grid[0] == 0
    assert grid[-1] == (1 << 32) - 1
    exact, bound = noises(noise, grid)
    assert (np.diff(exact) > 0).all()
    assert (np.diff(bound) >= 0).all()
    between = np.diff(grid) > 1
    assert (bound[:-1] - exact[1:])[between].min() > 1e-5
    assert (bound - exact).min() > 5e-5
    assert exact[-1] < noise.max_noise()
    # and where the noise is large, which decides, it is close, but for the one greatest word
    assert (bound - exact)[:-1][exact[:-1] > 2].max() < 0.5


def test_the_lower_bound_is_close_below_the_noise(noise):
    rng = np.random.default_rng(9)
    words = np.concatenate([
        rng.integers(0, 1 << 32, 1_000_000), np.arange(1 << 16), (1 << 32) - 1 - np.arange(1 << 16),
        (1 << 31) + np.arange(-1000, 1000), np.arange(0, 1 << 32, 1 << 13),
    ]).astype(np.uint32)  # fmt: skip
    exact, _ = noises(noise, words)
    floor = np.empty(len(words), np.float32)
    noise.floors(words.ctypes.data, len(words), floor.ctypes.data)
    # room on both sides for the GPU's logarithms, which may be a bit or two off
    assert (exact - floor).min() > 5e-5
    assert (exact - floor).max() < 2e-4


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 0.6, 1.0, 3.0, 1e4])
@pytest.mark.parametrize("kind", ["normal", "flat", "coarse", "wide"])
def test_every_token_that_could_win_reaches_the_threshold(noise, kind, temperature):
    # The kernel's rule, in its float32 operations: a token is looked at if its bound reaches the
    # best score so far, rounded down. The winner must do so even against its own score.
    rng = np.random.default_rng(3)
    n, vocab = 20, 5003
    scale = {"normal": 3, "flat": 1e-3, "coarse": 2, "wide": 1e6}[kind]
    logits = (rng.standard_normal((n, vocab)) * scale).astype(np.float32)
    if kind == "coarse":
        logits = np.round(logits)
    t = np.float32(temperature)
    seeds = torch.from_numpy(rng.integers(-(1 << 63), (1 << 63) - 1, n))
    positions = torch.from_numpy(rng.integers(0, 1 << 31, n))
    rows = torch.from_numpy(logits)
    batch = DrawBatch(None, torch.full((n,), float(t)), seeds, positions, None, None, None)
    winners = draw_reference(rows, rows.argmax(dim=1), batch).numpy()

    slope = np.float32(np.nextafter(np.float32(1) / t, np.float32(0)) * np.float32(1 - 2.0**-21))
    for row, winner in enumerate(winners.tolist()):
        below = logits[row] - logits[row].max()
        words = np.empty((-(-vocab // 4), 4), np.uint32)
        for block in range(len(words)):
            noise.words(
                block, int(positions[row]), int(seeds[row]) % (1 << 64), words[block].ctypes.data
            )
        exact, noise_bound = noises(noise, words.reshape(-1)[:vocab])
        with np.errstate(over="ignore"):
            y = below / t
            # a fused multiply-add: one rounding of the exact sum
            bound = (below.astype(np.float64) * slope + noise_bound).astype(np.float32)
        score = y.astype(np.float64) + exact
        floor = np.float32(score[winner])
        floor = np.nextafter(floor, np.float32(-np.inf)) if floor > score[winner] else floor
        assert score.argmax() == winner
        assert bound[winner] >= floor
        assert below[winner] * slope >= y[winner]  # so a filter's `least` does not lose it
        assert np.float32(below[winner].astype(np.float64) * slope + 22.874) >= floor
        likely = y > -27
        assert (bound[likely] - score[likely] > 4e-5).all()
        assert_bounds_hold_before_the_largest_is_known(
            noise, logits[row], words.reshape(-1)[:vocab], t, score
        )


def assert_bounds_hold_before_the_largest_is_known(noise, logits, words, t, score):
    """The same in the units of logits / temperature, where rounding takes more.

    `score`: what each token has in the end, where the largest logit has been subtracted.
    """
    scale = np.nextafter(np.float32(1) / t, np.float32(0))
    shift = logits.max() * scale
    slack = np.float32(np.abs(shift).astype(np.float64) * 2.0**-19 + 4e-5)
    floors = np.empty(len(words), np.float32)
    noise.floors(words.ctypes.data, len(words), floors.ctypes.data)
    known = np.maximum(logits * scale + floors - shift - slack, np.float32(-3.1302))
    likely = score > -4  # than the least noise of the largest logit
    assert (known <= np.maximum(score, -3.1301)).all()
    bound = (logits.astype(np.float64) * scale + noises(noise, words)[1]).astype(np.float32)
    assert (bound >= score.astype(np.float32) + shift - slack)[likely].all()
