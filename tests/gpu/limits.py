"""What devices allow at best, as docs/performance.md counts it.

A decode step reads the weights that it needs once, or computes its products where that takes
longer, and then reads all keys and values of its requests; a prefill computes. Several ranks share
all of it evenly and talk for nothing.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minisgl.bench.offline import WORKLOADS, requests
from minisgl.models.config import ModelConfig, load_model_config

READ_BYTES_PER_SECOND = 4.1e12
FLOPS_PER_SECOND = 750e12
WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True)
class Limit:
    """The least seconds of a workload."""

    prefill_seconds: float
    decode_seconds: float
    decoded_tokens: int
    output_tokens: int

    @property
    def output_tokens_per_second(self) -> float:
        """Of prefill and decoding together."""
        return self.output_tokens / (self.prefill_seconds + self.decode_seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """From where every request has its first token."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else None


@dataclass(frozen=True, slots=True)
class _Model:
    """Weights by what reads them, and arithmetic."""

    config: ModelConfig

    @property
    def head(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    @property
    def attention(self) -> int:
        """Of all layers."""
        c = self.config
        return c.num_layers * c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)

    @property
    def expert(self) -> int:
        """Of one expert in all layers; of a dense model its MLP."""
        c = self.config
        width = c.moe.intermediate_size if c.moe else c.intermediate_size
        return c.num_layers * 3 * c.hidden_size * width

    def experts_read(self, tokens: float) -> float:
        """How many experts of a layer so many tokens choose, if they choose at random."""
        moe = self.config.moe
        if moe is None:
            return 1.0
        return moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens)

    def read(self, tokens: float) -> float:
        """Bytes of weights that a step of so many tokens reads."""
        weights = self.head + self.attention + self.expert * self.experts_read(tokens)
        return WEIGHT_BYTES * weights

    def flops(self, tokens: float, sampled: float, attended: float) -> float:
        """`attended` is the sum, over the new tokens, of the tokens that each attends to."""
        c = self.config
        each = 1 if c.moe is None else c.moe.experts_per_token
        products = tokens * (self.attention + each * self.expert) + sampled * self.head
        return 2 * products + 4 * attended * c.num_layers * c.num_heads * c.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * WEIGHT_BYTES


def limit(folder: Path, workload: str, ranks: int = 1) -> Limit:
    """Of a workload of `minisgl bench offline` with seed 0."""
    model = _Model(load_model_config(folder))
    prompts, sampling = requests(WORKLOADS[workload], model.config.vocab_size, 0.0, 0)
    lengths = np.array([len(prompt) for prompt in prompts], np.float64)
    outputs = np.array([params.max_tokens for params in sampling])
    count = len(prompts)
    tokens = lengths.sum()
    computed = model.flops(tokens, count, (lengths * (lengths + 1) / 2).sum()) / FLOPS_PER_SECOND
    prefill = max(computed, model.read(tokens) / READ_BYTES_PER_SECOND)
    decode = 0.0
    for step in range(1, int(outputs.max())):  # the first token comes with the prompt
        runs = outputs > step
        context = (lengths[runs] + step).sum()
        weights = model.read(runs.sum()) / READ_BYTES_PER_SECOND
        products = model.flops(runs.sum(), runs.sum(), 0) / FLOPS_PER_SECOND
        decode += max(weights, products) + context * model.kv_bytes / READ_BYTES_PER_SECOND
    return Limit(prefill / ranks, decode / ranks, int(outputs.sum()) - count, int(outputs.sum()))
