"""`minisgl bench kernels`: time and bandwidth of each kernel, beside its reference."""

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from minisgl.bench import ending_on_signals
from minisgl.bench.arguments import output_file, positive
from minisgl.bench.stats import write_json
from minisgl.config import UsageError
from minisgl_kernels import radix


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on data of one size."""

    size: str
    moved_bytes: int
    """What it must read and write at least."""
    kernel: Callable[[], object]
    reference: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, best of several rounds, and bytes per second of the kernel."""

    kernel: str
    size: str
    seconds: float
    reference_seconds: float
    bytes_per_second: float


def radix_compare() -> Iterator[Case]:
    """Two equal arrays of token ids: the compare has to read all of both."""
    compare = radix.compare_function()
    for n in (16, 256, 4096, 65536):
        a = np.arange(n, dtype=np.int32)
        b = a.copy()
        yield Case(
            f"{n} ids",
            a.nbytes + b.nbytes,
            partial(compare, a, b),
            partial(radix.common_prefix_len_reference, a, b),
        )


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {"radix-compare": radix_compare}
"""By name: the cases of each kernel that runs on this kind of machine."""


def time_call(call: Callable[[], object], seconds: float, rounds: int = 5) -> float:
    """Seconds of one call: the best mean of `rounds`, which take about `seconds` together."""
    call()
    count, took = 1, 0.0
    while took < seconds / rounds / 4 and count < 1 << 30:
        count *= 2
        took = _repeat(call, count)
    return min(_repeat(call, count) for _ in range(rounds)) / count


def _repeat(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--kernel",
        action="append",
        metavar="NAME",
        help=f"only this one, may be repeated: {', '.join(KERNELS)} (default: all)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=0.5,
        help="time for each measurement, in seconds (default: 0.5)",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures to this file"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0. Raises `UsageError` for a kernel that does not exist."""
    names = args.kernel or list(KERNELS)
    for name in names:
        if name not in KERNELS:
            raise UsageError(f"--kernel must be one of {', '.join(KERNELS)}, not {name!r}")
    timings = []
    print(f"{'kernel':<20}{'size':<16}{'microseconds':>13}{'reference':>13}{'GB/s':>9}")
    with ending_on_signals():
        for name in names:
            for case in KERNELS[name]():
                took = time_call(case.kernel, args.seconds)
                reference = time_call(case.reference, args.seconds)
                timing = Timing(name, case.size, took, reference, case.moved_bytes / took)
                timings.append(timing)
                print(
                    f"{name:<20}{case.size:<16}{took * 1e6:>13.3f}{reference * 1e6:>13.3f}"
                    f"{timing.bytes_per_second / 1e9:>9.2f}",
                    flush=True,
                )
    if args.json:
        write_json(
            args.json,
            {"host": platform.machine(), "kernels": [asdict(timing) for timing in timings]},
        )
    return 0
