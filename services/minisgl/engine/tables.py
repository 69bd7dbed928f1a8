"""The device's copies of the page table and the token pool."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl.engine.step import Index, StepInput
from minisgl.kvcache.pool import zeros


@dataclass(frozen=True, slots=True)
class Tables:
    """Both are [max_running + 1, max_seq_len] int32. The last row is the dummy one.

    Its slots are all the first one of the dummy page, its tokens those that chunks sampled in vain.
    """

    pages: torch.Tensor
    tokens: torch.Tensor
    flat_pages: torch.Tensor
    flat_tokens: torch.Tensor
    dummy_slot: int

    @classmethod
    def make(cls, rows: int, width: int, device: torch.device) -> "Tables":
        """The tables, the dummy row not filled yet. `StartError` names the flags if they are too
        large."""
        purpose = "tables; use a lower --max-running-requests or --max-seq-len"
        pages = zeros((rows, width), torch.int32, device, purpose)
        tokens = zeros((rows, width), torch.int32, device, purpose)
        return cls(pages, tokens, pages.view(-1), tokens.view(-1), 0)

    def with_dummy_slot(self, slot: int) -> "Tables":
        """The same tables, whose dummy row refers to `slot`."""
        self.pages[-1] = slot
        return Tables(self.pages, self.tokens, self.flat_pages, self.flat_tokens, slot)

    @property
    def dummy_row(self) -> int:
        """The row that fills batches up."""
        return self.pages.shape[0] - 1

    @property
    def width(self) -> int:
        """Columns: the longest sequence in tokens."""
        return self.pages.shape[1]

    def dummy_step(self, cached: npt.ArrayLike, device: npt.ArrayLike) -> StepInput:
        """A step of requests with these lengths that all have the dummy row: to warm up and to
        measure. All write to one slot, so what it computes means nothing."""
        before, after = np.asarray(cached, np.int32), np.asarray(device, np.int32)
        count, row = len(before), self.dummy_row
        positions: Index = np.concatenate(
            [np.arange(*ends) for ends in zip(before, after, strict=True)]
        )
        return StepInput(
            rows=np.full(count, row, np.int64),
            cached_lens=before,
            device_lens=after,
            positions=positions,
            input_index=row * self.width + positions,
            out_loc=np.full(len(positions), self.dummy_slot, np.int32),
            output_index=np.full(count, row * self.width, np.int64),
            output_pos=np.zeros(count, np.int32),
            samples=np.ones(count, np.bool_),
            is_decode=len(positions) == count,
            wants_logprobs=False,
            slot_writes=None,
            token_writes=None,
        )
