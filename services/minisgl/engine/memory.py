"""How many pages the KV cache gets."""

from collections.abc import Sequence

from minisgl.config import StartError

MAX_SPREAD = 2 * 2**30
"""Bytes by which the free memory of ranks may differ: more means that something else runs there."""


def plan_pages(
    *,
    free_before: Sequence[int],
    sharing: Sequence[int],
    model_bytes: Sequence[int],
    activation_bytes: int,
    memory_ratio: float,
    page_bytes: int,
    most: int,
) -> int:
    """Pages that every rank can hold: the fullest one decides.

    Of each rank: `free_before` is what it saw before any rank loaded, `sharing` how many ranks saw
    that same memory, `model_bytes` what its part of the model took. `most` are the pages that all
    requests together could need. Raises `StartError` if the ranks differ by more than 2 GiB, or if
    not one page is left.
    """
    spread = max(free_before) - min(free_before)
    if spread > MAX_SPREAD:
        low, high = free_before.index(min(free_before)), free_before.index(max(free_before))
        raise StartError(
            f"rank {low} has {_gib(min(free_before))} free and rank {high} "
            f"{_gib(max(free_before))}: ranks must have equally much; end what else runs on the "
            f"device or host of rank {low}, or set --num-pages"
        )
    shares = [free // ranks for free, ranks in zip(free_before, sharing, strict=True)]
    budgets = [
        int(memory_ratio * share) - model - activation_bytes
        for share, model in zip(shares, model_bytes, strict=True)
    ]
    pages = min(budgets) // page_bytes
    if pages < 1:
        worst = budgets.index(min(budgets))
        raise StartError(
            f"no memory is left for the KV cache: rank {worst} has {_gib(shares[worst])} "
            f"free, of which --memory-ratio {memory_ratio:g} may be used; the model takes "
            f"{_gib(model_bytes[worst])}, activations {_gib(activation_bytes)}. Use a higher "
            f"--memory-ratio, lower --max-prefill-tokens or --max-running-requests, more ranks or "
            f"a smaller model"
        )
    return min(pages, most)


def pages_for_requests(max_running: int, max_seq_len: int, page_size: int) -> int:
    """Pages that so many requests of the longest length hold."""
    return max_running * -(-max_seq_len // page_size)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
