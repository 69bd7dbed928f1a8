"""Which batch sizes of decode steps are captured as CUDA graphs."""

import bisect
from collections.abc import Sequence


def graph_sizes(limit: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, ... up to `limit`, which is always among them; none for 0."""
    sizes = [n for n in (1, 2, 4, *range(8, limit + 1, 8)) if n <= limit]
    if limit and sizes[-1] != limit:
        sizes.append(limit)
    return sizes


def prompt_sizes(limit: int) -> list[int]:
    """Tokens of steps with prompts that are captured: 32, 64, ... 512, and `limit` at most."""
    return [n for n in (32, 64, 128, 256, 512) if n <= limit]


def size_for(sizes: Sequence[int], requests: int) -> int | None:
    """The smallest of the rising `sizes` that holds so many requests; None if none does."""
    at = bisect.bisect_left(sizes, requests)
    return sizes[at] if at < len(sizes) else None
