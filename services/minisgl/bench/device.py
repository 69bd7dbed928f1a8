"""Times of kernels on a GPU: by events, in a CUDA graph, over more memory than the caches hold."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CACHE_TIMES = 4
"""The buffers that calls rotate over hold this many times the L2 cache, so each call misses it."""
MAX_SETS = 800
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """One kernel on data of one size."""

    size: str
    moved_bytes: int
    """What it must read and write at least."""
    make: Callable[[], tuple[Any, ...]]
    """New arguments on the device."""
    kernel: Callable[..., object] | None
    """None: it cannot be compiled here."""
    reference: Callable[..., object]
    """The same in torch operations, also on the result of `make`."""
    capturable: bool = True
    """The reference can be captured in a graph."""


def argument_sets(case: DeviceCase) -> list[tuple[Any, ...]]:
    """As many sets of arguments as it takes to leave the L2 cache."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    count = -(-CACHE_TIMES * l2 // max(case.moved_bytes, 1))
    return [case.make() for _ in range(min(max(count, 2), MAX_SETS))]


def time_on_device(
    call: Callable[..., object], sets: list[tuple[Any, ...]], seconds: float, *, graph: bool = True
) -> float:
    """Seconds of one call: the median of rounds that take about `seconds` together.

    With `graph`, launches are replayed, so that the host's speed does not matter.
    """

    def all_sets() -> list[object]:
        # Results are kept, or all would be written to the same place, and stay in the cache.
        return [call(*arguments) for arguments in sets]

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_sets()  # compiled and warm
        stream.synchronize()
        run: Callable[[], object] = all_sets
        results: list[object] = []
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                results = all_sets()
            run = captured.replay
        once = _seconds(run, 1)
        count = max(1, int(seconds / ROUNDS / max(once, 1e-7)))
        # a slow call is not repeated for the sake of a median
        times = ROUNDS if once < seconds else 1
        rounds = sorted(_seconds(run, count) / count for _ in range(times))
    torch.cuda.current_stream().wait_stream(stream)
    results.clear()
    return rounds[times // 2] / len(sets)


def _seconds(run: Callable[[], object], count: int) -> float:
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_ceiling(seconds: float) -> float:
    """Bytes per second, read and written, of a large copy within the device's memory.

    The faster of a copy that the driver does and one that a kernel does.
    """
    source = torch.empty(1 << 29, dtype=torch.int16, device="cuda")
    target = torch.empty_like(source)
    source.random_()
    ways = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
    took = min(time_on_device(way, [()], seconds, graph=False) for way in ways)
    return 2 * source.nbytes / took
