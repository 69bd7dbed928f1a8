"""An engine that computes nothing, to time and to test everything around it."""

import time

import numpy as np

from minisgl.engine.step import Index, Int32s, StepEngine, StepInput, StepOutput, StepResult
from minisgl.messages import SamplingParams


class Ready:
    """The output of a step that is over once CLOCK_MONOTONIC shows `due` seconds."""

    def __init__(self, result: StepResult, due: float = 0.0) -> None:
        self._result = result
        self._due = due

    def wait(self) -> StepResult:
        left = self._due - time.monotonic() if self._due else 0.0
        if left > 0:
            time.sleep(left)
        return self._result


class FakeEngine(StepEngine):
    """Answers each step at once with tokens that follow from position and row alone.

    With `step_seconds` a step takes so long, as on a device, and is over at a tick: when
    CLOCK_MONOTONIC shows a whole multiple of that time. A request that favours tokens by
    `logit_bias` gets those only: at tick k the one at place k modulo their number, by falling bias
    and rising id. So a client on this host sees in a token when it was due.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_seq_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        step_seconds: float = 0.0,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        ids = np.setdiff1d(np.arange(vocab_size), np.array(eos_token_ids, np.int64))
        if not len(ids):
            raise ValueError("a vocabulary of end-of-sequence tokens only")
        self._plain = ids
        self._step_seconds = step_seconds
        self._tick = 0
        self._favoured: dict[int, Index] = {}

    def admit(
        self, row: int, sampling: SamplingParams, prompt_ids: Int32s, output_ids: Int32s
    ) -> None:
        bias = sampling.logit_bias or {}
        favoured = sorted((token for token in bias if bias[token] > 0), key=lambda t: (-bias[t], t))
        if favoured:
            self._favoured[row] = np.array(favoured, np.int64)

    def release(self, row: int) -> None:
        self._favoured.pop(row, None)

    def forward(self, step: StepInput) -> StepOutput:
        self._tick += 1
        due = 0.0
        if self._step_seconds:
            self._tick = max(self._tick, int(time.monotonic() / self._step_seconds) + 1)
            due = self._tick * self._step_seconds
        choice = (step.output_pos * 7919 + step.rows * 31) % len(self._plain)
        tokens = self._plain[choice]
        if self._favoured:
            for i, row in enumerate(step.rows.tolist()):
                favoured = self._favoured.get(row)
                if favoured is not None:
                    tokens[i] = favoured[self._tick % len(favoured)]
        return Ready(StepResult(tokens), due)
