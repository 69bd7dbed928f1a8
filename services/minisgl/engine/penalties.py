"""What the requests with penalties or biases have said so far, on the device.

A request gets a slot when it is admitted, and only if it needs one: `counts[slot, token]` are its
output tokens, `prompt[slot, token]` whether the prompt holds a token. Sampled tokens are counted
on the device, because the host does not know them yet when the next step is queued.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.engine.staging import upload

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PenaltyBatch:
    """The n requests of a batch that have penalties."""

    index: Tensor
    """[n] int64: places in the batch."""
    slots: Tensor
    """[n] int64."""
    draws: Tensor
    """[n] int32: 1, or 0 for a chunk whose sample is dropped."""
    weights: Tensor
    """[3, n] float32: presence, frequency and repetition penalty."""
    repeats: bool
    """Some request has a repetition penalty."""


class PenaltyState:
    """The slots; their number doubles when they run out.

    Not thread-safe. On a GPU all calls must be made on the stream of the forward pass: a slot is
    used again at once, which is safe because earlier steps are queued before.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._free: list[int] = []
        self._slot_of: dict[int, int] = {}

    def admit(self, row: int, prompt_ids: Ids, output_ids: Ids) -> None:
        """Remember the ids of a request that has penalties; earlier output counts as output."""
        self.release(row)
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slot_of[row] = slot
        prompt = upload(np.array(prompt_ids, np.int64), self._device)
        output = upload(np.array(output_ids, np.int64), self._device)
        self._prompt[slot].zero_()
        self._prompt[slot, prompt] = True
        one = self._counts.new_ones(1).expand(len(output))
        self._counts[slot].zero_().index_add_(0, output, one)

    def release(self, row: int) -> None:
        """Forget the row, if it had a slot."""
        slot = self._slot_of.pop(row, None)
        if slot is not None:
            self._free.append(slot)

    def slots(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """The slots [n] of rows that were admitted."""
        return np.array([self._slot_of[row] for row in rows.tolist()], np.int64)

    def apply(self, logits: Tensor, batch: PenaltyBatch) -> None:
        """Change the rows of `logits` [B, V] that have penalties, in place."""
        # One row after the other on a CPU, where it then stays in the cache: four times as fast.
        n = len(batch.slots)
        places = torch.arange(n, device=logits.device)
        for part in torch.split(places, 1 if logits.is_cpu else n):
            presence, frequency, repetition = batch.weights[:, part, None].unbind(0)
            slots, index = batch.slots[part], batch.index[part]
            counts = self._counts[slots]
            said = counts > 0
            x = logits[index]
            if batch.repeats:
                repeated = torch.where(x > 0, x / repetition, x * repetition)
                x = torch.where(said | self._prompt[slots], repeated, x)
            logits[index] = x.sub_(frequency * counts).sub_(presence * said)

    def count(self, tokens: Tensor, batch: PenaltyBatch) -> None:
        """Add the step's tokens [B] to the output of the requests that drew one."""
        place = (batch.slots, tokens[batch.index])
        self._counts.index_put_(place, batch.draws, accumulate=True)

    def _grow(self) -> None:
        old = len(self._counts)
        new = max(4, 2 * old)
        for name in ("_counts", "_prompt"):
            before: Tensor = getattr(self, name)
            after = before.new_zeros((new, self._vocab_size))
            after[:old] = before
            setattr(self, name, after)
        self._free.extend(range(new - 1, old - 1, -1))


@dataclass(frozen=True, slots=True)
class BiasBatch:
    """The biases of a batch, all requests after each other."""

    index: Tensor
    """[m] int64: places in the batch."""
    tokens: Tensor
    """[m] int64."""
    values: Tensor
    """[m] float32."""

    def apply(self, logits: Tensor) -> None:
        """Add the biases to `logits` [B, V], in place. No place occurs twice."""
        logits[self.index, self.tokens] += self.values


class BiasState:
    """The biases of the running requests, uploaded once for each."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._of_row: dict[int, tuple[Tensor, Tensor]] = {}

    def admit(self, row: int, bias: Mapping[int, float]) -> None:
        """Remember a request's biases. `ValueError` names a token that the model does not have."""
        wrong = [token for token in bias if not 0 <= token < self._vocab_size]
        if wrong:
            raise ValueError(
                f"logit_bias names token {wrong[0]}, but the model has tokens 0 to "
                f"{self._vocab_size - 1}"
            )
        self._of_row[row] = (
            upload(np.array(list(bias), np.int64), self._device),
            upload(np.array(list(bias.values()), np.float32), self._device),
        )

    def release(self, row: int) -> None:
        """Forget the row, if it had biases."""
        self._of_row.pop(row, None)

    def batch(self, index: npt.NDArray[np.integer], rows: npt.NDArray[np.integer]) -> BiasBatch:
        """The biases of `rows`, which stand at the places `index` of the batch."""
        of_rows = [self._of_row[row] for row in rows.tolist()]
        places = np.repeat(index, [len(tokens) for tokens, _ in of_rows])
        return BiasBatch(
            index=upload(places.astype(np.int64), self._device),
            tokens=torch.cat([tokens for tokens, _ in of_rows]),
            values=torch.cat([values for _, values in of_rows]),
        )
