"""The step benchmark measures what it says it does."""

from collections.abc import Sequence

import pytest

from minisgl.bench.steps import (
    WARM_UP_STEPS,
    NobodyListens,
    measure,
    running_scheduler,
    time_steps,
)
from minisgl.config import EngineConfig
from minisgl.messages import DetokenizeBatch, Message

CONFIG = EngineConfig(model="fake", max_running_requests=5, page_size=4, max_prefill_tokens=64)


class Counter(NobodyListens):
    tokens = 0

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        super().send(queue, batch)
        self.tokens += sum(len(m.rows()) for m in batch if isinstance(m, DetokenizeBatch))


@pytest.mark.parametrize("overlap", [True, False])
def test_each_timed_step_gives_every_request_a_token(overlap: bool) -> None:
    config = EngineConfig(model="fake", max_running_requests=5, overlap_scheduling=overlap)
    bus = Counter()
    scheduler = running_scheduler(config, 100, requests=5, steps=20, seed=0, bus=bus)
    scheduler.drain()
    before = bus.tokens
    times = time_steps(scheduler, 20)
    scheduler.drain()
    assert len(times) == 20 and min(times) > 0
    assert bus.tokens - before == 5 * (20 + WARM_UP_STEPS)


def test_the_requests_have_the_length_that_is_named() -> None:
    scheduler = running_scheduler(CONFIG, 300, requests=5, steps=20, seed=0, bus=NobodyListens())
    held = scheduler.table.device_len[:5]
    assert all(290 <= length <= 300 for length in held.tolist())


def test_the_report_has_each_length_and_the_growth_between_them() -> None:
    report = measure(CONFIG, (50, 200), requests=5, steps=20, seed=0)
    assert set(report["step_seconds"]) == {"50", "200"}
    medians = [report["step_seconds"][n]["p50"] for n in ("50", "200")]
    assert report["growth"] == pytest.approx(medians[1] / medians[0])
