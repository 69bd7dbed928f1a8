"""From logits to the next tokens.

In this order: biases, then penalties, on the model's logits; then the most likely token for greedy
requests, and for the others temperature, top_k, top_p, min_p, and a draw with the noise of
`philox`. Whatever no request of a batch needs is not computed. A request's tokens do not depend on
the others of its batch, to the bit.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl.engine import sampling_table as table_
from minisgl.engine.draw import DrawBatch, draw
from minisgl.engine.filters import Ranks
from minisgl.engine.logprobs import LogprobBatch, Logprobs, logprobs_of
from minisgl.engine.penalties import BiasBatch, BiasState, PenaltyBatch, PenaltyState
from minisgl.engine.sampling_table import SamplingTable
from minisgl.engine.staging import upload
from minisgl.messages import SamplingParams
from minisgl_kernels.sampling import EachRow, gumbel_draw_function

Ids = npt.NDArray[np.int32]
Rows = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the requests of one batch need; made before the forward pass is queued."""

    draw: DrawBatch | None
    """None: all are greedy."""
    penalties: PenaltyBatch | None
    bias: BiasBatch | None
    logprobs: LogprobBatch | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of one step, on the device."""

    tokens: Tensor
    """[B] int64."""
    logprobs: Logprobs | None


class Sampler:
    """Chooses the next tokens, and remembers what penalties need. One for each rank.

    Not thread-safe: `prepare` and `sample` of a batch are called in turn, and on a GPU all on the
    stream of the forward pass.
    """

    def __init__(self, vocab_size: int, device: torch.device | str, max_rows: int) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self.table = SamplingTable(max_rows)
        self._penalties = PenaltyState(vocab_size, self._device)
        self._biases = BiasState(vocab_size, self._device)
        self.threads: EachRow | None = None
        """What shares the rows of a batch among threads on a CPU; None: one draws for all."""
        if self._device.type == "cpu":
            gumbel_draw_function()  # compiled now, and not in the first step that draws

    @torch.inference_mode()
    def admit(self, row: int, params: SamplingParams, prompt_ids: Ids, output_ids: Ids) -> None:
        """A request takes `row`. `output_ids` are those of earlier attempts or before a retraction.

        Raises `ValueError` if `logit_bias` names a token that the model does not have.
        """
        self.release(row)
        if params.logit_bias:
            self._biases.admit(row, params.logit_bias)
        self.table.set(row, params)
        if self.table.needs[row] & table_.PENALTY:
            self._penalties.admit(row, prompt_ids, output_ids)

    def release(self, row: int) -> None:
        """The row is free. No step that is prepared later may hold its request."""
        self.table.clear(row)
        self._penalties.release(row)
        self._biases.release(row)

    @torch.inference_mode()
    def prepare(
        self,
        rows: Rows,
        positions: Rows,
        draws: npt.NDArray[np.bool_] | None = None,
    ) -> SamplingBatch:
        """What the requests in `rows` [B] need for their next token.

        `positions` [B] are the output tokens of each request before it, over all attempts.
        `draws` [B] is False for a chunk, whose token is dropped: it counts for no penalty
        and reports no log probabilities.
        """
        table = self.table
        needs = table.needs[rows]
        union = int(np.bitwise_or.reduce(needs, initial=0))
        draw = self._prepare_draw(rows, positions, needs, union) if union & table_.SAMPLED else None
        penalties = bias = logprobs = None
        if union & table_.PENALTY:
            index = np.flatnonzero(needs & table_.PENALTY)
            of = rows[index]
            real = np.ones(len(index), np.int32) if draws is None else draws[index]
            penalties = PenaltyBatch(
                index=self._upload(index),
                slots=self._upload(self._penalties.slots(of)),
                draws=self._upload(real.astype(np.int32)),
                weights=self._upload(
                    np.stack([table.presence[of], table.frequency[of], table.repetition[of]])
                ),
                repeats=bool((table.repetition[of] != 1).any()),
            )
        if union & table_.BIAS:
            index = np.flatnonzero(needs & table_.BIAS)
            bias = self._biases.batch(index, rows[index])
        if union & table_.LOGPROBS:
            reports = needs & table_.LOGPROBS != 0
            index = np.flatnonzero(reports if draws is None else reports & draws)
            if len(index):
                logprobs = LogprobBatch(self._upload(index), table.logprobs[rows[index]])
        return SamplingBatch(draw, penalties, bias, logprobs)

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """The next token of each row of `logits` [B, V]. The logits may be changed."""
        raw = logits = logits.float()
        if batch.penalties is not None or batch.bias is not None:
            if batch.logprobs is not None:
                logits = logits.clone()  # log probabilities are of the model's own logits
            if batch.bias is not None:
                batch.bias.apply(logits)
            if batch.penalties is not None:
                self._penalties.apply(logits, batch.penalties)
        tokens = _most_likely(logits)
        if batch.draw is not None:
            if batch.draw.index is None:
                tokens = draw(logits, tokens, batch.draw, self.threads)
            else:
                index = batch.draw.index
                tokens[index] = draw(logits[index], tokens[index], batch.draw, self.threads)
        if batch.penalties is not None:
            self._penalties.count(tokens, batch.penalties)
        logprobs = None
        if batch.logprobs is not None:
            logprobs = logprobs_of(raw, tokens, batch.logprobs)
        return Sampled(tokens, logprobs)

    def _prepare_draw(
        self, rows: Rows, positions: Rows, needs: npt.NDArray[np.uint8], union: int
    ) -> DrawBatch:
        table = self.table
        drawing = needs & table_.SAMPLED != 0
        index = None
        if not drawing.all():
            places = np.flatnonzero(drawing)
            index = self._upload(places)
            rows, positions, needs = rows[places], positions[places], needs[places]
        top_k = top_p = min_p = ranks = None
        k = np.where(needs & table_.TOP_K, table.top_k[rows], self._vocab_size)
        k = np.where(k < self._vocab_size, k, table_.NO_TOP_K)
        if union & table_.TOP_K:
            top_k = self._upload(k)
        if union & table_.TOP_P:
            top_p = self._upload(table.top_p[rows])
        if union & (table_.TOP_K | table_.TOP_P):
            p = np.where(needs & table_.TOP_P, table.top_p[rows], 1.0)
            ranks = Ranks.of(k, p, self._vocab_size, self._upload)
        if union & table_.MIN_P:
            min_p = self._upload(table.min_p[rows])
        return DrawBatch(
            index=index,
            temperature=self._upload(table.temperature[rows]),
            seeds=self._upload(table.seed[rows]),
            positions=self._upload(positions.astype(np.int64)),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            ranks=ranks,
        )

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return upload(array, self._device)


def _most_likely(logits: Tensor) -> Tensor:
    """The first of the largest logits of each row, [B] int64."""
    if logits.device.type == "cpu":  # ten times as fast as torch's here
        return torch.from_numpy(logits.detach().numpy().argmax(axis=1))
    return logits.argmax(dim=1)
