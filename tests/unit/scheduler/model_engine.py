"""A fake engine that knows what a real one would read: it finds every wrong slot and stale token.

Its KV "buffer" holds, for each slot, the token and the position that were written there. Before it
answers a step it reads each request's whole history through its own copies of the page table and
the token pool, as attention would, and compares. The next token is a hash of that history, so the
output of a request is known beforehand (`expected`), whatever the batches it goes through.
"""

import numpy as np

from minisgl.engine.fake import Ready
from minisgl.engine.step import Int32s, StepEngine, StepInput, StepOutput, StepResult
from minisgl.messages import SamplingParams

VOCAB = 50
EOS = 1


def next_token(history: np.ndarray, salt: int = 0) -> int:
    """Any token but 0, and the EOS about once in fifty. Another salt is another model."""
    h = 2166136261 ^ salt
    for token in history[-6:].tolist():
        h = (h ^ (token + 1)) * 16777619 % 2**32
    return 1 + (h + len(history)) % (VOCAB - 1)


def expected(prompt: list[int], sampling: SamplingParams, room: int) -> list[int]:
    """The output of a request, computed alone."""
    ids, out = list(prompt), []
    limit = min(sampling.max_tokens or room, room)
    while len(out) < limit:
        token = next_token(np.array(ids))
        ids.append(token)
        out.append(token)
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            break
    return out


class _Late:
    """A step whose result must not be known before somebody waits for it."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def wait(self) -> StepResult:
        return self._result


class ModelEngine(StepEngine):
    def __init__(self, num_pages: int, page_size: int, max_seq_len: int, max_running: int) -> None:
        self.num_pages, self.page_size, self.max_seq_len = num_pages, page_size, max_seq_len
        self.vocab_size, self.eos_token_ids = VOCAB, (EOS,)
        self.page_table = np.full((max_running + 1) * max_seq_len, -1, np.int64)
        self.token_pool = np.full((max_running + 1) * max_seq_len, -1, np.int64)
        slots = num_pages * page_size
        self.kv_token = np.full(slots, -1, np.int64)
        self.kv_position = np.full(slots, -1, np.int64)
        self.admitted: dict[int, tuple[list[int], list[int]]] = {}
        self.salt = 0
        self.steps = 0
        self.tokens_computed = 0

    def admit(
        self, row: int, sampling: SamplingParams, prompt_ids: Int32s, output_ids: Int32s
    ) -> None:
        assert row not in self.admitted, f"row {row} is taken twice"
        self.admitted[row] = (prompt_ids.tolist(), output_ids.tolist())

    def release(self, row: int) -> None:
        del self.admitted[row]

    def forward(self, step: StepInput) -> StepOutput:
        self.steps += 1
        self.tokens_computed += len(step.positions)
        for table, writes in (
            (self.page_table, step.slot_writes),
            (self.token_pool, step.token_writes),
        ):
            if writes is not None:
                assert len(np.unique(writes.index)) == len(writes.index), "a place written twice"
                table[writes.index] = writes.values
        assert len(set(step.rows.tolist())) == len(step.rows), "a row twice in one batch"
        assert len(set(step.out_loc.tolist())) == len(step.out_loc), "two tokens in one slot"
        self.kv_token[step.out_loc] = self.token_pool[step.input_index]
        self.kv_position[step.out_loc] = step.positions
        assert int((step.device_lens - step.cached_lens).sum()) == len(step.positions)
        tokens = np.zeros(len(step.rows), np.int64)
        for i, (row, length) in enumerate(
            zip(step.rows.tolist(), step.device_lens.tolist(), strict=True)
        ):
            assert row in self.admitted, f"row {row} is computed but not admitted"
            start = row * self.max_seq_len
            slots = self.page_table[start : start + length]
            history = self.kv_token[slots]
            assert (self.kv_position[slots] == np.arange(length)).all(), "keys of other positions"
            pool = self.token_pool[start : start + length]
            assert (history == pool).all(), "keys of other tokens"
            tokens[i] = next_token(history, self.salt)
            if step.samples[i]:
                prompt, _ = self.admitted[row]
                assert step.output_pos[i] == length - len(prompt), "wrong position of the draw"
        self.token_pool[step.output_index] = tokens
        return _Late(StepResult(tokens)) if step.is_decode else Ready(StepResult(tokens))
