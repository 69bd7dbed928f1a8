"""Host time of one scheduler step, on an engine that computes nothing.

All that rank 0 does for a step is timed, to the encoded entry for the detokenizer. While a GPU
computes a step of a few milliseconds, the host must be done with the next one; and
what the host does must not grow with the length of the sequences, or long contexts get slower.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl.bench.stats import summary
from minisgl.bus import Bus
from minisgl.bus.base import Entry
from minisgl.config import EngineConfig, StartError
from minisgl.engine.fake import FakeEngine
from minisgl.messages import Message, Route, SamplingParams, WorkerState, encode
from minisgl.scheduler.replies import ReplySink
from minisgl.scheduler.scheduler import Scheduler

VOCAB_SIZE = 151_936  # of Qwen3: some arrays of the scheduler are as long
WARM_UP_STEPS = 50


class NobodyListens(Bus):
    """Encodes what is sent, as every bus must, and drops it."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        """Bytes of each entry."""

    def subscribe(self, queue: str) -> None:
        pass

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        self.sent.append(len(encode(batch)))

    def receive(self, timeout: float) -> list[Entry]:
        return []

    def ack(self, entries: Sequence[Entry]) -> None:
        pass

    def publish_state(self, state: WorkerState) -> None:
        pass

    def read_states(self) -> list[WorkerState]:
        return []

    def close(self) -> None:
        pass


def running_scheduler(
    config: EngineConfig,
    length: int,
    requests: int,
    steps: int,
    seed: int,
    bus: Bus,
    vocab_size: int = VOCAB_SIZE,
) -> Scheduler:
    """A scheduler with `requests` decoding requests of about `length` tokens, none of which ends
    within `steps` steps. It sends their tokens to `bus`, as rank 0 does.

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
        vocab_size=vocab_size,
    )
    sink = ReplySink(bus, "g0", 1, config.max_running_requests + 1)
    scheduler = Scheduler(config, engine, sink)
    sink.scheduler = scheduler
    route = Route(gateway="0", boot=1, detokenizer="0")
    rng = np.random.default_rng(seed)
    for _ in range(requests):
        ids = rng.integers(0, vocab_size, prompt_len, dtype=np.int32)
        sampling = SamplingParams(temperature=0.6, ignore_eos=True)
        scheduler.add(rng.bytes(16), ids, sampling, route=route)
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
    vocab_size: int = VOCAB_SIZE,
) -> dict[str, Any]:
    """Step times at each length; `growth` is the median at the longest over the shortest."""
    by_length = {}
    for length in lengths:
        scheduler = running_scheduler(
            config, length, requests, steps, seed, NobodyListens(), vocab_size
        )
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
