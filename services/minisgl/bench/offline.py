"""`minisgl bench offline`: throughput of the engine alone, or host time of its scheduler."""

import argparse
import dataclasses
import platform
import time
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from minisgl.bench import ending_on_signals
from minisgl.bench.arguments import lengths, output_file, positive_int, token_range
from minisgl.bench.compare import command as comparison
from minisgl.bench.stats import summary, table, write_json
from minisgl.bench.trace import Trace
from minisgl.cli.flags import add_flags, from_args, given_values
from minisgl.config import EngineConfig, UsageError
from minisgl.messages import SamplingParams

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.llm.answers import StepTimes


@dataclasses.dataclass(frozen=True)
class Workload:
    """Random prompts with lengths uniform in closed ranges, in tokens."""

    num_prompts: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its output."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    def __str__(self) -> str:
        sequences = "1 sequence" if self.num_prompts == 1 else f"{self.num_prompts} sequences"
        prompt, output = (
            str(low) if low == high else f"{low}-{high}"
            for low, high in (self.prompt_tokens, self.output_tokens)
        )
        return f"{sequences} of {prompt} prompt and {output} output tokens"


LAST_ID = 10_000
"""Prompts hold ids up to this one."""
WORKLOADS = {
    "small": Workload(8, (16, 64), (16, 64)),
    "nano": Workload(256, (100, 1024), (100, 1024)),
    "decode-1": Workload(1, (128, 128), (512, 512)),
    "decode-8": Workload(8, (128, 128), (512, 512)),
    "decode-32": Workload(32, (128, 128), (512, 512)),
    "prefill-1x128": Workload(1, (128, 128), (1, 1)),
    "prefill-1x8000": Workload(1, (8000, 8000), (1, 1)),
    "prefill-64x1024": Workload(64, (1024, 1024), (1, 1)),
}


def workload_names(text: str) -> tuple[str, ...]:
    """`nano` or `decode-1,decode-8`."""
    names = tuple(text.split(","))
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--model", help="folder or Hugging Face id; optional with --fake-engine")
    parser.add_argument(
        "--workload",
        type=workload_names,
        metavar="NAME,...",
        help="one or several, on one engine. "
        + "; ".join(f"{name}: {load}" for name, load in WORKLOADS.items())
        + " (default: small; the next three flags change it)",
    )
    parser.add_argument(
        "--repeat",
        type=positive_int,
        metavar="N",
        help="runs of each workload, each with other prompts; the one with the median time is "
        "reported (default: 1)",
    )
    parser.add_argument(
        "--profile",
        type=output_file,
        metavar="FILE",
        help="write a trace of some steps, host and device, for `bench timeline`, chrome://tracing "
        "or Perfetto; FILE ends in .json or .json.gz, and gets the workload's name before that if "
        "there are several",
    )
    parser.add_argument(
        "--profile-steps",
        type=token_range,
        metavar="FIRST-LAST",
        default=(100, 110),
        help="which steps (default: 100-110)",
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
    comparison.add_arguments(parser)
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
    """Measure and report; 0, or 1 if a system failed that was to be compared.

    Raises `UsageError` and `StartError`.
    """
    with ending_on_signals():
        if hasattr(args, "fake_engine"):
            report = _time_steps(args)
        elif not args.model:
            raise UsageError("--model is missing: a folder or a Hugging Face id (or --fake-engine)")
        else:
            report = (comparison.compare if comparison.wanted(args) else _throughput)(args)
    report["host"] = platform.machine()
    if args.json:
        write_json(args.json, report)
    return 1 if report.get("failed") else 0


def _time_steps(args: argparse.Namespace) -> dict[str, Any]:
    from minisgl.bench.steps import VOCAB_SIZE, measure

    given = (f.name for f in dataclasses.fields(Workload))
    for name in ("workload", "compare", "batches", "contexts", *given):
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
    from minisgl.llm import LLM  # torch: not for help and usage errors

    loads = workloads(args)
    options = given_values(EngineConfig, args)
    runs: list[dict[str, Any]] = []
    with LLM(**options) as llm:
        for load in loads.values():
            if load.longest > llm.max_model_len:
                raise UsageError(
                    f"a sequence of {load.longest} tokens does not fit: prompt and output may have "
                    f"{llm.max_model_len} tokens; see --prompt-tokens, --output-tokens, --num-pages"
                )
        warm_up = SamplingParams(max_tokens=2, ignore_eos=True)
        llm.generate([[1] * 8], warm_up)
        for name, load in loads.items():
            timed = [
                _run_once(llm, load, args.temperature, llm.config.seed + i)
                for i in range(args.repeat or 1)
            ]
            timed.sort(key=lambda run: run["seconds"])
            run = timed[(len(timed) - 1) // 2]
            run["all_seconds"] = [one["seconds"] for one in timed]
            runs.append({"workload_name": name, "workload": dataclasses.asdict(load), **run})
            _show(load, run)
            if args.profile:  # a run of its own: what is watched is slower
                trace = Trace(_of_workload(args.profile, name, len(loads)), args.profile_steps)
                _run_once(llm, load, args.temperature, llm.config.seed + len(timed), trace)
        start = dict(llm.start_report)
    common = {"model": args.model, "options": options, "start": start}
    return common | (runs[0] if len(runs) == 1 else {"runs": runs})


def _run_once(
    llm: "LLM", load: Workload, temperature: float, seed: int, trace: Trace | None = None
) -> dict[str, Any]:
    """One pass over a workload: the time of prompts ends when every request has its first token."""
    prompts, sampling = requests(load, llm.tokenizer.vocab_size, temperature, seed)
    times: list[StepTimes] = []

    def on_step(step: "StepTimes") -> None:
        times.append(step)
        if trace is not None:
            trace.after_step(len(times))

    llm.on_step = on_step
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    llm.on_step = None
    if trace is not None:
        trace.close()
    prompt_tokens = sum(o.prompt_tokens for o in outputs)
    output_tokens = sum(len(o.token_ids) for o in outputs)
    prefill = first_token_seconds(times, load.num_prompts)
    decoding = sum(step.seconds for step in times) - prefill
    decoded = sum(step.tokens for step in times[_prefill_steps(times, load.num_prompts) :])
    steps = [step.seconds for step in times]
    return {
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(o.cached_tokens for o in outputs),
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / seconds,
        "total_tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": prompt_tokens / prefill,
        "decode_seconds": decoding,
        "decode_tokens_per_second": decoded / decoding if decoded else None,
        "steps": len(steps),
        "step_seconds": summary(steps),
        "host_seconds": summary([step.seconds - step.waited for step in times]),
    }


def _of_workload(path: str, name: str, workloads: int) -> str:
    """The file for one of several workloads."""
    stem, dot, end = path.partition(".json")
    return path if workloads == 1 else f"{stem}-{name}{dot}{end}"


def _prefill_steps(times: "Sequence[StepTimes]", requests: int) -> int:
    """Turns of the loop until every request has its first token."""
    seen = 0
    for i, step in enumerate(times):
        seen += step.first_tokens
        if seen >= requests:
            return i + 1
    return len(times)


def first_token_seconds(times: "Sequence[StepTimes]", requests: int) -> float:
    """Time until every one of the requests has its first token."""
    return sum(step.seconds for step in times[: _prefill_steps(times, requests)])


def _show(load: Workload, run: dict[str, Any]) -> None:
    print(
        f"{load}: {run['seconds']:.3f} s\n{run['output_tokens']} output tokens, "
        f"{run['output_tokens_per_second']:.1f} per second; with {run['prompt_tokens']} prompt "
        f"tokens {run['total_tokens_per_second']:.1f} per second\nfirst tokens of all after "
        f"{run['prefill_seconds'] * 1e3:.1f} ms ({run['prefill_tokens_per_second']:.0f} prompt "
        "tokens per second)"
    )
    if run["decode_tokens_per_second"] is not None:
        print(f"then {run['decode_tokens_per_second']:.1f} output tokens per second")
    print(f"{run['steps']} steps\n")
    rows = {"all steps": run["step_seconds"], "of them the host": run["host_seconds"]}
    print(table(rows, "milliseconds a step", 1e3))


def workloads(args: argparse.Namespace) -> dict[str, Workload]:
    """The named workloads with what the flags change."""
    given = {
        f.name: value
        for f in dataclasses.fields(Workload)
        if (value := getattr(args, f.name)) is not None
    }
    names = args.workload or ("small",)
    return {name: dataclasses.replace(WORKLOADS[name], **given) for name in names}


def requests(
    load: Workload, vocab_size: int, temperature: float, seed: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random token ids and the sampling of each; every output has its full length.

    With seed 0 `nano` is what nano-vllm and Mini-SGLang measure, to the last token: all prompts in
    order, each its length and then its ids, then the lengths of all outputs.
    """
    random = Random(seed)
    last = min(LAST_ID, vocab_size - 1)
    prompts = [
        [random.randint(0, last) for _ in range(random.randint(*load.prompt_tokens))]
        for _ in range(load.num_prompts)
    ]
    sampling = [
        SamplingParams(
            temperature=temperature, max_tokens=random.randint(*load.output_tokens), ignore_eos=True
        )
        for _ in range(load.num_prompts)
    ]
    return prompts, sampling
