"""`minisgl bench timeline`: where the time of decode steps goes, from a trace of `bench offline`.

A step is one CUDA graph: its launch on the host, and the kernels that the profiler ascribes to it.
"""

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.arguments import output_file, picture_file, positive_int
from minisgl.bench.plot import check_plotting
from minisgl.bench.stats import write_json
from minisgl.config import UsageError

GROUPS = {
    "attention": r"(?i)flash|attention|attend|batchdecode|batchprefill|fmha|mha|combine",
    "products": r"(?i)gemm|cutlass|nvjet|xmma|gemv|skinny_linear|wide_linear|splitk|cublas",
    "communication": r"(?i)nccl|allreduce|allgather",
    "norms": r"(?i)norm",
    "rope and KV store": r"(?i)rope|store_kv|kv_store",
    "gate": r"(?i)silu|act_and_mul",
    "experts": r"(?i)moe|expert|topk_softmax",
    "sampling": r"(?i)sample|argmax|philox|softmax|topk|sort",
    "inputs": r"(?i)decode_inputs|block_table|embedding|index|plan|schedul|prepare|gather|scatter",
    "copies": r"(?i)memcpy|memset|copy",
}
"""By name: what the kernels of a group are called. The first that fits counts."""
OTHER = "others"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in microseconds of the trace's clock."""

    name: str
    start: float
    end: float


@dataclass(slots=True)
class Step:
    """One decode step on the device."""

    launch: Span
    """The call on the host that queued it."""
    kernels: list[Span]

    @property
    def start(self) -> float:
        """Of its first kernel."""
        return min(k.start for k in self.kernels)


@dataclass(slots=True)
class Timeline:
    """What a trace holds, by time."""

    host: list[Span]
    """Calls of the CUDA runtime by the thread that launches graphs."""
    device: list[Span]
    steps: list[Step]


def read_trace(path: str) -> Timeline:
    """Raises `UsageError` for a file that is no trace with graphs in it."""
    try:
        data = Path(path).read_bytes()
        events = json.loads(gzip.decompress(data) if path.endswith(".gz") else data)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no trace of torch's profiler: {error}") from None
    host, device, launches = [], [], {}
    kernels: dict[int, list[Span]] = defaultdict(list)
    thread: Any = None
    for event in events:
        if event.get("ph") != "X":
            continue
        span = Span(event["name"], event["ts"], event["ts"] + event["dur"])
        kind, of = event.get("cat"), event.get("args", {}).get("correlation")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.append(span)
            kernels[of].append(span)
        elif kind in ("cuda_runtime", "cuda_driver"):
            host.append((event.get("tid"), span))
            if span.name == "cudaGraphLaunch":
                launches[of], thread = span, event.get("tid")
    steps = [Step(launch, kernels[of]) for of, launch in launches.items() if kernels[of]]
    if len(steps) < 2:
        raise UsageError(f"{path} holds fewer than two CUDA graphs: trace steps that decode")
    return Timeline(
        sorted((s for tid, s in host if tid == thread), key=lambda s: s.start),
        sorted(device, key=lambda s: s.start),
        sorted(steps, key=lambda s: s.start),
    )


def group_of(name: str) -> str:
    """The group that a kernel belongs to."""
    return next((g for g, pattern in GROUPS.items() if re.search(pattern, name)), OTHER)


def busy(spans: Sequence[Span]) -> float:
    """Microseconds in which at least one of the spans runs."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def figures(line: Timeline) -> dict[str, Any]:
    """Milliseconds a step, from the start of the first step to that of the last one."""
    first, last, steps = line.steps[0].start, line.steps[-1].start, len(line.steps) - 1
    within = [s for s in line.device if first <= s.start < last]
    groups: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    for span in within:
        groups[group_of(span.name)] += span.end - span.start
        names[span.name].append(span.end - span.start)
    waits = [s for s in line.host if "Synchronize" in s.name and first <= s.start and s.end <= last]
    top = sorted(names, key=lambda name: -sum(names[name]))[:20]
    return {
        "steps": steps,
        "step_ms": (last - first) / steps / 1e3,
        "device_busy_ms": busy(within) / steps / 1e3,
        "host_waits_ms": busy(waits) / steps / 1e3,
        "kernels": len(within) / steps,
        "groups_ms": {g: groups[g] / steps / 1e3 for g in sorted(groups, key=groups.__getitem__)},
        "top_kernels": [
            {
                "name": name,
                "group": group_of(name),
                "calls": len(names[name]) / steps,
                "microseconds": sum(names[name]) / len(names[name]),
            }
            for name in top
        ],
    }


def draw(line: Timeline, path: str, steps: int) -> None:
    """Write a PNG of some steps in the middle: a row for the host, and one a group of kernels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = min(steps, len(line.steps) - 1)
    first = (len(line.steps) - 1 - steps) // 2
    start, end = line.steps[first].start, line.steps[first + steps].start
    rows: dict[str, list[Span]] = defaultdict(list)
    for span in line.device:
        rows[group_of(span.name)].append(span)
    for span in line.host:
        rows["host waits" if "Synchronize" in span.name else "host calls"].append(span)
    order = [r for r in ("host calls", "host waits", *GROUPS, OTHER) if rows.get(r)]
    figure, axis = pyplot.subplots(figsize=(13, 0.42 * len(order) + 1.2), layout="constrained")
    for at, name in enumerate(order):
        bars = [
            ((s.start - start) / 1e3, (s.end - s.start) / 1e3)
            for s in rows[name]
            if s.end > start and s.start < end
        ]
        # With an edge, as a kernel of 2 us is narrower than a dot.
        colour = f"C{at % 10}"
        axis.broken_barh(bars, (at - 0.4, 0.8), facecolors=colour, edgecolors=colour, linewidth=0.5)
    for step in line.steps[first : first + steps + 1]:
        axis.axvline((step.start - start) / 1e3, color="grey", linewidth=0.6)
    axis.set_yticks(range(len(order)), order)
    axis.invert_yaxis()
    axis.set(xlim=(0, (end - start) / 1e3), xlabel="milliseconds; a line where a step starts")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("trace", metavar="FILE", help="file that `bench offline --profile` wrote")
    parser.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw some steps")
    parser.add_argument(
        "--steps", type=positive_int, metavar="N", default=2, help="steps to draw (default: 2)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    """Report; 0. Raises `UsageError`."""
    if args.plot:
        check_plotting()
    line = read_trace(args.trace)
    found = figures(line)
    print(
        f"{found['steps']} steps of {found['step_ms']:.3f} ms, the device busy for "
        f"{found['device_busy_ms']:.3f} ms with {found['kernels']:.0f} kernels and copies; the "
        f"host waits for {found['host_waits_ms']:.3f} ms\n"
    )
    for name, milliseconds in reversed(found["groups_ms"].items()):
        print(f"{name:<20}{milliseconds:>9.3f} ms")
    print()
    for kernel in found["top_kernels"]:
        name = kernel["name"] if len(kernel["name"]) < 90 else kernel["name"][:87] + "..."
        print(f"{kernel['calls']:>6.1f} x {kernel['microseconds']:>8.2f} us  {name}")
    if args.json:
        write_json(args.json, found)
    if args.plot:
        draw(line, args.plot, args.steps)
    return 0
