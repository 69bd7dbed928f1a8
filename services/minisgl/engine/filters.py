"""top_k, top_p and min_p as one bound for each row, as a rule without sorting the vocabulary.

Each filter keeps a beginning of the row in the order (falling y, rising id). So all of them
together are a pair: the least y that passes, and the largest id that passes with just this y.
y [B, W] float32 are the logits less the row's largest, over the temperature: the largest is 0.
"""

import numpy as np
import torch
from torch import Tensor

FIRST_LOOK = 256
"""Tokens that are looked at for a top_p before a row's whole vocabulary is sorted."""


def bounds(
    y: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(least y [B] float32, last id [B] int64): a token passes if y > least, or id <= last at it.

    `top_k` [B] int64 is at least 1, and W or more where a row has no limit; `top_p` [B] and
    `min_p` [B] are float64, with 1 and 0 for no limit; None: no row has the limit. top_p counts
    probabilities among what top_k left. A row with a NaN gets bounds without meaning.
    """
    rows, width = y.shape
    least = y.new_full((rows,), -torch.inf)
    last = torch.full((rows,), width, dtype=torch.int64, device=y.device)
    if top_k is not None or top_p is not None:
        k = last if top_k is None else top_k.clamp(max=width)
        p = torch.ones_like(k, dtype=torch.float64) if top_p is None else top_p
        limited = torch.nonzero((k < width) | (p < 1)).flatten()
        look = torch.where(k < width, k, FIRST_LOOK).max()
        least[limited], last[limited] = _ranked(y[limited], k[limited], p[limited], int(look))
    if min_p is not None:
        floor = torch.log(min_p).to(torch.float32)  # of 0: -inf, no limit
        last = torch.where(floor > least, width, last)
        least = torch.maximum(least, floor)
    return least, last


def _ranked(y: Tensor, k: Tensor, p: Tensor, look: int) -> tuple[Tensor, Tensor]:
    """The bounds by rank of rows that have a top_k, a top_p or both; `look` tokens come first."""
    width = y.shape[1]
    # One more than asked for, because it tells whether the last that passes has equals.
    top = _largest(y, min(look + 1, width))
    n = top.shape[1]
    kept = torch.minimum(k.clamp(max=n), torch.where(p < 1, _reaching(y, top, k, p), n))
    least = top.gather(1, kept[:, None] - 1)[:, 0]
    following = top.gather(1, kept[:, None].clamp(max=n - 1))[:, 0]
    last = torch.full_like(k, width)
    for row in torch.nonzero((kept < n) & (following == least)).flatten().tolist():
        equals = torch.nonzero(y[row] == least[row]).flatten()
        last[row] = equals[kept[row] - (y[row] > least[row]).sum() - 1]
    unseen = torch.nonzero(kept == n).flatten()
    if n < width and unseen.numel():
        least[unseen], last[unseen] = _ranked(y[unseen], k[unseen], p[unseen], width)
    return least, last


def _reaching(y: Tensor, top: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """How many of `top` [B, n], the row's largest, have probabilities that reach p; n at most."""
    width, n = y.shape[1], top.shape[1]
    # Both sums are binary64 over the same binary32 terms, so they differ in the order alone.
    mass = torch.cumsum(torch.exp(top), dim=1, dtype=torch.float64)
    total = mass.gather(1, (k.clamp(max=n) - 1)[:, None])[:, 0]
    if bool((k >= width).any()):  # not taken from `mass` if n is width: other rows decide that
        total = torch.where(k < width, total, _row_sums(torch.exp(y)))
    return ((mass < (p * total)[:, None]).sum(dim=1) + 1).clamp(max=n)


def _row_sums(x: Tensor) -> Tensor:
    """The sum of each row in float64."""
    if x.device.type != "cpu":
        return x.sum(dim=1, dtype=torch.float64)
    # torch shares out the sum of a single row among threads, and so rounds it another way.
    return torch.from_numpy(x.numpy().sum(axis=1, dtype=np.float64))


def _largest(y: Tensor, n: int) -> Tensor:
    """The n largest of each row, falling."""
    if y.device.type != "cpu":
        return torch.topk(y, n, dim=1).values
    # Four times as fast as topk here.
    values = y.numpy()
    if n < y.shape[1]:
        values = np.partition(values, y.shape[1] - n, axis=1)[:, -n:]
    return torch.from_numpy(np.ascontiguousarray(np.sort(values, axis=1)[:, ::-1]))
