"""When requests arrive and how long they are: a trace read from a file, or made from a seed."""

import contextlib
import csv
import datetime
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.config import UsageError

BURSTS = "bursts"
"""The name of the trace that is made here."""
BURST_REQUESTS = 10
"""Mean of the requests in one burst,"""
BURST_GAP_SECONDS = 0.05
"""and of the time between two of them."""
FIELDS = {
    "time": ("time", "timestamp"),
    "prompt_tokens": ("prompt_tokens", "input_length", "ContextTokens"),
    "output_tokens": ("output_tokens", "output_length", "GeneratedTokens"),
}
"""What a line of a file must hold, with the names that published traces give it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    time: float
    """Seconds from the start of the trace."""
    prompt_tokens: int
    output_tokens: int


def bursts(
    count: int,
    rate: float,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    seed: int,
) -> list[Arrival]:
    """`count` requests that arrive in bursts, `rate` of them a second on average.

    Bursts are a Poisson process. Each has a geometric number of requests, `BURST_REQUESTS` on
    average, at exponential distances of `BURST_GAP_SECONDS`; bursts may overlap. All times are then
    stretched so that the last one is `count / rate`. Lengths are log-normal within their closed
    ranges, which span two standard deviations on each side of the median; a draw outside is drawn
    again. The same seed gives the same trace.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.geometric(1 / BURST_REQUESTS, count)
    starts = np.cumsum(rng.exponential(BURST_REQUESTS / rate, count))
    times: list[float] = []
    for start, size in zip(starts, sizes, strict=True):
        if len(times) >= count:
            break
        gaps = rng.exponential(BURST_GAP_SECONDS, size)
        times.extend((start + np.cumsum(gaps) - gaps[0]).tolist())
    at = np.sort(times)[:count]
    at = (at - at[0]) * (count / rate / max(at[-1] - at[0], 1e-9))
    prompts = _log_normal(rng, count, prompt_tokens)
    outputs = _log_normal(rng, count, output_tokens)
    return [Arrival(float(t), int(p), int(o)) for t, p, o in zip(at, prompts, outputs, strict=True)]


def _log_normal(
    rng: np.random.Generator, count: int, within: tuple[int, int]
) -> npt.NDArray[np.int64]:
    low, high = map(math.log, within)
    logs = rng.normal((low + high) / 2, (high - low) / 4, count)
    while (outside := (logs < low) | (logs > high)).any():
        logs[outside] = rng.normal((low + high) / 2, (high - low) / 4, int(outside.sum()))
    return np.rint(np.exp(logs)).astype(np.int64)


def read_trace(path: str, most: int | None = None) -> list[Arrival]:
    """The first `most` requests of a file, the first one at time 0.

    Each line is a JSON object, or the file is CSV with a line of names first. Times are seconds or
    dates with a time of day, and do not fall. Raises `UsageError` that names line and field.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace {path}: cannot be read: {error}") from None
    rows = _json_rows(path, text) if text.lstrip().startswith("{") else _csv_rows(path, text)
    found: list[Arrival] = []
    first = 0.0
    for number, row in itertools.islice(rows, most):
        at = f"--trace {path}, line {number}"
        time = _time(at, _field(at, row, "time"))
        first = first if found else time
        if found and time - first < found[-1].time:
            raise UsageError(f"{at}: its time is before that of the line above: sort the file")
        sizes = (_tokens(at, row, name) for name in ("prompt_tokens", "output_tokens"))
        found.append(Arrival(time - first, *sizes))
    if not found:
        raise UsageError(f"--trace {path}: no line with a request")
    return found


def _json_rows(path: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"--trace {path}, line {number}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(f"--trace {path}, line {number}: must be a JSON object")
        yield number, row


def _csv_rows(path: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    try:
        for row in reader:
            yield reader.line_num, {str(name): value for name, value in row.items()}
    except csv.Error as error:
        raise UsageError(
            f"--trace {path}, line {reader.line_num}: not valid CSV: {error}"
        ) from None


def _field(at: str, row: Mapping[str, Any], name: str) -> Any:
    lower = {key.lower(): value for key, value in row.items()}
    for known in FIELDS[name]:
        if lower.get(known.lower()) is not None:
            return lower[known.lower()]
    others = ", ".join(FIELDS[name][1:])
    raise UsageError(f"{at}: it lacks {name} (or {others}); it has {', '.join(row) or 'nothing'}")


def _time(at: str, value: Any) -> float:
    found = math.nan
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            found = float(value)
        except ValueError:
            with contextlib.suppress(ValueError):
                date = datetime.datetime.fromisoformat(str(value))
                found = (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp()
    if not math.isfinite(found):
        raise UsageError(f"{at}: time must be seconds or a date with a time, not {value!r}")
    return found


def _tokens(at: str, row: Mapping[str, Any], name: str) -> int:
    value = _field(at, row, name)
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"{at}: {name} must be a whole number over 0, not {value!r}")
    return int(text)
