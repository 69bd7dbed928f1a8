"""Random operations against the whole scheduler; after each one every page must have one owner."""

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .harness import World

OPERATIONS = int(os.environ.get("MINISGL_RANDOM_OPERATIONS", "12000"))


def _settings(r: random.Random) -> dict[str, object]:
    page_size = r.choice([1, 1, 2, 4, 8])
    capacity = r.choice([24, 48, 120, 400])
    return {
        "page_size": page_size,
        "num_pages": max(2, capacity // page_size),
        "max_seq_len": r.choice([16, 61, 64]),
        "max_running_requests": r.choice([1, 2, 4, 9]),
        "max_prefill_tokens": r.choice([1, 2, 3, 7, 16, 64]),
        "cache_type": r.choice(["radix", "radix", "radix", "naive"]),
        "overlap_scheduling": r.choice([True, True, False]),
        "schedule": r.choice(["separate", "separate", "mixed"]),
        "reserve_tokens": r.choice([1, 3, 10, 1000]),
    }


def _prompt(r: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    stem = r.choice(stems)
    tail = [r.randrange(2, 6) for _ in range(r.randrange(0, 12))]
    return (stem[: r.randrange(len(stem) + 1)] + tail)[:longest] or [2]


def _play(seed: int, operations: int) -> int:
    """One scheduler with random settings and random operations; returns the retractions."""
    r = random.Random(seed)
    world = World(**_settings(r))
    stems = [[r.randrange(2, 6) for _ in range(r.randrange(1, 40))] for _ in range(3)]
    uids: list[bytes] = []
    for _ in range(operations):
        choice = r.random()
        if choice < 0.25:
            # Now and then longer than anything that fits: it must be refused, not forgotten.
            longest = world.scheduler.max_model_len + r.choice([-2, -2, -2, 2])
            uids.append(
                world.add(
                    _prompt(r, stems, longest),
                    max_tokens=r.choice([None, 1, 2, 3, 8, 30]),
                    ignore_eos=r.random() < 0.5,
                    stop_token_ids=tuple(r.sample(range(50), r.choice([0, 0, 5]))),
                    priority=r.choice([0, 0, 0, 1, -1]),
                )
            )
        elif choice < 0.33 and uids:
            world.abort(r.choice(uids[-12:]))
        else:
            world.step()
    world.run()
    world.verify()
    return world.scheduler.retractions


def test_random_operations_never_lose_a_page_or_a_request() -> None:
    retractions = sum(_play(seed, 60) for seed in range(OPERATIONS // 60))
    assert retractions > 0, "the runs never came to the point where a request is retracted"


@pytest.mark.slow
def test_long_lives_never_lose_a_page_or_a_request() -> None:
    for seed in range(1000, 1004):
        _play(seed, 1500)


@settings(
    max_examples=25,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
class _Machine(RuleBasedStateMachine):
    """The same with hypothesis in control: it shrinks what fails to a few operations."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(2, 20),
        budget=st.integers(1, 9),
        overlap=st.booleans(),
        mixed=st.booleans(),
        reserve=st.sampled_from([1, 1000]),
        naive=st.booleans(),
    )
    def start(
        self, page_size: int, pages: int, budget: int, overlap: bool, mixed: bool, reserve: int,
        naive: bool,
    ) -> None:  # fmt: skip
        self.uids: list[bytes] = []
        self.world = World(
            num_pages=pages,
            page_size=page_size,
            max_seq_len=32,
            max_running_requests=3,
            max_prefill_tokens=budget,
            overlap_scheduling=overlap,
            schedule="mixed" if mixed else "separate",
            reserve_tokens=reserve,
            cache_type="naive" if naive else "radix",
        )

    @rule(
        prompt=st.lists(st.integers(2, 4), min_size=1, max_size=20),
        max_tokens=st.sampled_from([None, 1, 2, 5]),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int | None, ignore_eos: bool) -> None:
        self.uids.append(self.world.add(prompt, max_tokens=max_tokens, ignore_eos=ignore_eos))

    @precondition(lambda self: self.uids)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        self.world.abort(self.uids[which % len(self.uids)])

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()
            self.world.verify()


TestHypothesisMachine = _Machine.TestCase


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_both_loops_and_all_schedules_give_the_same_outputs(seed: int) -> None:
    r = random.Random(seed)
    prompts = [[r.randrange(2, 6) for _ in range(r.randrange(1, 30))] for _ in range(6)]
    limits = [r.randrange(1, 20) for _ in prompts]
    answers = []
    for overlap in (True, False):
        for schedule in ("separate", "mixed"):
            for chunk in (3, 1000):
                world = World(
                    overlap_scheduling=overlap, schedule=schedule, max_prefill_tokens=chunk
                )
                uids = [world.add(p, max_tokens=n) for p, n in zip(prompts, limits, strict=True)]
                world.run()
                world.verify()
                answers.append([world.sink.answers[u].tokens for u in uids])
    assert all(a == answers[0] for a in answers)
