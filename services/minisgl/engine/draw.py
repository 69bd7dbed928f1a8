"""The draw: one token for each row from logits, temperature, filters and noise.

What is drawn is defined in `philox`; here are the fast way on a CPU and the reference.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.engine import philox
from minisgl.engine.filters import ROWS_AT_ONCE, Ranks, bounds
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.filter_bounds import filter_bounds_function
from minisgl_kernels.sample import sample_function
from minisgl_kernels.sampling import EachRow, gumbel_draw_function


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """The n requests of a batch that draw. All on the device."""

    index: Tensor | None
    """[n] int64: places in the batch; None: all of it."""
    temperature: Tensor
    """[n] float32."""
    seeds: Tensor
    """[n] int64."""
    positions: Tensor
    """[n] int64: output tokens of the request before this draw."""
    top_k: Tensor | None
    """[n] int64; None: no request limits it. The same for the next two."""
    top_p: Tensor | None
    min_p: Tensor | None
    ranks: Ranks | None = None
    """What the host knows of top_k and top_p."""

    def part(self, rows: slice) -> "DrawBatch":
        """Some of the requests, for those rows of the logits."""

        def cut(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows]

        return DrawBatch(
            index=None, temperature=self.temperature[rows], seeds=self.seeds[rows],
            positions=self.positions[rows], top_k=cut(self.top_k), top_p=cut(self.top_p),
            min_p=cut(self.min_p),
        )  # fmt: skip

    @property
    def limits(self) -> bool:
        """Some request limits which tokens it may draw."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


def draw(
    logits: Tensor, largest: Tensor, batch: DrawBatch, threads: EachRow | None = None
) -> Tensor:
    """One token [n] int64 for each row of `logits` [n, V] float32.

    `largest` [n] int64 are the ids of the largest logits: the answer where a row has NaN or +inf.
    `threads` share the rows on a CPU.
    """
    if logits.is_cuda:
        return _draw_on_cuda(logits, largest, batch)
    kernel = gumbel_draw_function() if logits.is_cpu else None
    if kernel is None:
        return draw_reference(logits, largest, batch)
    tokens = largest.clone()
    limits = (
        None if limit is None else limit.numpy()
        for limit in (batch.top_k, batch.top_p, batch.min_p)
    )  # fmt: skip
    kernel(
        logits.numpy(), threads, **dict(zip(("top_k", "top_p", "min_p"), limits, strict=True)),
        temperature=batch.temperature.numpy(), seeds=batch.seeds.numpy(),
        positions=batch.positions.numpy(), tokens=tokens.numpy(),
    )  # fmt: skip
    return tokens


def _draw_on_cuda(logits: Tensor, largest: Tensor, batch: DrawBatch) -> Tensor:
    kernel = sample_function()
    # Some rows at a time: the reference has up to 80 bytes at hand for each logit.
    if kernel is None and len(logits) > ROWS_AT_ONCE:
        parts = []
        for i in range(0, len(logits), ROWS_AT_ONCE):
            rows = slice(i, i + ROWS_AT_ONCE)
            parts.append(_draw_on_cuda(logits[rows], largest[rows], batch.part(rows)))
        return torch.cat(parts)
    if kernel is None:
        return draw_reference(logits, largest, batch)
    least = last = None
    if batch.limits:
        least, last = _bounds_on_cuda(logits, largest, batch)
    greedy = torch.zeros_like(largest, dtype=torch.uint8)
    try:
        tokens: Tensor = kernel(
            logits, batch.temperature, batch.seeds, batch.positions, greedy, least, last
        )
    except KernelUnavailable:  # of this type
        return draw_reference(logits, largest, batch)
    return tokens.long()


def _bounds_on_cuda(logits: Tensor, largest: Tensor, batch: DrawBatch) -> tuple[Tensor, Tensor]:
    if (kernel := filter_bounds_function()) is not None:
        with contextlib.suppress(KernelUnavailable):  # of this vocabulary
            return kernel(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    y = _shifted(logits, largest, batch.temperature)
    return bounds(y, batch.top_k, batch.top_p, batch.min_p, batch.ranks)


def draw_reference(logits: Tensor, largest: Tensor, batch: DrawBatch) -> Tensor:
    """The same as `draw`, in torch operations for any device."""
    n, vocab_size = logits.shape
    y = _shifted(logits, largest, batch.temperature)
    width = y.shape[1]

    # The token at y = 0 has at least the least noise, and no token more than the most. So what is
    # further below cannot win, and needs no noise.
    passes = y >= -philox.NOISE_SPREAD
    if batch.limits:
        least, last = bounds(y, batch.top_k, batch.top_p, batch.min_p)
        passes &= y >= least[:, None]
        for row in torch.nonzero(last < width).flatten().tolist():
            passes[row, last[row] + 1 :] &= y[row, last[row] + 1 :] > least[row]

    # Four tokens share one block of random words; flags of one byte, so a block is one int32.
    row, block = torch.nonzero(passes.view(torch.int32), as_tuple=True)
    noise = philox.block_noise(batch.seeds[row], batch.positions[row], block)
    scores = y.view(n, -1, 4)[row, block].to(torch.float64) + noise
    scores.masked_fill_(~passes.view(n, -1, 4)[row, block], -torch.inf)
    best = scores.new_full((n,), -torch.inf).scatter_reduce_(0, row, scores.amax(dim=1), "amax")
    first = torch.argmax((scores == best[row, None]).to(torch.int8), dim=1)
    wins = (scores == best[row, None]).any(dim=1)
    ids = torch.where(wins, 4 * block + first, width)
    tokens = torch.full_like(largest, width).scatter_reduce_(0, row, ids, "amin")
    return torch.where(tokens < vocab_size, tokens, largest)


def _shifted(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """y [n, W] of `philox`, with -inf in up to three columns after the vocabulary."""
    n, vocab_size = logits.shape
    width = -(-vocab_size // 4) * 4
    y = logits.new_full((n, width), -torch.inf) if width > vocab_size else torch.empty_like(logits)
    inner = y[:, :vocab_size]
    torch.sub(logits, logits.gather(1, largest[:, None]), out=inner)
    inner.div_(temperature[:, None])
    return y
