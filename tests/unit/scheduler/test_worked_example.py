"""The example that explains the engine: 12 prompt tokens, pages of 4, 8 cached, 3 to generate."""

from collections.abc import Iterator

import numpy as np
import pytest

from .harness import World

PREFIX = [2, 3, 4, 5, 6, 7, 8, 9]
PROMPT = [*PREFIX, 10, 11, 12, 13]


class Watched:
    """Keeps every step that the engine was given."""

    def __init__(self, world: World) -> None:
        self.steps = []
        self._forward = world.engine.forward
        world.engine.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, step):  # type: ignore[no-untyped-def]
        self.steps.append(step)
        return self._forward(step)


def _world(**config: object) -> tuple[World, Watched, bytes]:
    world = World(page_size=4, num_pages=20, overlap_scheduling=False, **config)
    # One output token: its prompt, two whole pages, is left in the tree.
    world.add([*PREFIX, 40], max_tokens=1, ignore_eos=True)
    world.run()
    assert world.scheduler.cache.prefix.evictable == 8
    steps = Watched(world)
    uid = world.add(PROMPT, max_tokens=3, ignore_eos=True)
    return world, steps, uid


def _lengths(world: World, uid: bytes) -> tuple[int, int, int]:
    req = next(r for r in world.scheduler.table.reqs if r is not None and r.uid == uid)
    return req.cached_len, req.device_len, req.max_device_len


@pytest.fixture
def example() -> Iterator[tuple[World, Watched, bytes]]:
    yield _world()


def test_the_worked_example_step_by_step(example: tuple[World, Watched, bytes]) -> None:
    world, watched, uid = example
    cache = world.scheduler.cache
    free = cache.free_pages

    # Prefill: positions 0 to 7 refer to the cached slots, 8 to 11 are computed into one new page.
    world.step()
    step = watched.steps[0]
    assert step.positions.tolist() == [8, 9, 10, 11]
    assert (step.cached_lens.tolist(), step.device_lens.tolist()) == ([8], [12])
    page = int(step.out_loc[0])
    assert page % 4 == 0 and step.out_loc.tolist() == [page, page + 1, page + 2, page + 3]
    assert free - cache.free_pages == 1
    assert _lengths(world, uid) == (12, 13, 15)
    row = int(step.rows[0])
    width = world.engine.max_seq_len
    assert step.input_index.tolist() == [row * width + p for p in (8, 9, 10, 11)]
    assert step.output_index.tolist() == [row * width + 12]
    # The prompt is three whole pages: all of it is in the tree now, and locked.
    assert cache.prefix.protected == 12

    # Decode x at position 12: the three pages are full, so a fourth is taken.
    world.step()
    step = watched.steps[1]
    assert step.is_decode and step.positions.tolist() == [12]
    assert free - cache.free_pages == 2
    assert _lengths(world, uid) == (13, 14, 15)
    x = int(world.engine.token_pool[step.input_index[0]])
    assert world.sink.answers[uid].tokens[0] == x

    # Decode y at position 13: the same page. Its sample is the third token and the last.
    world.step()
    step = watched.steps[2]
    assert step.positions.tolist() == [13] and step.out_loc[0] == watched.steps[1].out_loc[0] + 1
    assert free - cache.free_pages == 1, "the page with two tokens was given back"
    assert cache.prefix.evictable == 12 and cache.prefix.protected == 0
    assert len(world.sink.answers[uid].tokens) == 3
    world.run()
    assert len(watched.steps) == 3
    world.verify()


def test_the_worked_example_in_chunks_of_two() -> None:
    world, watched, uid = _world(max_prefill_tokens=2)
    cache = world.scheduler.cache

    world.step()
    first = watched.steps[0]
    assert first.positions.tolist() == [8, 9] and first.samples.tolist() == [False]
    assert first.output_index.tolist() == [world.scheduler.table.dummy_row * 64]
    assert world.sink.answers[uid].tokens == [], "the sample of a chunk is dropped"
    assert cache.prefix.protected == 8, "the cached prefix stays locked between chunks"
    assert _lengths(world, uid) == (10, 10, 15)

    world.step()
    second = watched.steps[1]
    assert second.positions.tolist() == [10, 11] and second.samples.tolist() == [True]
    assert second.rows.tolist() == first.rows.tolist(), "the same row of the tables"
    assert second.out_loc.tolist() == [first.out_loc[0] + 2, first.out_loc[0] + 3]
    assert _lengths(world, uid) == (12, 13, 15)
    world.run()
    world.verify()
    assert [len(s.positions) for s in watched.steps] == [2, 2, 1, 1]


def test_a_chunked_prompt_gives_the_output_of_a_whole_one_at_every_chunk_size() -> None:
    outputs = []
    for size in range(1, 14):
        world, _, uid = _world(max_prefill_tokens=size)
        world.run()
        world.verify()
        outputs.append(world.sink.answers[uid].tokens)
    assert all(np.array_equal(o, outputs[0]) for o in outputs)
