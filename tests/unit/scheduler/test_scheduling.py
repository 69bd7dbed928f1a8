"""Single behaviours of the scheduler, each on an engine that checks every slot it would read."""

import numpy as np
import pytest

from minisgl.messages import SamplingParams

from .harness import World
from .model_engine import expected

A = [2, 3, 4, 5, 6, 7, 8, 9, 10]
B = [11, 12, 13, 14, 15]


def _rows(world: World) -> dict[bytes, int]:
    return {r.uid: r.row for r in world.scheduler.table.reqs if r is not None}


def _batches(world: World) -> list[list[int]]:
    """From now on, the rows of each step."""
    seen: list[list[int]] = []
    forward = world.engine.forward

    def watched(step):  # type: ignore[no-untyped-def]
        seen.append(step.rows.tolist())
        return forward(step)

    world.engine.forward = watched  # type: ignore[method-assign]
    return seen


# --- prefix cache ------------------------------------------------------------------------------


def test_two_equal_prompts_in_one_batch_end_up_on_the_same_pages() -> None:
    world = World(page_size=4, num_pages=20, overlap_scheduling=False, max_prefill_tokens=64)
    first = world.add(A, max_tokens=8, ignore_eos=True)
    second = world.add(A, max_tokens=8, ignore_eos=True)
    world.step()
    rows, table = _rows(world), world.scheduler.table
    shared = table.page_table[rows[first], :8]
    assert np.array_equal(shared, table.page_table[rows[second], :8])
    # Three pages each were computed; two of the second one's are free again.
    assert world.scheduler.cache.free_pages == 20 - 4
    width = table.max_seq_len
    world.run()
    device = world.engine.page_table[rows[second] * width : rows[second] * width + 8]
    assert np.array_equal(device, shared), "the device still refers to the freed pages"
    world.verify()


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_token_waits_for_the_next_step_only_while_a_device_computes_it(synchronous: bool) -> None:
    world = World(synchronous=synchronous)
    uid = world.add(A[:3], max_tokens=3, ignore_eos=True)
    seen = []
    while not world.scheduler.idle:
        world.step()
        seen.append(len(world.sink.answers[uid].tokens))
    assert seen == ([1, 2, 3] if synchronous else [0, 1, 2, 3])
    world.verify()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_repeated_prompt_is_cached_but_for_its_last_token(overlap: bool) -> None:
    world = World(page_size=1, num_pages=60, overlap_scheduling=overlap)
    world.add(A, max_tokens=1)
    world.run()
    before = world.engine.tokens_computed
    world.add(A, max_tokens=1)
    world.run()
    assert world.engine.tokens_computed - before == 1


def test_a_conversation_finds_prompt_and_answer_in_the_cache() -> None:
    world = World(page_size=1, num_pages=60)
    uid = world.add(A, max_tokens=6, ignore_eos=True)
    world.run()
    answer = world.sink.answers[uid].tokens
    before = world.engine.tokens_computed
    world.add([*A, *answer, *B], max_tokens=1)
    world.run()
    # The answer's last token was never an input, so its keys and values are not there.
    assert world.engine.tokens_computed - before == len(B) + 1


def test_the_naive_cache_computes_everything_again() -> None:
    world = World(page_size=1, num_pages=60, cache_type="naive")
    for _ in range(2):
        world.add(A, max_tokens=1)
        world.run()
    assert world.engine.tokens_computed == 2 * len(A)


def test_a_locked_prefix_is_not_evicted_for_another_request() -> None:
    world = World(page_size=1, num_pages=24, max_seq_len=24)
    first = world.add(A, max_tokens=10, ignore_eos=True)
    world.step()
    second = world.add(B, max_tokens=9, ignore_eos=True)
    world.step()
    assert second not in _rows(world), "there is room for one of them only"
    world.run()
    assert len(world.sink.answers[first].tokens) == 10
    world.verify()


# --- order -------------------------------------------------------------------------------------


def test_requests_start_in_the_order_in_which_they_came() -> None:
    world = World(max_running_requests=1)
    uids = [world.add([2 + i] * 3, max_tokens=2, ignore_eos=True) for i in range(4)]
    order = []
    while not world.scheduler.idle:
        world.step()
        order += [u for u in _rows(world) if u not in order]
    assert order == uids


def test_a_higher_priority_starts_first_and_equal_ones_in_order() -> None:
    world = World(max_running_requests=1)
    low = world.add([2] * 3, max_tokens=2, ignore_eos=True, priority=-1)
    normal = [world.add([3 + i] * 3, max_tokens=2, ignore_eos=True) for i in range(2)]
    high = world.add([9] * 3, max_tokens=2, ignore_eos=True, priority=5)
    order = []
    while not world.scheduler.idle:
        world.step()
        order += [u for u in _rows(world) if u not in order]
    assert order == [high, *normal, low]


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    world = World(page_size=1, num_pages=30, max_seq_len=30, overlap_scheduling=False)
    world.add(A, max_tokens=12, ignore_eos=True)
    world.step()
    large = world.add([20] * 12, max_tokens=10, ignore_eos=True)
    small = world.add([21], max_tokens=1, ignore_eos=True)
    while not world.sink.answers[small].ends:
        assert large in _rows(world) or small not in _rows(world)
        world.step()
    world.run()
    world.verify()


def test_a_decode_batch_stands_in_the_order_of_acceptance() -> None:
    """Not of uids, which are random: kernels that share the work of a batch out depend on it."""
    world = World(max_running_requests=9, num_pages=80)
    uids = [world.add([2 + i], max_tokens=9, ignore_eos=True) for i in range(6)]
    batches = _batches(world)
    world.run()
    decode = [b for b in batches if len(b) == 6][-1]
    assert sorted(uids) != uids, "the uids of this test must not be in order by chance"
    by_row = dict(zip(batches[0], uids, strict=True))
    assert [by_row[row] for row in decode] == uids


# --- admission, length, chunks -----------------------------------------------------------------


def test_a_request_that_does_not_fit_waits_until_pages_are_freed() -> None:
    world = World(page_size=1, num_pages=20, max_seq_len=20, overlap_scheduling=False)
    first = world.add(A, max_tokens=8, ignore_eos=True)
    second = world.add(B, max_tokens=8, ignore_eos=True)
    world.step()
    assert _rows(world).keys() == {first} and world.scheduler.waiting == 1
    while not world.sink.answers[first].ends:
        world.step()
    world.step()
    assert _rows(world).keys() == {second}
    world.run()
    assert world.scheduler.retractions == 0
    world.verify()


def test_a_prompt_that_leaves_no_room_is_refused_with_both_lengths() -> None:
    world = World(page_size=1, num_pages=100, max_seq_len=32)
    uid = world.add([2] * 32)
    error = world.sink.answers[uid].error
    assert error is not None and error.status == 400 and error.code == "context_length_exceeded"
    assert "32 tokens" in error.message and "limit is 32" in error.message
    assert world.scheduler.idle


def test_the_limit_is_what_the_cache_can_hold_when_that_is_less() -> None:
    world = World(page_size=4, num_pages=3, max_seq_len=64)
    assert world.scheduler.max_model_len == 12
    assert world.sink.answers[world.add([2] * 12)].error is not None
    uid = world.add([2] * 11)
    world.run()
    assert len(world.sink.answers[uid].tokens) == 1
    world.verify()


def test_max_tokens_beyond_the_room_ends_with_length() -> None:
    world = World(max_seq_len=16)
    uid = world.add(A, max_tokens=1000, ignore_eos=True)
    world.run()
    assert len(world.sink.answers[uid].tokens) == 16 - len(A)
    assert world.sink.answers[uid].ends == ["length"]


def test_an_id_outside_of_the_vocabulary_is_refused() -> None:
    world = World()
    for prompt in ([2, 50], [-1]):
        error = world.sink.answers[world.add(prompt)].error
        assert error is not None and error.param == "prompt" and "0 and 49" in error.message
    error = world.sink.answers[world.add([2], logit_bias={50: 1.0})].error
    assert error is not None and error.param == "logit_bias"


def test_a_mixed_step_decodes_and_prefills_at_once() -> None:
    world = World(schedule="mixed", max_prefill_tokens=6, overlap_scheduling=False)
    world.add(B, max_tokens=9, ignore_eos=True)
    world.step()
    batches = _batches(world)
    world.add(A, max_tokens=3, ignore_eos=True)
    world.step()
    assert len(batches[0]) == 2, "the running request waited for the new prompt"
    world.run()
    world.verify()


@pytest.mark.parametrize("schedule", ["separate", "mixed"])
def test_a_step_never_computes_more_tokens_than_its_budget(schedule: str) -> None:
    world = World(schedule=schedule, max_prefill_tokens=5)
    sizes, forward = [], world.engine.forward

    def watched(step):  # type: ignore[no-untyped-def]
        sizes.append(len(step.positions))
        return forward(step)

    world.engine.forward = watched  # type: ignore[method-assign]
    for prompt in (A, B, A[::-1]):
        world.add(prompt, max_tokens=9, ignore_eos=True)
    world.run()
    assert max(sizes) == 5
    world.verify()


def test_a_long_prompt_holds_up_decoding_when_prefill_comes_first() -> None:
    world = World(schedule="separate", max_prefill_tokens=4, overlap_scheduling=False)
    world.add(B, max_tokens=9, ignore_eos=True)
    world.step()
    world.step()
    batches = _batches(world)
    world.add(A, max_tokens=3, ignore_eos=True)
    for _ in range(3):
        world.step()
    assert [len(b) for b in batches] == [1, 1, 1], "three chunks, and no decode among them"
    world.run()
    world.verify()


# --- retraction --------------------------------------------------------------------------------


def test_the_youngest_request_is_retracted_and_ends_with_the_same_output() -> None:
    world = World(page_size=1, num_pages=24, max_seq_len=24, reserve_tokens=1)
    old = world.add(A[:6], max_tokens=14, ignore_eos=True)
    young = world.add(B, max_tokens=14, ignore_eos=True)
    lost = False
    while not world.scheduler.idle:
        world.step()
        if young not in _rows(world) and not world.sink.answers[young].ends:
            lost = lost or old in _rows(world)
    assert lost and world.scheduler.retractions > 0
    world.verify()


def test_full_reservations_never_retract() -> None:
    world = World(page_size=1, num_pages=24, max_seq_len=24, reserve_tokens=1000)
    for prompt in (A[:6], B, A, [30, 31]):
        world.add(prompt, max_tokens=12, ignore_eos=True)
    world.run()
    assert world.scheduler.retractions == 0
    world.verify()


# --- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["separate", "mixed"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", range(14))
def test_an_abort_at_any_stage_frees_the_request_once(
    stage: int, overlap: bool, schedule: str
) -> None:
    world = World(page_size=2, max_prefill_tokens=4, overlap_scheduling=overlap, schedule=schedule)
    other = world.add(B, max_tokens=7, ignore_eos=True)
    uid = world.add(A, max_tokens=6, ignore_eos=True)
    for _ in range(stage):
        world.step()
    world.abort(uid)
    world.abort(uid)
    world.run()
    world.verify()
    assert len(world.sink.answers[other].tokens) == 7


def test_an_abort_of_another_run_of_the_request_does_nothing() -> None:
    world = World()
    uid = world.add(A, max_tokens=3, ignore_eos=True)
    held = next(iter(world.scheduler.held()))
    assert not world.scheduler.abort(uid, held.run + 1)
    world.run()
    world.verify()


def test_a_stop_id_ends_the_output_as_an_eos_does_also_with_ignore_eos() -> None:
    whole = expected(A, SamplingParams(max_tokens=8, ignore_eos=True), 50)
    world = World()
    uid = world.add(A, max_tokens=8, ignore_eos=True, stop_token_ids=(whole[3],))
    world.run()
    answer = world.sink.answers[uid]
    assert answer.tokens == whole[: whole.index(whole[3]) + 1] and answer.ends == ["stop"]


# --- replays -----------------------------------------------------------------------------------


def _replay(world: World, uid: bytes, output: list[int], attempt: int, **sampling: object):  # type: ignore[no-untyped-def]
    world.sink.answers[uid].tokens[:] = output
    pending = world.scheduler.add(
        uid,
        np.array(A, np.int32),
        SamplingParams(**sampling),  # type: ignore[arg-type]
        attempt=attempt,
        output_ids=np.array(output, np.int32),
    )
    world.check()
    return pending


def test_a_replay_goes_on_after_the_tokens_that_arrived() -> None:
    world = World(overlap_scheduling=False)
    uid = world.add(A, max_tokens=8, ignore_eos=True)
    for _ in range(4):
        world.step()
    got = list(world.sink.answers[uid].tokens)
    assert 0 < len(got) < 8
    world.sink.answers[uid].ends.clear()
    _replay(world, uid, got[:2], 2, max_tokens=8, ignore_eos=True)
    assert world.sink.answers[uid].ends == ["abort"], "the earlier attempt still runs"
    world.sink.answers[uid].ends.clear()
    world.run()
    world.verify()


def test_an_attempt_that_is_not_newer_is_dropped() -> None:
    world = World()
    uid = world.add(A, max_tokens=4, ignore_eos=True)
    assert _replay(world, uid, [], 1, max_tokens=4, ignore_eos=True) is None
    world.run()
    world.verify()


def test_a_replay_of_a_complete_output_is_answered_with_its_end() -> None:
    for sampling, reason in (({"max_tokens": 5}, "length"), ({"max_tokens": 30}, "stop")):
        world = World()
        uid = world.add([7], max_tokens=1)
        world.run()
        answer = world.sink.answers[uid]
        answer.ends.clear()
        output = [2, 3, 4, 5, 6] if reason == "length" else [2, 3, 1]
        _replay(world, uid, output, 2, **sampling)
        assert answer.ends == [reason] and world.scheduler.idle
