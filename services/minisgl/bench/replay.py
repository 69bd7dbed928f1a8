"""A trace of arrivals replayed on one server, faster and slower: `bench serve --trace`.

What keeps the figures honest: each run begins with the server idle and with prompts that it has not
seen; latencies count from when a request was due, so a slow server delays no arrival and a slow
client hides no wait; and how late the client itself was stands beside them.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from tqdm import tqdm

from minisgl.bench.arrivals import Arrival
from minisgl.bench.client import Generator, Load, Planned, Target, plan_trace
from minisgl.bench.stats import RequestRecord, served_report, summary
from minisgl.config import UsageError

IDLE_LIMIT_SECONDS = 120.0
SETTLED_SECONDS = 2.5
"""Figures of a group reach `/metrics` within two seconds."""
WARM_UP_REQUESTS = 16
WARM_UP_TOKENS = 32
LATE_SECONDS = 0.02
"""A client that is later than this, in one of a hundred looks, spoils the figures."""


class Gauges:
    """What a server tells of itself on `/metrics`, between two moments when it was idle."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before: dict[str, float] = {}

    def wait_until_idle(self) -> None:
        """Nothing runs or waits, and all that was counted of it is shown.

        Raises `UsageError` if others keep the server busy.
        """
        deadline = time.monotonic() + IDLE_LIMIT_SECONDS
        last, since = self._read(), time.monotonic()
        while self._knows(last) and time.monotonic() - since < SETTLED_SECONDS:
            if time.monotonic() > deadline:
                raise UsageError(f"{self._url} is busy with requests of others: wait for their end")
            time.sleep(0.2)
            now = self._read()
            if _running(now) or _counted(now) != _counted(last):
                since = time.monotonic()
            last = now
        self._before = last

    def since_idle(self, seconds: float, open_seconds: float) -> dict[str, Any]:
        """What happened since it was idle last; it must be idle again.

        `seconds` is how long the run took, `open_seconds` of them with a request open. What the
        server does not tell is None.
        """
        before = self._before
        self.wait_until_idle()
        if not self._knows(self._before):
            return {"device_busy_seconds": None, "idle_share": None, "idle_share_while_open": None}
        change = {name: value - before.get(name, 0.0) for name, value in self._before.items()}
        groups = [c for n, c in change.items() if n.startswith("minisgl_device_busy_seconds")]
        busy = sum(groups) / len(groups)
        return {
            "device_busy_seconds": busy,
            "idle_share": max(0.0, 1 - busy / seconds) if seconds else None,
            "idle_share_while_open": max(0.0, 1 - busy / open_seconds) if open_seconds else None,
            "steps": round(_total(change, "minisgl_step_seconds_count")),
            "cached_tokens": round(_total(change, "minisgl_cached_tokens_total")),
            "retractions": round(_total(change, "minisgl_retractions_total")),
            "replays": round(_total(change, "minisgl_request_replays_total")),
        }

    def _knows(self, samples: dict[str, float]) -> bool:
        return any(name.startswith("minisgl_device_busy_seconds") for name in samples)

    def _read(self) -> dict[str, float]:
        """Every sample by its name with labels; nothing of a server that shows none."""
        try:
            answer = httpx.get(f"{self._url}/metrics", timeout=10)
        except httpx.HTTPError:
            return {}
        samples = {}
        for line in answer.text.splitlines() if answer.status_code == 200 else ():
            name, _, value = line.rpartition(" ")
            if name.startswith("minisgl_"):
                samples[name] = float(value)
        return samples


def _total(samples: dict[str, float], name: str) -> float:
    return sum(value for key, value in samples.items() if key.partition("{")[0] == name)


def _running(samples: dict[str, float]) -> float:
    return sum(_total(samples, f"minisgl_requests_{what}") for what in ("running", "waiting"))


def _counted(samples: dict[str, float]) -> tuple[float, ...]:
    names = ("minisgl_step_seconds_count", "minisgl_device_busy_seconds_total")
    return tuple(_total(samples, name) for name in names)


def open_seconds(records: Sequence[RequestRecord]) -> float:
    """How long at least one request was open."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((r.start, r.end) for r in records if r.end is not None):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def replay(
    target: Target,
    arrivals: Sequence[Arrival],
    scales: Sequence[float],
    *,
    seed: int,
    temperature: float,
    timeout: float,
    concurrency: int | None,
) -> Iterator[dict[str, Any]]:
    """The report of one run for each scale, which the times of the trace are multiplied by.

    Raises `UsageError` for a request that does not fit the server, and if others use the server.
    """
    gauges = Gauges(target.url)
    _warm_up(target, arrivals, seed, timeout)
    gauges.wait_until_idle()
    for number, scale in enumerate(scales, 1):
        load = Load(
            requests=plan_trace(target, arrivals, seed + number),
            times=[arrival.time * scale for arrival in arrivals],
            concurrency=concurrency,
            temperature=temperature,
            timeout=timeout,
        )
        generator = Generator(target, load)
        shown = sys.stderr.isatty()
        with tqdm(total=len(arrivals), unit="req", desc=f"{scale:g}", disable=not shown) as bar:
            asyncio.run(generator.run(bar.update))
        report = served_report(generator.records)
        run = {
            "time_scale": scale,
            "offered_requests_per_second": len(arrivals) / max(load.times or [0.0]),
            **report,
            "open_seconds": open_seconds(generator.records),
            "client": client_report(generator),
        }
        run["server"] = gauges.since_idle(report["seconds"], run["open_seconds"])
        run["failures"] = sorted({r.error for r in generator.records if r.error})[:5]
        yield run


def client_report(generator: Generator) -> dict[str, Any]:
    """How late the client was, in seconds, and what it used of a processor."""
    return {
        "send_late_seconds": summary([record.late for record in generator.records]),
        "wake_late_seconds": summary(generator.late),
        "processor_share": generator.processor_share,
    }


def client_was_late(client: dict[str, Any]) -> bool:
    """Whether the client may have spoilt the figures."""
    worst = (client[name]["p99"] or 0.0 for name in ("send_late_seconds", "wake_late_seconds"))
    return max(worst) > LATE_SECONDS


def _warm_up(target: Target, arrivals: Sequence[Arrival], seed: int, timeout: float) -> None:
    """Prompts of all lengths at the same time, with short outputs; they do not count."""
    by_length = sorted(arrivals, key=lambda arrival: arrival.prompt_tokens)
    step = max(1, len(by_length) // WARM_UP_REQUESTS)
    few = [*by_length[::step], by_length[-1]]
    planned = [
        Planned(p.prompt_ids, min(p.output_tokens, WARM_UP_TOKENS))
        for p in plan_trace(target, few, seed)
    ]
    generator = Generator(target, Load(requests=planned, timeout=timeout))
    asyncio.run(generator.run())
    failed = [record.error for record in generator.records if record.error]
    if failed:
        raise UsageError(f"{target.url} does not answer requests of the trace: {failed[0]}")


def run_line(run: dict[str, Any]) -> str:
    """What a run gave, in a line, and whether the client was late."""
    idle, client = run["server"]["idle_share"], run["client"]
    text = (
        f"time scale {run['time_scale']:g}: {run['offered_requests_per_second']:.2f} requests/s "
        f"offered; {run['completed']} of {run['requests']} answered in {run['seconds']:.1f} s, "
        f"{run['output_tokens_per_second']:.1f} output tokens/s"
    )
    if idle is not None:
        text += f", device idle {idle:.1%}"
    if client_was_late(client):
        text += (
            f"\n  this client was late itself (p99 {client['send_late_seconds']['p99'] * 1e3:.0f} "
            f"ms to send, {(client['wake_late_seconds']['p99'] or 0) * 1e3:.0f} ms to wake up, "
            f"{client['processor_share']:.0%} of a processor): its times are no better than that"
        )
    return text


def scales_table(runs: Sequence[dict[str, Any]]) -> str:
    """Latencies over the scales as text, in milliseconds."""
    columns = [
        (f"{name.upper()} {part}", f"{name}_seconds", part)
        for name in ("ttft", "tpot", "pause", "e2e")
        for part in ("p50", "p90", "p99")
    ]
    lines = [f"{'scale':<7}{'req/s':>7}{'tok/s':>9}" + "".join(f"{c[0]:>11}" for c in columns)]
    lines[0] += f"{'idle':>8}"
    for run in runs:
        line = f"{run['time_scale']:<7g}{run['offered_requests_per_second']:>7.2f}"
        line += f"{run['output_tokens_per_second']:>9.1f}"
        for _, key, part in columns:
            value = run[key][part]
            line += f"{'-':>11}" if value is None else f"{value * 1e3:>11.1f}"
        idle = run["server"]["idle_share"]
        lines.append(line + (f"{'-':>8}" if idle is None else f"{idle:>8.1%}"))
    return "\n".join(lines)
