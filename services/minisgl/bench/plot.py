"""The picture of a served run. Needs matplotlib: the extra `bench`."""

from collections.abc import Sequence

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
