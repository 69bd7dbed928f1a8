"""One system under measurement: a command that prints a line of JSON for each cell of a grid."""

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM_UP_TOKENS = 8
"""Output tokens of the run of a cell that comes before the one that counts."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Failed(Exception):
    """A system could not be measured; the text says why, in one line."""

    def __init__(self, why: str, killed_by: int | None = None) -> None:
        super().__init__(why)
        self.killed_by = killed_by
        """The signal that ended its process, if one did."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """So many sequences at a time, all with prompts of this length."""

    batch: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured: all batches with all lengths, and the output tokens of each sequence."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    output_tokens: int

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Each once, in the order in which they are measured."""
        return tuple(
            Cell(batch, context)
            for context, batch in itertools.product(self.contexts, self.batches)
        )

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and what is generated after it."""
        return max(self.contexts) + self.output_tokens


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one run of a cell."""

    prefill: float
    """Until every sequence has its first token."""
    decode: float
    """From there until every sequence has `output_tokens` more."""


Reader = Callable[[dict[str, Any]], tuple[Cell, Times] | None]
"""The cell and its times in an object that the system printed; None for any other object."""


def read_worker(line: dict[str, Any]) -> tuple[Cell, Times] | None:
    """What `compare.worker` prints."""
    if not {"batch", "prompt_tokens", "prefill_seconds", "decode_seconds"} <= line.keys():
        return None
    cell = Cell(line["batch"], line["prompt_tokens"])
    return cell, Times(line["prefill_seconds"], line["decode_seconds"])


@dataclass(frozen=True, slots=True)
class Contender:
    """How a system is run."""

    name: str
    version: str
    weights: str
    """Their type, such as `bfloat16` or `Q8_0`."""
    command: tuple[str, ...]
    read: Reader = read_worker
    environment: Mapping[str, str] = field(default_factory=dict)

    attempts: int = 1
    """Runs, if one ends well but does not print every cell."""

    def measure(self, cells: Sequence[Cell], seconds: float) -> dict[Cell, Times]:
        """The times of all cells. Raises `Failed` if it crashes, takes longer or leaves one out."""
        for _ in range(self.attempts):
            output = run_command(self.command, self.environment, seconds)
            found = dict(pair for line in output.objects if (pair := self.read(line)) is not None)
            missing = [cell for cell in cells if cell not in found]
            if not missing:
                return {cell: found[cell] for cell in cells}
        first = missing[0]
        raise Failed(
            f"it printed no times for batch {first.batch} with prompts of {first.prompt_tokens} "
            "tokens"
        )


@dataclass(frozen=True, slots=True)
class Output:
    """What a process that ended well has printed."""

    text: str
    errors: str

    @property
    def objects(self) -> Iterator[dict[str, Any]]:
        """The lines that are JSON objects, of either stream."""
        for line in (*self.text.splitlines(), *self.errors.splitlines()):
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    yield json.loads(line)


def run_command(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Output:
    """Run a process to its end. It is killed, with its own children, when the time is over or
    this process ends in any way. Raises `Failed`."""
    parent = os.getpid()

    def follow() -> None:  # in the child, between fork and exec
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
            process_group=0,  # so that its children can be killed with it
            preexec_fn=follow,
        )
    except OSError as error:
        raise Failed(f"{command[0]} cannot be run: {error.strerror}") from None
    with process:
        try:
            text, errors = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"it took more than {seconds:g} seconds (--timeout)") from None
            raise
    code = process.returncode
    if code < 0:
        raise Failed(f"it was killed by {_signal_name(-code)}", killed_by=-code)
    if code > 0:
        raise Failed(f"it ended with code {code}: {_last_line(errors) or _last_line(text)}")
    return Output(text, errors)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
