"""Sampling parameters of the running requests as columns: one entry a row of the page table.

A step gathers the rows of its batch from these arrays, so its cost on the host does not grow with
Python work for each request. Nothing here imports torch.
"""

import numpy as np

from minisgl.messages import SamplingParams

# What a row asks for beyond the most likely token. Each batch skips what none of its rows needs.
SAMPLED = 1
"""The row draws; without it, it takes the most likely token."""
TOP_K = 2
TOP_P = 4
MIN_P = 8
PENALTY = 16
BIAS = 32
LOGPROBS = 64
LIMITS = TOP_K | TOP_P | MIN_P
NO_TOP_K = 2**31 - 1
"""One limit that lets everything pass, above the width of any row of logits."""

MIN_TEMPERATURE = 1e-6
MIN_TOP_P = 1e-6
"""One token always reaches it, in a vocabulary of up to a million tokens."""


class SamplingTable:
    """The columns, each of `max_rows` entries. A cleared row takes the most likely token."""

    def __init__(self, max_rows: int) -> None:
        self.needs = np.zeros(max_rows, np.uint8)
        """The constants above, or-ed. Filters are only set where the row draws."""
        self.temperature = np.ones(max_rows, np.float32)
        """At least MIN_TEMPERATURE."""
        self.top_k = np.zeros(max_rows, np.int64)
        """Meaningful where `needs` has TOP_K; at least 2."""
        self.top_p = np.ones(max_rows, np.float64)
        self.min_p = np.zeros(max_rows, np.float64)
        self.seed = np.zeros(max_rows, np.int64)
        self.presence = np.zeros(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.repetition = np.ones(max_rows, np.float32)
        self.logprobs = np.zeros(max_rows, np.int64)
        """How many of the most likely tokens to report; meaningful where `needs` has LOGPROBS."""

    def set(self, row: int, params: SamplingParams) -> None:
        """Enter a request. Without a seed it gets 0: the same on every rank, whatever else.

        A request whose filters leave one token is greedy, so that it takes the same token as a
        greedy one, ties included: top_k 1, min_p 1, or a top_p that the first token reaches.
        """
        needs = 0
        if (
            params.temperature > 0
            and params.top_k != 1
            and params.min_p < 1
            and params.top_p > MIN_TOP_P
        ):
            needs |= SAMPLED
            needs |= TOP_K if params.top_k > 1 else 0
            needs |= TOP_P if params.top_p < 1 else 0
            needs |= MIN_P if params.min_p > 0 else 0
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
            needs |= PENALTY
        needs |= BIAS if params.logit_bias else 0
        needs |= LOGPROBS if params.logprobs is not None else 0
        self.needs[row] = needs
        self.temperature[row] = max(params.temperature, MIN_TEMPERATURE)
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed or 0
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = params.repetition_penalty
        self.logprobs[row] = params.logprobs or 0

    def clear(self, row: int) -> None:
        """The row is free: it needs nothing, as a padding row of a batch."""
        self.needs[row] = 0
