"""The picture of a served run. Needs matplotlib: the extra `bench`."""

from collections.abc import Sequence
from typing import Any

from minisgl.bench.stats import RequestRecord
from minisgl.config import UsageError


def check_plotting() -> None:
    """Raises `UsageError` if matplotlib is missing: said before a run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "--plot needs matplotlib: pip install 'minisglang[bench]', or leave --plot out"
        ) from None


def plot_served(records: Sequence[RequestRecord], path: str, title: str) -> None:
    """Write a PNG: latencies of the requests answered to the end, and the requests over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole = [r for r in records if r.whole]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    shown = (
        ("time to first token (s)", [r.ttft for r in whole]),
        ("time per output token (ms)", [1e3 * t for r in whole if (t := r.tpot) is not None]),
        ("time of the whole request (s)", [r.e2e for r in whole]),
    )
    for axis, (name, values) in zip(axes.flat, shown, strict=False):
        values = sorted(values)
        axis.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post")
        axis.set(xlabel=name, ylabel="share of requests", ylim=(0, 1.02))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        for share in (0.5, 0.9, 0.99):
            axis.axhline(share, color="grey", linewidth=0.5, linestyle=":")
    axis = axes.flat[3]
    steps = sorted(
        [(r.start, 1) for r in records] + [(r.end, -1) for r in records if r.end is not None]
    )
    times, open_requests, level = [], [], 0
    for time, change in steps:
        level += change
        times.append(time)
        open_requests.append(level)
    axis.step(times, open_requests, where="post")
    axis.set(xlabel="time since the start (s)", ylabel="open requests")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot_scales(runs: Sequence[dict[str, Any]], path: str, title: str) -> None:
    """Write a PNG: latencies, throughput and idle share of a trace over its time scales.

    `runs` are reports of `replay`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = sorted(runs, key=lambda run: run["time_scale"])
    scales = [run["time_scale"] for run in runs]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for axis, (name, key) in zip(
        axes.flat,
        (
            ("time to first token (ms)", "ttft_seconds"),
            ("time per output token (ms)", "tpot_seconds"),
            ("time of the whole request (ms)", "e2e_seconds"),
        ),
        strict=False,
    ):
        for part in ("p99", "p90", "p50"):
            values = [None if (v := run[key][part]) is None else 1e3 * v for run in runs]
            axis.plot(scales, values, marker="o", label=part)
        axis.set(ylabel=name, yscale="log")
        for labels in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            labels(lambda value, place: f"{value:g}")
        axis.legend()
    axis = axes.flat[3]
    rates = [run["output_tokens_per_second"] for run in runs]
    lines = axis.plot(scales, rates, marker="o", color="C3", label="output tokens/s")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("output tokens/s")
    shares = [run["server"]["idle_share"] for run in runs]
    if None not in shares:
        beside = axis.twinx()
        lines += beside.plot(scales, shares, marker="s", color="C4", label="idle share")
        beside.set(ylabel="device idle, share of the time", ylim=(0, 1))
    axis.legend(handles=lines)
    for axis in axes.flat:
        axis.set_xlabel("time scale of the trace (smaller: faster arrivals)")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
