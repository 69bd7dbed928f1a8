"""`minisgl bench serve`: latency and throughput of a server, as its clients see them."""

import argparse
import asyncio
import contextlib
import platform
import shlex
import sys
from collections import Counter
from typing import Any

from tqdm import tqdm

from minisgl.bench import ending_on_signals
from minisgl.bench.arguments import (
    output_file,
    picture_file,
    positive,
    positive_int,
    scales,
    share,
    token_range,
)
from minisgl.bench.arrivals import BURST_REQUESTS, BURSTS, Arrival, bursts, read_trace
from minisgl.bench.client import Generator, Load, Target, look_at, plan
from minisgl.bench.plot import check_plotting, plot_scales, plot_served
from minisgl.bench.replay import client_report, replay, run_line, scales_table
from minisgl.bench.server import Server
from minisgl.bench.stats import served_report, summary, table, write_json
from minisgl.config import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running server, such as http://127.0.0.1:1919")
    where.add_argument("--model", help="start `minisgl serve MODEL` for the run, and stop it after")
    parser.add_argument(
        "--serve-args",
        default="",
        metavar="TEXT",
        help="with --model: flags for the server, in one text after a =, such as "
        "='--dtype float32' (default: none)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="with --url: the model to ask (default: the first one that the server lists)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (default: none)")
    parser.add_argument(
        "--num-prompts",
        type=positive_int,
        metavar="N",
        help="requests to send (default: 32; with --trace: all of a file, 1000 of bursts)",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE|bursts",
        help="replay arrivals. A file holds a request a line, as JSON or CSV with a line of names: "
        "time in seconds, prompt_tokens, output_tokens. bursts: made from --seed; bursts of "
        f"{BURST_REQUESTS} requests on average come at random, prompts and outputs are log-normal "
        "(default: none)",
    )
    parser.add_argument(
        "--time-scale",
        type=scales,
        metavar="N,...",
        help="with --trace: what its times are multiplied by; 0.5 is twice as fast. Several are "
        "run one after the other, each with new prompts (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        metavar="N",
        help="send them again and again for so long, in seconds (default: send them once)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=token_range,
        metavar="MIN-MAX",
        help="length of the prompts in tokens, uniform in this range (default: 32-128; with "
        "--trace bursts: 100-8000)",
    )
    parser.add_argument(
        "--output-tokens",
        type=token_range,
        metavar="MIN-MAX",
        help="length of the outputs in tokens, uniform in this range (default: 16-64; with "
        "--trace bursts: 50-1000)",
    )
    parser.add_argument(
        "--request-rate",
        type=positive,
        metavar="N",
        help="mean arrivals in requests per second (default: all at once; with --trace bursts: 8, "
        "before --time-scale)",
    )
    parser.add_argument(
        "--arrival",
        choices=("poisson", "fixed"),
        help="with --request-rate: at random or at even distances (default: poisson)",
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        metavar="N",
        help="most open requests; those that are due wait for their turn (default: no limit)",
    )
    parser.add_argument(
        "--disconnect-share",
        type=share,
        metavar="SHARE",
        help="share of clients that go away in the middle of their answer, 0 to 1 (default: 0)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="N",
        default=0.6,
        help="sampling temperature, 0 to 2 (default: 0.6)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="N",
        default=600.0,
        help="longest silence within a request, in seconds (default: 600)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="of lengths and arrivals (default: 0)"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures to this file"
    )
    parser.add_argument(
        "--plot", type=picture_file, metavar="FILE.png", help="write a picture to this file"
    )


def run(args: argparse.Namespace) -> int:
    """Send the load and report. 0 if every request was answered, else 1.

    Raises `UsageError` and `StartError`.
    """
    if args.plot:
        check_plotting()
    _check(args)
    # Read before a server is started for it.
    arrivals = _arrivals(args) if args.trace else None
    with ending_on_signals(), contextlib.ExitStack() as stack:
        url, model = args.url, args.served_model_name
        if args.model:
            try:
                flags = shlex.split(args.serve_args)
            except ValueError as error:
                raise UsageError(f"--serve-args cannot be split into flags: {error}") from None
            server = Server(args.model, flags, echo=sys.stderr.buffer)
            url = stack.enter_context(server).url
        target = look_at(url, model, args.api_key)
        if arrivals is not None:
            return _replay(args, target, arrivals)
        return _send(args, target)


def _check(args: argparse.Namespace) -> None:
    """Flags that mean nothing beside others are errors, not ignored."""
    if args.trace is None:
        if args.time_scale is not None:
            raise UsageError("--time-scale goes with --trace: without one give --request-rate")
        return
    refused = ["seconds", "arrival", "disconnect_share"]
    if args.trace != BURSTS:
        refused += ["prompt_tokens", "output_tokens", "request_rate"]
    for name in refused:
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} does not go with --trace {args.trace}: leave it out")


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    if args.trace != BURSTS:
        return read_trace(args.trace, args.num_prompts)
    return bursts(
        args.num_prompts or 1000,
        args.request_rate or 8.0,
        args.prompt_tokens or (100, 8000),
        args.output_tokens or (50, 1000),
        args.seed,
    )


def _replay(args: argparse.Namespace, target: Target, arrivals: list[Arrival]) -> int:
    runs: list[dict[str, Any]] = []
    report = {
        **_about(args, target),
        "trace": {
            "requests": len(arrivals),
            "seconds": arrivals[-1].time,
            "prompt_tokens": summary([a.prompt_tokens for a in arrivals]),
            "output_tokens": summary([a.output_tokens for a in arrivals]),
        },
        "runs": runs,
    }
    for run in replay(
        target,
        arrivals,
        args.time_scale or (1.0,),
        seed=args.seed,
        temperature=args.temperature,
        timeout=args.timeout,
        concurrency=args.concurrency,
    ):
        runs.append(run)
        print(run_line(run), flush=True)
        if args.json:  # after each run: one that is broken off later leaves what came before it
            write_json(args.json, report)
    print(f"\nmilliseconds\n{scales_table(runs)}")
    for text in sorted({text for run in runs for text in run["failures"]}):
        print(f"failed: {text}", file=sys.stderr)
    if args.plot:
        plot_scales(runs, args.plot, f"{target.model}: {len(arrivals)} requests")
    return 1 if any(run["errors"] for run in runs) else 0


def _send(args: argparse.Namespace, target: Target) -> int:
    lengths = args.prompt_tokens or (32, 128), args.output_tokens or (16, 64)
    requests = plan(
        target, args.num_prompts or 32, *lengths, args.disconnect_share or 0.0, args.seed
    )
    load = Load(
        requests=requests,
        arrival=args.arrival or "poisson",
        rate=args.request_rate,
        concurrency=args.concurrency,
        seconds=args.seconds,
        seed=args.seed,
        temperature=args.temperature,
        timeout=args.timeout,
    )
    # One request that does not count: the first one finds every process cold.
    warm_up = plan(target, 1, lengths[0], (1, 1), 0.0, args.seed + 1)
    asyncio.run(Generator(target, Load(requests=warm_up, timeout=args.timeout)).run())
    generator = Generator(target, load)
    total = None if args.seconds else len(requests)
    with tqdm(total=total, unit="req", disable=not sys.stderr.isatty()) as bar:
        asyncio.run(generator.run(bar.update))

    report = {**served_report(generator.records), "client": client_report(generator)}
    print(
        f"{report['completed']} of {report['requests']} requests answered in "
        f"{report['seconds']:.1f} s, {report['left']} left on purpose, {report['errors']} failed\n"
        f"{report['output_tokens_per_second']:.1f} output tokens/s, "
        f"{report['requests_per_second']:.2f} requests/s\n"
    )
    latencies = {
        "first token (TTFT)": report["ttft_seconds"],
        "each further (TPOT)": report["tpot_seconds"],
        "longest pause": report["pause_seconds"],
        "whole request (E2E)": report["e2e_seconds"],
    }
    print(table(latencies, "milliseconds", 1e3))
    for text, count in Counter(r.error for r in generator.records if r.error).most_common(5):
        print(f"failed {count} times: {text}", file=sys.stderr)
    if args.json:
        write_json(args.json, {**report, **_about(args, target)})
    if args.plot:
        plot_served(generator.records, args.plot, f"{target.model}: {report['requests']} requests")
    return 1 if report["errors"] else 0


def _about(args: argparse.Namespace, target: Target) -> dict[str, object]:
    return {
        "model": target.model,
        "host": platform.machine(),
        "arguments": plain_arguments(args),
    }


def plain_arguments(args: argparse.Namespace) -> dict[str, object]:
    """The arguments for the report: no secret, nothing that is not data."""
    return {
        name: value
        for name, value in vars(args).items()
        if name != "api_key" and isinstance(value, str | int | float | tuple | None)
    }
