"""An engine that computes nothing, to time and to test everything around it."""

import numpy as np

from minisgl.engine.step import Int32s, StepEngine, StepInput, StepOutput, StepResult
from minisgl.messages import SamplingParams


class Ready:
    """The output of a step that is over."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class FakeEngine(StepEngine):
    """Answers each step at once with tokens that follow from position and row alone."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_seq_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
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

    def admit(
        self, row: int, sampling: SamplingParams, prompt_ids: Int32s, output_ids: Int32s
    ) -> None:
        pass

    def release(self, row: int) -> None:
        pass

    def forward(self, step: StepInput) -> StepOutput:
        choice = (step.output_pos * 7919 + step.rows * 31) % len(self._plain)
        return Ready(StepResult(self._plain[choice]))
