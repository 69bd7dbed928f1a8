"""The noise of sampling: one definition, to the bit, for every device.

The noise of a token depends on the request's seed, the position of the draw and the token's id,
and on nothing else. So a request gives the same output in any batch, on any number of ranks, and
after a replay. A kernel that reproduces these four steps exactly may replace this module:

1. Words. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with
   counter (id // 4, position, 0, 0) and key (low half, high half) of the seed's 64 bits. Token
   `id` takes word `id % 4` of the four, x in [0, 2^32).
2. Uniform. u = (2 x + 1) * 2^-33, exact in binary64 and strictly between 0 and 1.
3. Gumbel noise. g = -log(-log(u)) in binary64, with `log` as below: every operation rounded on its
   own (no fused multiply-add; compile with -ffp-contract=off or -fmad=false). g lies in
   [MIN_NOISE, MAX_NOISE].
4. Draw. y = (logit - largest logit of the row) / temperature in binary32, two rounded operations;
   the token is the one that passes the filters with the largest y + g in binary64, the lowest id
   among equals.

Adding Gumbel noise and taking the maximum draws from softmax(y) over the tokens that pass.

`log(v)`: v = m * 2^e with m in [1/2, 1) (frexp); if m < SQRT_HALF, double m and take 1 from e.
s = (m - 1) / (m + 1); z = s * s; p = 1/21, then p = p * z + c for c in 1/19, 1/17, ..., 1/3, 1;
log(v) = e * LN2 + (2 * s) * p.  Its relative error stays below 1e-15.
"""

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

SQRT_HALF = 0.7071067811865476
LN2 = 0.6931471805599453
_COEFFICIENTS = tuple(1.0 / n for n in range(21, 0, -2))

MIN_NOISE = -3.1301
"""A little below the noise of the word 0."""
MAX_NOISE = 22.8739
"""A little above the noise of the word 2^32 - 1."""
NOISE_SPREAD = MAX_NOISE - MIN_NOISE
"""A token whose y is further below another's than this cannot win against it."""


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words for each counter, as int64 tensors that hold 32-bit values.

    `counter` has four and `key` two such tensors, of shapes that broadcast. 64-bit products wrap
    around and their sign bit means nothing: the masks after the shifts take it away.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def log(v: Tensor) -> Tensor:
    """Natural logarithm of positive binary64 numbers, the same bits on every device."""
    m, e = torch.frexp(v)
    small = m < SQRT_HALF
    m = torch.where(small, m * 2, m)
    e = e - small.to(e.dtype)
    s = (m - 1) / (m + 1)
    z = s * s
    p = torch.full_like(z, _COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        p.mul_(z).add_(c)
    return e.to(torch.float64) * LN2 + (2 * s) * p


def gumbel(words: Tensor) -> Tensor:
    """The noise of each 32-bit word, of any shape, in float64."""
    u = (2 * words + 1).to(torch.float64) * 2.0**-33
    return -log(-log(u))


def block_noise(seeds: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
    """Noise [n, 4] of the tokens 4b, 4b + 1, 4b + 2, 4b + 3 of each block b of `blocks` [n].

    `seeds` and `positions` are [n] or [1] int64; seeds use all 64 bits.
    """
    zero = torch.zeros_like(blocks)
    words = philox((blocks, positions & _MASK, zero, zero), (seeds & _MASK, (seeds >> 32) & _MASK))
    return gumbel(torch.stack(words, dim=-1))
