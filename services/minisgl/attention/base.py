"""What attention needs to know of one step, and the interface of its backends."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from minisgl.kvcache.pool import KVPool


@dataclass(slots=True)
class ForwardBatch:
    """One step as the model sees it: B requests with T new tokens in all.

    Request i computes the positions `cached_lens[i]` to `device_lens[i]`; its new tokens stand
    together, and requests stand in order. Decode is the special case of one new token each.
    """

    input_ids: torch.Tensor
    """[T] int64 on the device."""
    positions: torch.Tensor
    """[T] int64 on the device: each token's place in its sequence."""
    out_loc: torch.Tensor
    """[T] int64 on the device: the KV slot that each new token is written to."""
    rows: torch.Tensor
    """[B] int64 on the device: each request's row of the page table."""
    page_table: torch.Tensor
    """[rows, max_seq_len] int32 on the device: the KV slot of each position."""
    cached_lens: npt.NDArray[np.int32]
    """[B] on the host: tokens with keys and values before this step."""
    device_lens: npt.NDArray[np.int32]
    """[B] on the host: tokens with keys and values after this step."""
    last_indices: torch.Tensor
    """[B] int64 on the device: index into the T tokens of each request's last one."""
    is_decode: bool
    """Every request has exactly one new token."""
    metadata: Any = None
    """What the backend's `prepare_metadata` made for its `forward`."""


class AttentionBackend(ABC):
    """Paged causal attention of one kind of kernel.

    `forward` is called once a layer, after the layer's new keys and values were stored.
    """

    @abstractmethod
    def prepare_metadata(self, batch: ForwardBatch) -> None:
        """Fill `batch.metadata`, once a step."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, layer: int, pool: "KVPool", batch: ForwardBatch
    ) -> torch.Tensor:
        """Attention of the new tokens over all tokens of their requests.

        q is [T, local_heads, head_dim]; so is the result. Keys and values come from `pool`.
        """
