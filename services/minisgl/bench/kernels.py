"""`minisgl bench kernels`: time and bandwidth of each kernel, beside its reference.

Kernels of the host first; where there is a GPU, its kernels follow, with their share of what a
copy within the device's memory reaches.
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

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
    share_of_copy: float | None = None
    """Of the rate at which the device copies; None on the host."""


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
"""By name: the cases of each kernel of the host."""
DEVICE_NAMES = (
    "embedding", "store-kv", "add-rms-norm", "qk-rope-store", "silu-and-mul", "decode-inputs",
    "skinny-linear", "wide-linear", "tuned-linear", "sample", "filter-bounds",
)  # fmt: skip
"""Those of `device_kernels`, which imports torch."""
NAMES = (*KERNELS, *DEVICE_NAMES)


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
        help=f"only this one, may be repeated: {', '.join(NAMES)} (default: all that run here)",
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
    """Measure and report; 0. Raises `UsageError` for a kernel that does not exist or run here."""
    for name in args.kernel or ():
        if name not in NAMES:
            raise UsageError(f"--kernel must be one of {', '.join(NAMES)}, not {name!r}")
        if name in DEVICE_NAMES and not _has_gpu():
            raise UsageError(f"--kernel {name} needs an NVIDIA GPU that torch can use")
    names = args.kernel or (NAMES if _has_gpu() else tuple(KERNELS))
    timings: list[Timing] = []
    figures: dict[str, Any] = {"host": platform.machine()}
    heads = f"{'kernel':<18}{'size':<16}{'microseconds':>13}{'reference':>13}{'GB/s':>9}"
    print(heads + ("  % of copy" if _has_gpu() else ""))
    with ending_on_signals():
        for name in names:
            if name in KERNELS:
                for case in KERNELS[name]():
                    took = time_call(case.kernel, args.seconds)
                    reference = time_call(case.reference, args.seconds)
                    timing = Timing(name, case.size, took, reference, case.moved_bytes / took)
                    timings.append(_shown(timing))
            else:
                if "copy_bytes_per_second" not in figures:
                    figures |= _device_figures(args.seconds)
                ceiling = figures["copy_bytes_per_second"]
                for timing in _device_timings(name, ceiling, args.seconds):
                    timings.append(_shown(timing))
    if args.json:
        write_json(args.json, {**figures, "kernels": [asdict(timing) for timing in timings]})
    return 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _device_figures(seconds: float) -> dict[str, Any]:
    import torch

    from minisgl.bench.device import copy_ceiling

    ceiling = copy_ceiling(seconds)
    print(f"{'copy':<18}{'1 GiB':<16}{'':>26}{ceiling / 1e9:>9.2f}{100:>11.1f}", flush=True)
    return {"device": torch.cuda.get_device_name(), "copy_bytes_per_second": ceiling}


def _device_timings(name: str, ceiling: float, seconds: float) -> Iterator[Timing]:
    """Of one kernel of the device, on all its sizes. Raises `UsageError` if it does not compile."""
    from minisgl.bench.device import argument_sets, time_on_device
    from minisgl.bench.device_kernels import DEVICE_KERNELS

    for case in DEVICE_KERNELS[name]():
        if case.kernel is None:
            raise UsageError(f"--kernel {name} cannot be compiled here: see the warning")
        sets = argument_sets(case)
        took = time_on_device(case.kernel, sets, seconds)
        reference = time_on_device(
            case.reference, sets if case.capturable else sets[:1], seconds, graph=case.capturable
        )
        rate = case.moved_bytes / took
        yield Timing(name, case.size, took, reference, rate, rate / ceiling)


def _shown(timing: Timing) -> Timing:
    share = "" if timing.share_of_copy is None else f"{100 * timing.share_of_copy:>11.1f}"
    print(
        f"{timing.kernel:<18}{timing.size:<16}{timing.seconds * 1e6:>13.3f}"
        f"{timing.reference_seconds * 1e6:>13.3f}{timing.bytes_per_second / 1e9:>9.2f}{share}",
        flush=True,
    )
    return timing
