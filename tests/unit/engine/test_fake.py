"""The engine that computes nothing."""

import time

import numpy as np

from minisgl.engine.fake import FakeEngine
from minisgl.engine.step import StepInput
from minisgl.messages import SamplingParams

NOTHING = np.empty(0, np.int32)


def engine(step_seconds: float = 0.0) -> FakeEngine:
    return FakeEngine(
        num_pages=8, page_size=1, max_seq_len=8, vocab_size=50, eos_token_ids=(3,),
        step_seconds=step_seconds,
    )  # fmt: skip


def step(*rows: int) -> StepInput:
    index, ones = np.array(rows, np.int64), np.ones(len(rows), np.int32)
    return StepInput(
        rows=index, cached_lens=ones, device_lens=ones, positions=index, input_index=index,
        out_loc=ones, output_index=index, output_pos=ones, samples=ones.astype(np.bool_),
        is_decode=True, wants_logprobs=False, slot_writes=None, token_writes=None,
    )  # fmt: skip


def test_a_step_is_over_at_a_whole_multiple_of_its_time_and_no_two_at_the_same() -> None:
    step_seconds = 0.02
    fake = engine(step_seconds)
    began = time.monotonic()
    outputs = [fake.forward(step(1)) for _ in range(3)]
    for output in outputs:
        output.wait()
    # The first is over at the next multiple; the others one after the other.
    third = (int(began / step_seconds) + 3) * step_seconds
    assert time.monotonic() >= third


def test_a_request_that_favours_tokens_gets_them_in_turn() -> None:
    fake = engine()
    fake.admit(2, SamplingParams(logit_bias={9: 100.0, 7: 100.0, 8: -5.0}), NOTHING, NOTHING)
    seen = [fake.forward(step(1, 2)).wait().tokens.tolist() for _ in range(4)]
    assert [tokens[1] for tokens in seen] in ([7, 9, 7, 9], [9, 7, 9, 7])
    assert len({tokens[0] for tokens in seen}) == 1


def test_a_released_row_favours_nothing_any_more() -> None:
    fake = engine()
    plain = fake.forward(step(2)).wait().tokens.tolist()
    fake.admit(2, SamplingParams(logit_bias={9: 100.0}), NOTHING, NOTHING)
    assert fake.forward(step(2)).wait().tokens.tolist() == [9]
    fake.release(2)
    assert fake.forward(step(2)).wait().tokens.tolist() == plain


def test_a_token_counts_the_ticks() -> None:
    step_seconds = 0.005
    fake = engine(step_seconds)
    fake.admit(1, SamplingParams(logit_bias=dict.fromkeys(range(10, 20), 1.0)), NOTHING, NOTHING)
    before = int(time.monotonic() / step_seconds)
    token = int(fake.forward(step(1)).wait().tokens[0])
    after = int(time.monotonic() / step_seconds)
    assert (token - 10) in {tick % 10 for tick in range(before + 1, after + 2)}
