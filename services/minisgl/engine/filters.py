"""top_k, top_p and min_p as one bound for each row, as a rule without sorting the vocabulary.

Each filter keeps a beginning of the row in the order (falling y, rising id). So all of them
together are a pair: the least y that passes, and the largest id that passes with just this y.
y [B, W] float32 are the logits less the row's largest, over the temperature: the largest is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FIRST_LOOK = 256
"""Tokens that are looked at for a top_p before a row's whole vocabulary is sorted."""


ROWS_AT_ONCE = 32
"""Rows of a GPU that are sorted at the same time: a sort takes much memory."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the host knows of a batch's top_k and top_p, so that nobody asks the device for it."""

    limited: Tensor
    """[n] int64: the rows that have one of them."""
    look: int
    """Tokens that are looked at before a row's whole vocabulary is sorted."""
    all_top_k: bool
    """Each of these rows has a top_k, so `look` is enough for all of them."""

    @classmethod
    def of(
        cls, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64], width: int,
        upload: Callable[[npt.NDArray[np.int64]], Tensor] = torch.from_numpy,
    ) -> "Ranks":  # fmt: skip
        """From top_k and top_p of each row, with `width` or more and 1 for none."""
        limited = np.flatnonzero((top_k < width) | (top_p < 1))
        look = int(np.where(top_k < width, top_k, FIRST_LOOK).max(initial=0))
        return cls(upload(limited), look, bool((top_k[limited] < width).all()))


def bounds(
    y: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None,
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(least y [B] float32, last id [B] int64): a token passes if y > least, or id <= last at it.

    `top_k` [B] int64 is at least 1, and W or more where a row has no limit; `top_p` [B] and
    `min_p` [B] are float64, with 1 and 0 for no limit; None: no row has the limit. top_p counts
    probabilities among what top_k left. A row with a NaN gets bounds without meaning. Without
    `ranks` a GPU is waited for, and with them only if a row has a top_p and no top_k.
    """
    rows, width = y.shape
    least = y.new_full((rows,), -torch.inf)
    last = torch.full((rows,), width, dtype=torch.int64, device=y.device)
    if top_k is not None or top_p is not None:
        k = last if top_k is None else top_k.clamp(max=width)
        p = torch.ones_like(k, dtype=torch.float64) if top_p is None else top_p
        if ranks is None:
            host_k, host_p = k.cpu().numpy(), p.cpu().numpy()
            ranks = Ranks.of(host_k, host_p, width, lambda a: torch.from_numpy(a).to(y.device))
        at = ranks.limited
        least[at], last[at] = _ranked(y[at], k[at], p[at], ranks.look, ranks.all_top_k)
    if min_p is not None:
        floor = torch.log(min_p).to(torch.float32)  # of 0: -inf, no limit
        last = torch.where(floor > least, width, last)
        least = torch.maximum(least, floor)
    return least, last


def _ranked(y: Tensor, k: Tensor, p: Tensor, look: int, all_top_k: bool) -> tuple[Tensor, Tensor]:
    """The bounds by rank of rows that have a top_k, a top_p or both; `look` tokens come first."""
    width = y.shape[1]
    # One more than asked for, because it tells whether the last that passes has equals.
    top = _largest(y, min(look + 1, width))
    n = top.shape[1]
    kept = torch.minimum(k.clamp(max=n), torch.where(p < 1, _reaching(y, top, k, p, all_top_k), n))
    least = top.gather(1, kept[:, None] - 1)[:, 0]
    following = top.gather(1, kept[:, None].clamp(max=n - 1))[:, 0]
    last = _last_of_equals(y, least, kept, (kept < n) & (following == least))
    if n < width and not all_top_k:
        unseen = torch.nonzero(kept == n).flatten()
        for some in torch.split(unseen, ROWS_AT_ONCE if y.is_cuda else max(len(unseen), 1)):
            if len(some):
                least[some], last[some] = _ranked(y[some], k[some], p[some], width, all_top_k)
    return least, last


def _last_of_equals(y: Tensor, least: Tensor, kept: Tensor, cut: Tensor) -> Tensor:
    """The id of the last token of `kept` ones where equals follow it, else the width."""
    width = y.shape[1]
    last = torch.full_like(kept, width)
    if y.is_cuda:  # for all rows: to ask which would be to wait
        places = (y == least[:, None]).cumsum(dim=1, dtype=torch.int32)
        wanted = kept - (y > least[:, None]).sum(dim=1)
        return torch.where(cut, (places >= wanted[:, None]).to(torch.int8).argmax(dim=1), last)
    for row in torch.nonzero(cut).flatten().tolist():
        equals = torch.nonzero(y[row] == least[row]).flatten()
        last[row] = equals[kept[row] - (y[row] > least[row]).sum() - 1]
    return last


def _reaching(y: Tensor, top: Tensor, k: Tensor, p: Tensor, all_top_k: bool) -> Tensor:
    """How many of `top` [B, n], the row's largest, have probabilities that reach p; n at most."""
    width, n = y.shape[1], top.shape[1]
    # Both sums are binary64 over the same binary32 terms, so they differ in the order alone.
    mass = torch.cumsum(torch.exp(top), dim=1, dtype=torch.float64)
    total = mass.gather(1, (k.clamp(max=n) - 1)[:, None])[:, 0]
    if not all_top_k:  # not taken from `mass` if n is width: other rows decide that
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
