"""Log probabilities of the model's own distribution, of logits that nothing has changed yet."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobBatch:
    """The n requests of a batch that report log probabilities."""

    index: Tensor
    """[n] int64: places in the batch."""
    top: npt.NDArray[np.int64]
    """[n], on the host: how many of the most likely tokens each request asked for."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What came of them, on the device."""

    batch: LogprobBatch
    chosen: Tensor
    """[n] float32."""
    top_ids: Tensor
    """[n, most] int64: the most likely tokens, falling; the lower id first among equals."""
    top_logprobs: Tensor
    """[n, most] float32."""

    def queue_to_host(self) -> "Logprobs":
        """The same in host memory, once an event that follows on the current stream has come."""

        def down(tensor: Tensor) -> Tensor:
            return tensor.to("cpu", non_blocking=True)

        batch = LogprobBatch(down(self.batch.index), self.batch.top)
        return Logprobs(batch, down(self.chosen), down(self.top_ids), down(self.top_logprobs))

    def to_host(self) -> dict[int, TokenLogprobs]:
        """By place in the batch, for the wire. Waits for the device, if the tensors are there."""
        index = self.batch.index.tolist()
        chosen, ids, values = (
            self.chosen.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
        )
        return {
            place: TokenLogprobs(logprob=chosen[i], top_ids=ids[i][:n], top_logprobs=values[i][:n])
            for i, (place, n) in enumerate(zip(index, self.batch.top.tolist(), strict=True))
        }


def logprobs_of(logits: Tensor, tokens: Tensor, batch: LogprobBatch) -> Logprobs:
    """The log probabilities of `tokens` [B] under `logits` [B, V], and of the most likely ones."""
    values = torch.log_softmax(logits[batch.index], dim=1)
    chosen = values.gather(1, tokens[batch.index][:, None])[:, 0]
    most = min(int(batch.top.max(initial=0)), logits.shape[1])
    ids = stable_topk(values, most)
    return Logprobs(batch, chosen, ids, values.gather(1, ids))


def stable_topk(x: Tensor, n: int) -> Tensor:
    """Ids [B, n] of the n largest of each row of `x`, falling; the lower id first among equals."""
    if n == 0:
        return torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    look = min(n + 32, x.shape[1])
    values, ids = torch.topk(x, look, dim=1)
    # Logits that come from bfloat16 have many equals, and topk returns them in any order.
    ids, by_id = ids.sort(dim=1)
    values = values.gather(1, by_id)
    ids = ids.gather(1, values.sort(dim=1, descending=True, stable=True).indices)[:, :n]
    if look < x.shape[1]:
        unseen = x.gather(1, ids[:, -1:]) == values.amin(dim=1, keepdim=True)
        for row in torch.nonzero(unseen[:, 0]).flatten().tolist():
            ids[row] = x[row].sort(descending=True, stable=True).indices[:n]
    return ids
