"""`minisgl bench offline`: throughput of the engine alone, or host time of its scheduler."""

import argparse
import dataclasses
import platform
import time
from typing import Any

import numpy as np

from minisgl.bench import ending_on_signals
from minisgl.bench.arguments import lengths, output_file, positive_int, token_range
from minisgl.bench.stats import summary, table, write_json
from minisgl.cli.flags import add_flags, from_args
from minisgl.config import EngineConfig, UsageError
from minisgl.messages import SamplingParams


@dataclasses.dataclass(frozen=True)
class Workload:
    """Random prompts with lengths uniform in closed ranges, in tokens."""

    num_prompts: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def __str__(self) -> str:
        ranges = "{}-{} prompt and {}-{} output tokens"
        return f"{self.num_prompts} sequences of " + ranges.format(
            *self.prompt_tokens, *self.output_tokens
        )


WORKLOADS = {
    "small": Workload(8, (16, 64), (16, 64)),
    "nano": Workload(256, (100, 1024), (100, 1024)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--model", help="folder or Hugging Face id; optional with --fake-engine")
    parser.add_argument(
        "--workload",
        choices=tuple(WORKLOADS),
        help="; ".join(f"{name}: {load}" for name, load in WORKLOADS.items())
        + " (default: small; the next three flags change it)",
    )
    parser.add_argument(
        "--num-prompts", type=positive_int, metavar="N", help="sequences to compute"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=token_range,
        metavar="MIN-MAX",
        help="length of the prompts in tokens, uniform in this range",
    )
    parser.add_argument(
        "--output-tokens",
        type=token_range,
        metavar="MIN-MAX",
        help="length of the outputs in tokens, uniform in this range",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="N",
        default=0.6,
        help="sampling temperature, 0 to 2 (default: 0.6)",
    )
    fake = parser.add_argument_group(
        "with --fake-engine", "host time of one decode step, at several lengths"
    )
    fake.add_argument(
        "--requests",
        type=positive_int,
        metavar="N",
        default=256,
        help="requests that decode at the same time (default: 256)",
    )
    fake.add_argument(
        "--lengths",
        type=lengths,
        default=(500, 2000, 4000, 8000),
        metavar="N,N,...",
        help="tokens of each of them, one run each (default: 500,2000,4000,8000)",
    )
    fake.add_argument(
        "--steps",
        type=positive_int,
        metavar="N",
        default=1000,
        help="steps to time in a run (default: 1000)",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures to this file"
    )
    add_flags(parser, EngineConfig, "engine")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0. Raises `UsageError` and `StartError`."""
    with ending_on_signals():
        report = _time_steps(args) if hasattr(args, "fake_engine") else _throughput(args)
    report["host"] = platform.machine()
    if args.json:
        write_json(args.json, report)
    return 0


def _time_steps(args: argparse.Namespace) -> dict[str, Any]:
    from minisgl.bench.steps import VOCAB_SIZE, measure

    for name in ("workload", *(f.name for f in dataclasses.fields(Workload))):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} does not go with --fake-engine: see --requests and --lengths")
    vocab_size = VOCAB_SIZE
    if args.model:
        from minisgl.hub import resolve_model
        from minisgl.models.config import load_model_config

        vocab_size = load_model_config(resolve_model(args.model)).vocab_size
    config = from_args(
        EngineConfig, args, model=args.model or "none", max_running_requests=args.requests
    )
    report = measure(config, args.lengths, args.requests, args.steps, config.seed, vocab_size)
    loop = "overlap" if config.overlaps else "sequential"
    print(
        f"{args.requests} decoding requests, {args.steps} steps each, page size "
        f"{report['page_size']}, {loop} loop\n"
    )
    rows = {f"at {n} tokens": figures for n, figures in report["step_seconds"].items()}
    print(table(rows, "milliseconds a step", 1e3))
    print(
        f"\nmedian at {max(args.lengths)} tokens / at {min(args.lengths)} tokens: "
        f"{report['growth']:.2f}"
    )
    return report


def _throughput(args: argparse.Namespace) -> dict[str, Any]:
    if not args.model:
        raise UsageError("--model is missing: a folder or a Hugging Face id (or --fake-engine)")
    from minisgl.llm import LLM  # torch: not for help and usage errors

    load = workload(args)
    options = {
        f.name: getattr(args, f.name) for f in dataclasses.fields(EngineConfig) if f.name in args
    }
    steps: list[float] = []
    with LLM(**options) as llm:
        prompts, sampling = requests(
            load, llm.tokenizer.vocab_size, args.temperature, llm.config.seed
        )
        longest = max(len(p) + (s.max_tokens or 0) for p, s in zip(prompts, sampling, strict=True))
        if longest > llm.max_model_len:
            raise UsageError(
                f"a sequence of {longest} tokens does not fit: prompt and output may have "
                f"{llm.max_model_len} tokens; see --prompt-tokens, --output-tokens, --num-pages"
            )
        llm.generate([prompts[0][:8]], SamplingParams(max_tokens=2, ignore_eos=True))
        llm.on_step = steps.append
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        seconds = time.perf_counter() - start
    prompt_tokens = sum(o.prompt_tokens for o in outputs)
    output_tokens = sum(len(o.token_ids) for o in outputs)
    report = {
        "model": args.model,
        "workload": dataclasses.asdict(load),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "steps": len(steps),
        "step_seconds": summary(steps),
    }
    print(
        f"{load}: {seconds:.2f} s\n{output_tokens} output tokens, "
        f"{report['output_tokens_per_second']:.1f} per second; with {prompt_tokens} prompt tokens "
        f"{report['total_tokens_per_second']:.1f} per second\n{len(steps)} steps\n"
    )
    print(table({"all steps": summary(steps)}, "milliseconds a step", 1e3))
    return report


def workload(args: argparse.Namespace) -> Workload:
    """The named workload with what the flags change."""
    given = {
        f.name: value
        for f in dataclasses.fields(Workload)
        if (value := getattr(args, f.name)) is not None
    }
    return dataclasses.replace(WORKLOADS[args.workload or "small"], **given)


def requests(
    load: Workload, vocab_size: int, temperature: float, seed: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random token ids and the sampling of each; every output has its full length."""
    rng = np.random.default_rng(seed)
    prompts, sampling = [], []
    for _ in range(load.num_prompts):
        size = int(rng.integers(*load.prompt_tokens, endpoint=True))
        prompts.append(rng.integers(0, vocab_size, size).tolist())
        most = int(rng.integers(*load.output_tokens, endpoint=True))
        sampling.append(SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=True))
    return prompts, sampling
