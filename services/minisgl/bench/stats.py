"""Figures of a run: percentiles, and what a served run says of its requests.

Times are seconds; a share is between 0 and 1.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times count from the start of the run."""

    start: float
    """When it was due: its latencies count from here."""
    prompt_tokens: int
    first: float | None = None
    """When the first output token came."""
    end: float | None = None
    """When the last output token came, the client left, or the request failed."""
    output_tokens: int = 0
    pause: float = 0.0
    """Longest time from one piece of output to the next."""
    left: bool = False
    """The client went away before the end, on purpose."""
    error: str | None = None
    sent: float | None = None
    """When it was sent; None: at its start."""

    @property
    def late(self) -> float:
        """How long after it was due the client sent it."""
        return 0.0 if self.sent is None else self.sent - self.start

    @property
    def whole(self) -> bool:
        """Whether it was answered to the end."""
        return not self.left and self.error is None and self.first is not None

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        assert self.first is not None
        return self.first - self.start

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first one; None for a single token."""
        if self.output_tokens < 2:
            return None
        assert self.end is not None and self.first is not None
        return (self.end - self.first) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """Time to the last token."""
        assert self.end is not None
        return self.end - self.start


def summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """count, mean, p50, p90, p99 and max; None for each figure of no values."""
    if not values:
        return {"count": 0, **dict.fromkeys(("mean", "p50", "p90", "p99", "max"))}
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
    return {
        "count": len(values),
        "mean": float(array.mean()),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": float(array.max()),
    }


def served_report(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The figures of a served run. Latencies are those of requests answered to the end."""
    whole = [r for r in records if r.whole]
    ends = [r.end for r in records if r.end is not None]
    seconds = max(ends, default=0.0) - min((r.start for r in records), default=0.0)
    output_tokens = sum(r.output_tokens for r in records)
    per = (lambda n: n / seconds) if seconds > 0 else (lambda n: 0.0)
    return {
        "seconds": seconds,
        "requests": len(records),
        "completed": len(whole),
        "left": sum(r.left for r in records),
        "errors": sum(r.error is not None for r in records),
        "prompt_tokens": sum(r.prompt_tokens for r in records),
        "output_tokens": output_tokens,
        "output_tokens_per_second": per(output_tokens),
        "requests_per_second": per(len(whole)),
        "ttft_seconds": summary([r.ttft for r in whole]),
        "tpot_seconds": summary([t for r in whole if (t := r.tpot) is not None]),
        "pause_seconds": summary([r.pause for r in whole if r.output_tokens > 1]),
        "e2e_seconds": summary([r.e2e for r in whole]),
    }


def table(rows: dict[str, dict[str, float | int | None]], unit: str, scale: float) -> str:
    """Summaries as text: a line each, in `unit`, which is `scale` times a second."""
    columns = ("mean", "p50", "p90", "p99", "max")
    lines = [f"{unit:<22}" + "".join(f"{c:>11}" for c in columns)]
    for name, figures in rows.items():
        cells = ""
        for column in columns:
            value = figures[column]
            cells += f"{'-':>11}" if value is None else f"{value * scale:>11.3f}"
        lines.append(f"{name:<22}{cells}")
    return "\n".join(lines)


def write_json(path: str, report: dict[str, Any]) -> None:
    """Write a report to a file."""
    Path(path).write_text(json.dumps(report, indent=2) + "\n")
