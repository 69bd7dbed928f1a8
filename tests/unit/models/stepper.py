"""Runs a model step by step without scheduler and engine, as tests need it."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from minisgl.attention.base import AttentionBackend, ForwardBatch
from minisgl.attention.torch_backend import TorchBackend
from minisgl.distributed import Communicator, SingleRank
from minisgl.kvcache.pool import KVPool
from minisgl.layers.sharding import head_shard
from minisgl.models.config import load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import load_weights

CPU = torch.device("cpu")
ROWS, LENGTH = 6, 256


def make_batch(work: list[tuple[int, list[int], int]], page_table: torch.Tensor) -> ForwardBatch:
    """The batch of (row, new tokens, cached tokens) for each request."""
    news = [len(tokens) for _, tokens, _ in work]
    cached = np.array([c for _, _, c in work], np.int32)
    positions = torch.tensor([c + i for _, t, c in work for i in range(len(t))])
    rows = torch.tensor([row for row, _, _ in work])
    by_token = rows.repeat_interleave(torch.tensor(news))
    return ForwardBatch(
        input_ids=torch.tensor([token for _, tokens, _ in work for token in tokens]),
        positions=positions,
        out_loc=page_table[by_token, positions].long(),
        rows=rows,
        page_table=page_table,
        cached_lens=cached,
        device_lens=cached + np.array(news, np.int32),
        last_indices=torch.tensor(news).cumsum(0) - 1,
        is_decode=all(n == 1 for n in news),
    )


@dataclass
class Stepper:
    """One rank's model with a pool whose pages are dealt out in random order."""

    folder: Path
    comm: Communicator = field(default_factory=SingleRank)
    page_size: int = 1
    backend: AttentionBackend = field(default_factory=TorchBackend)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        config = load_model_config(self.folder)
        self.model = CausalLM(config, self.dtype, self.comm, CPU)
        load_weights(self.model, self.folder, CPU)
        heads = head_shard(config.num_heads, config.num_kv_heads, self.comm.rank, self.comm.size)
        pages = ROWS * LENGTH // self.page_size
        self.pool = KVPool(
            layers=config.num_layers, pages=pages, page_size=self.page_size,
            kv_heads=heads.kv.local, head_dim=config.head_dim, dtype=self.dtype, device=CPU,
        )  # fmt: skip
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(5))
        slots = order.unsqueeze(1) * self.page_size + torch.arange(self.page_size)
        self.page_table = slots.reshape(ROWS, LENGTH).int()

    def step(self, *work: tuple[int, list[int], int]) -> torch.Tensor:
        """Logits [B, vocab] after one step of (row, new tokens, cached tokens)."""
        batch = make_batch(list(work), self.page_table)
        with torch.inference_mode():
            self.backend.prepare_metadata(batch)
            return self.model.forward(batch, self.backend, self.pool)
