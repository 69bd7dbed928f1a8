"""`minisgl bench bus`: what Redis adds to a token against ZMQ, and how much the services carry.

A fake engine whose steps take a fixed time stands in for the model, so that everything measured is
the way of a token: rank 0, detokenizer, gateway, client. Both services run side by side and take
turns. Only differences of one run say anything: see docs/benchmarks.md.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minisgl.bench import ending_on_signals
from minisgl.bench.arguments import output_file, positive, positive_int
from minisgl.bench.processes import cpu_seconds, redis_server, running
from minisgl.bench.serve import plain_arguments
from minisgl.bench.stats import summary, table, write_json
from minisgl.bench.streams import lateness, marking_tokens, read_streams, request
from minisgl.config import EngineConfig, GatewayConfig, UsageError
from minisgl.gateway.listen import bind_http
from minisgl.hub import require_tokenizer, resolve_model
from minisgl.launch.serve import LocalGatewayConfig, serve_children
from minisgl.rundir import RunDirectory
from minisgl.text import load_tokenizer

PROMPT_TOKENS = 16
NAME = "bench"


def _times(text: str) -> tuple[float, ...]:
    return tuple(positive(part.strip()) for part in text.split(","))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--model", required=True, help="folder or Hugging Face id; only its tokenizer is used"
    )
    parser.add_argument(
        "--bus",
        metavar="URL",
        help="a Redis that is there, redis://... (default: a redis-server of our own)",
    )
    parser.add_argument(
        "--streams",
        type=positive_int,
        metavar="N",
        default=64,
        help="streams at a time of the comparison (default: 64)",
    )
    parser.add_argument(
        "--step-seconds",
        type=positive,
        metavar="N",
        default=0.01,
        help="time of one step of the comparison, in seconds (default: 0.01)",
    )
    parser.add_argument(
        "--rounds",
        type=positive_int,
        metavar="N",
        default=5,
        help="runs of each bus, taking turns (default: 5)",
    )
    parser.add_argument(
        "--output-tokens",
        type=positive_int,
        metavar="N",
        default=500,
        help="tokens of each stream (default: 500)",
    )
    parser.add_argument(
        "--load-streams",
        type=positive_int,
        metavar="N",
        default=128,
        help="streams at a time of the load runs, on Redis (default: 128)",
    )
    parser.add_argument(
        "--load-step-seconds",
        type=_times,
        metavar="N,N",
        default=(0.012, 0.008, 0.006),
        help="step times of the load runs, in seconds (default: 0.012,0.008,0.006)",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures to this file"
    )


@dataclass(slots=True)
class Service:
    """A running service: where it listens, and what to look at."""

    bus: str
    address: tuple[str, int]
    pids: dict[str, int]
    step_seconds: float
    redis: str | None = None
    """URL of its Redis."""


@dataclass(slots=True)
class Look:
    """What was used up to one moment."""

    at: float
    cpu: dict[str, float]
    commands: dict[str, int]


@dataclass(slots=True)
class Run:
    """One run, between the moment when all streams had begun and the first end of one."""

    begin: Look
    end: Look
    steps: int
    tokens: int
    latencies: list[float] = field(repr=False)
    """Of each token: from the end of its step to the client, in seconds."""

    @property
    def seconds(self) -> float:
        """Length of the measured part."""
        return self.end.at - self.begin.at

    def report(self) -> dict[str, Any]:
        """The figures of the run. `cpu` is in shares of one processor."""
        spent = {name: self.end.cpu[name] - self.begin.cpu[name] for name in self.end.cpu}
        new = {
            name: count - self.begin.commands.get(name, 0)
            for name, count in self.end.commands.items()
        }
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
            "latency_seconds": summary(self.latencies),
            "cpu": {name: seconds / self.seconds for name, seconds in spent.items()},
            "commands_per_step": {
                name: count / self.steps for name, count in sorted(new.items()) if count
            },
        }


class Bench:
    """Runs on one model; `marks` are the tokens that tell the time."""

    def __init__(self, model: str, tokens: int) -> None:
        folder = resolve_model(model, files="tokenizer")
        require_tokenizer(folder)
        self.folder = str(folder)
        self._marks = marking_tokens(load_tokenizer(self.folder))
        self._place = {mark: place for place, (_, mark) in enumerate(self._marks)}
        self._tokens = tokens

    @contextlib.contextmanager
    def service(
        self, bus: str, step_seconds: float, streams: int, pids: dict[str, int] | None = None
    ) -> Iterator[Service]:
        """A service on this bus, as `minisgl serve` or as the operator starts it."""
        cluster = not bus.startswith("ipc:")
        kind = GatewayConfig if cluster else LocalGatewayConfig
        gateway = kind(bus=bus, model=self.folder, served_model_name=NAME)
        engine = EngineConfig(
            model=self.folder,
            fake_engine=True,
            fake_step_seconds=step_seconds,
            max_running_requests=streams,
        )
        with bind_http("127.0.0.1", 0) as http:
            specs = serve_children(
                bus,
                self.folder,
                engine,
                gateway,
                num_tokenizers=int(cluster),  # in a cluster nobody is both
                http_fd=http.fileno(),
                log_flags=["--log-level=error"],
            )
            with running(specs) as found:
                yield Service(
                    bus="redis" if cluster else "zmq",
                    address=http.getsockname()[:2],
                    pids={**found, **(pids or {}), "client": os.getpid()},
                    step_seconds=step_seconds,
                    redis=bus if cluster else None,
                )

    def run(self, service: Service, streams: int) -> Run:
        """All streams once. Raises `StartError` if one of them breaks off."""
        marks = [token_id for token_id, _ in self._marks]
        requests = [
            request(NAME, [marks[i % len(marks)]] * PROMPT_TOKENS, self._tokens, marks)
            for i in range(streams)
        ]
        looks: list[Look] = []

        def look() -> None:
            looks.append(_look(service))

        read = read_streams(service.address, requests, on_all_started=look, on_first_end=look)
        begin, end = looks
        latencies = []
        for stream in read:
            for mark, at in stream.characters():
                if begin.at < at <= end.at:
                    place = self._place[mark]
                    latencies.append(lateness(place, at, len(marks), service.step_seconds))
        # Not from the clock: a step may begin late.
        steps = max(1, round(len(latencies) / streams))
        return Run(begin, end, steps, len(latencies), latencies)


def _look(service: Service) -> Look:
    commands = {}
    if service.redis is not None:
        import redis

        with redis.Redis.from_url(service.redis) as client:
            stats: Any = client.info("commandstats")
        own = ("cmdstat_info", "cmdstat_auth", "cmdstat_hello", "cmdstat_client|setinfo")
        commands = {
            name.removeprefix("cmdstat_"): int(figures["calls"])
            for name, figures in stats.items()
            if name not in own
        }
    return Look(time.monotonic(), cpu_seconds(service.pids), commands)


def compare(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """What Redis adds to a token, by pooled tokens and round by round, in seconds."""
    pooled = {
        bus: summary([seconds for run in of_bus for seconds in run.latencies])
        for bus, of_bus in runs.items()
    }
    added: dict[str, Any] = {}
    for name, share in (("p50", 50), ("p99", 99)):
        by_round = [
            float(np.percentile(redis.latencies, share) - np.percentile(zmq.latencies, share))
            for zmq, redis in zip(runs["zmq"], runs["redis"], strict=True)
        ]
        added[name] = {
            "pooled": (pooled["redis"][name] or 0) - (pooled["zmq"][name] or 0),
            "median_of_rounds": statistics.median(by_round),
            "rounds": by_round,
        }
    return {"latency_seconds": pooled, "added_seconds": added}


def run(args: argparse.Namespace) -> int:
    """Compare, then load, and print both. Raises `UsageError` and `StartError`."""
    if args.bus is not None and not args.bus.startswith(("redis://", "rediss://")):
        raise UsageError("--bus must be redis://... or rediss://...")
    bench = Bench(args.model, args.output_tokens)
    report: dict[str, Any] = {"arguments": plain_arguments(args)}
    with ending_on_signals(), contextlib.ExitStack() as stack:
        url, pids = args.bus, dict[str, int]()
        if url is None:
            url, pid = stack.enter_context(redis_server())
            pids["redis"] = pid
        report |= _comparison(bench, args, url, pids)
        report["load"] = [
            _load(bench, args, url, pids, step_seconds) for step_seconds in args.load_step_seconds
        ]
    if args.json:
        write_json(args.json, report)
    return 0


def _comparison(
    bench: Bench, args: argparse.Namespace, url: str, pids: dict[str, int]
) -> dict[str, Any]:
    directory = RunDirectory.create()
    runs: dict[str, list[Run]] = {"zmq": [], "redis": []}
    try:
        with (
            bench.service(f"ipc://{directory.path}", args.step_seconds, args.streams) as zmq,
            bench.service(url, args.step_seconds, args.streams, pids) as redis,
        ):
            both = [zmq, redis]
            for service in both:
                bench.run(service, args.streams)  # warms caches, and is not counted
            for number in range(args.rounds):
                for service in both if number % 2 == 0 else reversed(both):
                    runs[service.bus].append(bench.run(service, args.streams))
    finally:
        directory.release()
    found = compare(runs)
    print(f"{args.streams} streams, a step each {args.step_seconds * 1e3:g} ms:")
    print(table(found["latency_seconds"], "from step to client, ms", 1e3))
    for name, added in found["added_seconds"].items():
        shown = ", ".join(f"{seconds * 1e3:.2f}" for seconds in added["rounds"])
        print(f"Redis adds at {name}: {added['pooled'] * 1e3:.3f} ms (by round: {shown})")
    return {**found, "runs": {bus: [r.report() for r in rs] for bus, rs in runs.items()}}


def _load(
    bench: Bench, args: argparse.Namespace, url: str, pids: dict[str, int], step_seconds: float
) -> dict[str, Any]:
    with bench.service(url, step_seconds, args.load_streams, pids) as service:
        bench.run(service, args.load_streams)
        found = bench.run(service, args.load_streams).report()
    offered = args.load_streams / step_seconds
    latency, cpu = found["latency_seconds"], found["cpu"]
    print(
        f"{args.load_streams} streams, a step each {step_seconds * 1e3:g} ms: "
        f"{found['tokens_per_second']:,.0f} of {offered:,.0f} tokens/s; "
        f"p50 {latency['p50'] * 1e3:.2f} ms, p99 {latency['p99'] * 1e3:.2f} ms"
    )
    print("  processors: " + ", ".join(f"{n} {share:.2f}" for n, share in cpu.items()))
    commands = found["commands_per_step"]
    print(
        f"  Redis commands a step: {sum(commands.values()):.1f} ("
        + ", ".join(f"{name} {count:.2f}" for name, count in commands.items())
        + ")"
    )
    return {"step_seconds": step_seconds, "offered_tokens_per_second": offered, **found}
