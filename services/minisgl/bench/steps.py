"""Host time of one scheduler step, on an engine that computes nothing.

While a GPU computes a step of a few milliseconds, the host must be done with the next one; and
what the host does must not grow with the length of the sequences, or long contexts get slower.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.bench.stats import summary
from minisgl.config import EngineConfig, StartError
from minisgl.engine.fake import FakeEngine
from minisgl.messages import SamplingParams
from minisgl.scheduler.output import NullSink, OutputSink
from minisgl.scheduler.scheduler import Scheduler

VOCAB_SIZE = 151_936  # of Qwen3: some arrays of the scheduler are as long
WARM_UP_STEPS = 50


def running_scheduler(
    config: EngineConfig, length: int, requests: int, steps: int, seed: int, sink: OutputSink
) -> Scheduler:
    """A scheduler with `requests` decoding requests of about `length` tokens, none of which ends
    within `steps` steps.

    Raises `StartError` if it does not get there.
    """
    prompt_len = max(1, length - steps // 2)
    page_size = config.page_size or 1
    longest = prompt_len + WARM_UP_STEPS + steps + 1_000
    longest += -longest % page_size
    engine = FakeEngine(
        num_pages=requests * longest // page_size,
        page_size=page_size,
        max_seq_len=longest,
        vocab_size=VOCAB_SIZE,
    )
    scheduler = Scheduler(config, engine, sink)
    rng = np.random.default_rng(seed)
    for _ in range(requests):
        ids = rng.integers(0, VOCAB_SIZE, prompt_len, dtype=np.int32)
        scheduler.add(rng.bytes(16), ids, SamplingParams(temperature=0.6, ignore_eos=True))
    for _ in range(requests * (prompt_len // config.max_prefill_tokens + 2)):
        scheduler.step()
        if scheduler.running == requests and not len(scheduler.prefill):
            return scheduler
    raise StartError(f"{scheduler.running} of {requests} requests run; the others still wait")


def time_steps(scheduler: Scheduler, steps: int) -> list[float]:
    """Seconds of each of `steps` steps, after a few to warm up."""
    for _ in range(WARM_UP_STEPS):
        scheduler.step()
    gc.collect()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - start)
    return times


def measure(
    config: EngineConfig,
    lengths: Sequence[int],
    requests: int,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """Step times at each length; `growth` is the median at the longest over the shortest."""
    by_length = {}
    for length in lengths:
        scheduler = running_scheduler(config, length, requests, steps, seed, NullSink())
        by_length[length] = summary(time_steps(scheduler, steps))
        if scheduler.running != requests:
            raise StartError("requests ended or were retracted within the measurement")
        del scheduler
    shortest, longest = by_length[min(lengths)]["p50"], by_length[max(lengths)]["p50"]
    assert shortest is not None and longest is not None
    return {
        "requests": requests,
        "steps": steps,
        "page_size": config.page_size or 1,
        "overlap_scheduling": config.overlaps,
        "step_seconds": {str(n): figures for n, figures in by_length.items()},
        "growth": longest / shortest,
    }
