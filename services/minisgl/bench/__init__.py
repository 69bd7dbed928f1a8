"""Benchmarks: `minisgl bench offline`, `serve`, `bus` and `kernels`.

Each module offers `add_arguments(parser)` and `run(args) -> exit code`.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end the block with an exception, so that what it started is stopped.

    The commands of a service turn them into a flag for their loop; a benchmark has no such loop.
    """
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
