"""Attention in plain PyTorch: the reference for the others, and what runs everywhere."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from minisgl.attention.base import AttentionBackend, AttentionContext, ForwardBatch
from minisgl.kvcache.pool import KVPool

QUERY_BLOCK = 256
"""Queries of one prefill computed at a time: bounds the mask, and skips keys after the block."""


@dataclass(slots=True)
class _Decodes:
    """Requests with one new token each whose lengths are within a factor of two."""

    tokens: torch.Tensor | None
    """[n] index of each into the T tokens; None: all T of them, in order."""
    slots: torch.Tensor
    """[n * length] slots to read, each request's filled up to the longest."""
    count: int
    length: int
    mask: torch.Tensor | None
    """[n, 1, 1, length], False or minus infinity on what was filled up; None: nothing was."""


@dataclass(slots=True)
class _Extend:
    """One request with several new tokens."""

    start: int
    stop: int
    slots: torch.Tensor
    """[length] slots of all its tokens."""
    blocks: list[tuple[int, int, int, torch.Tensor | None]]
    """(start, stop) within the T tokens, keys seen, mask [queries, keys]; None: causal."""


@dataclass(slots=True)
class _Metadata:
    decodes: list[_Decodes]
    extends: list[_Extend]


class TorchBackend(AttentionBackend):
    """Gathers the keys and values of each request, then scaled-dot-product attention.

    Decoding requests of similar length go into one call with a mask; a request with more new
    tokens has calls of its own.
    """

    def __init__(self, ctx: AttentionContext | None = None) -> None:
        """All that it needs to know is in the batch and the pool."""
        if ctx is not None:
            super().__init__(ctx)

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        lens = batch.device_lens
        news = lens - batch.cached_lens
        starts = np.cumsum(news) - news
        single = np.flatnonzero(news == 1)
        decodes = [
            self._decodes(batch, chosen, starts[chosen], len(single) == len(news))
            for chosen in _buckets(lens, single)
        ]
        extends = [self._extend(batch, int(i), int(starts[i])) for i in np.flatnonzero(news != 1)]
        batch.metadata = _Metadata(decodes, extends)

    def _decodes(
        self, batch: ForwardBatch, chosen: np.ndarray, starts: np.ndarray, only: bool
    ) -> _Decodes:
        device = batch.page_table.device
        lens = batch.device_lens[chosen]
        longest = int(lens.max())
        everyone = only and len(chosen) == len(batch.device_lens)
        rows = batch.rows if everyone else batch.rows[torch.from_numpy(chosen).to(device)]
        slots = batch.page_table[rows, :longest]
        mask = None
        if int(lens.min()) < longest:
            mask = torch.arange(longest, device=device) < torch.from_numpy(lens).to(
                device
            ).unsqueeze(1)
            slots.masked_fill_(~mask, 0)
            mask = mask[:, None, None, :]
        tokens = None if everyone else torch.from_numpy(starts).to(device)
        return _Decodes(tokens, slots.reshape(-1), len(chosen), longest, mask)

    def _extend(self, batch: ForwardBatch, i: int, start: int) -> _Extend:
        cached, length = int(batch.cached_lens[i]), int(batch.device_lens[i])
        device = batch.page_table.device
        blocks: list[tuple[int, int, int, torch.Tensor | None]] = []
        if cached == 0:  # then the kernel knows the mask, and skips by itself
            blocks.append((start, start + length, length, None))
        else:
            for first in range(cached, length, QUERY_BLOCK):
                last = min(first + QUERY_BLOCK, length)
                queries = torch.arange(first, last, device=device).unsqueeze(1)
                mask = torch.arange(last, device=device) <= queries
                blocks.append((start + first - cached, start + last - cached, last, mask))
        slots = batch.page_table[batch.rows[i], :length]
        return _Extend(start, start + length - cached, slots, blocks)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        keys, values = pool.k(layer).flatten(1), pool.v(layer).flatten(1)
        kv_heads, head_dim = pool.k(layer).shape[1:]
        group = q.shape[1] // kv_heads
        out: torch.Tensor | None = None
        for d in batch.metadata.decodes:
            shape = (d.count, d.length, kv_heads, head_dim)
            k = keys.index_select(0, d.slots).view(shape).transpose(1, 2)
            v = values.index_select(0, d.slots).view(shape).transpose(1, 2)
            mine = q if d.tokens is None else q.index_select(0, d.tokens)
            # the query heads of one KV head stand where the queries of a prefill would
            mine = mine.reshape(d.count, kv_heads, group, head_dim)
            if d.mask is not None and d.mask.dtype == torch.bool:  # each layer would convert it
                d.mask = torch.zeros_like(d.mask, dtype=q.dtype).masked_fill_(~d.mask, -torch.inf)
            done = F.scaled_dot_product_attention(mine, k, v, attn_mask=d.mask)
            done = done.reshape(d.count, kv_heads * group, head_dim)
            if d.tokens is None:
                return done
            out = torch.empty_like(q) if out is None else out
            out.index_copy_(0, d.tokens, done)
        for e in batch.metadata.extends:
            # [kv_heads, group, keys, head_dim]: a stride of 0 over the group spares copies
            shape = (kv_heads, group, -1, head_dim)
            k = keys.index_select(0, e.slots).view(-1, kv_heads, 1, head_dim)
            v = values.index_select(0, e.slots).view(-1, kv_heads, 1, head_dim)
            k = k.permute(1, 2, 0, 3).expand(shape)
            v = v.permute(1, 2, 0, 3).expand(shape)
            out = torch.empty_like(q) if out is None else out
            for start, stop, seen, mask in e.blocks:
                mine = q[start:stop].view(-1, kv_heads, group, head_dim).permute(1, 2, 0, 3)
                done = F.scaled_dot_product_attention(
                    mine, k[:, :, :seen], v[:, :, :seen], attn_mask=mask, is_causal=mask is None
                )
                out[start:stop].view(-1, kv_heads, group, head_dim).copy_(done.permute(2, 0, 1, 3))
        return torch.empty_like(q) if out is None else out


def _buckets(lens: np.ndarray, chosen: np.ndarray) -> list[np.ndarray]:
    """Split the requests so that none is filled up to more than about twice its length."""
    if len(chosen) < 2:
        return [chosen] if len(chosen) else []
    ordered = chosen[np.argsort(-lens[chosen], kind="stable")]
    buckets: list[np.ndarray] = []
    while len(ordered):
        # below 128 tokens a call costs more than what it would save
        fits = int(np.count_nonzero(2 * lens[ordered] + 128 >= lens[ordered[0]]))
        buckets.append(np.sort(ordered[:fits]))
        ordered = ordered[fits:]
    return buckets
