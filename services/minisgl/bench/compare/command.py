"""The part of `minisgl bench offline` that measures a grid of batches and prompt lengths, with
`--compare` also of other systems."""

import argparse
import dataclasses
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from minisgl import __version__
from minisgl.bench.arguments import lengths, picture_file, positive
from minisgl.bench.compare import llama_cpp
from minisgl.bench.compare.contender import (
    Cell,
    Contender,
    Failed,
    Grid,
    Times,
    run_command,
)
from minisgl.bench.compare.cpu import Cpu, this_cpu
from minisgl.bench.compare.report import figures, phase_table, plot_comparison, ratio_table
from minisgl.bench.compare.worker import EXTRA_TOKENS, Task, worker_command
from minisgl.bench.plot import check_plotting
from minisgl.cli.flags import given_values
from minisgl.config import EngineConfig, StartError, UsageError

OURS = "minisgl"
MAX_BATCH = 64
_MODE = "--compare, --batches and --contexts"


def batches(text: str) -> tuple[int, ...]:
    """`1,16`, each at most 64."""
    found = lengths(text)
    if max(found) > MAX_BATCH:
        raise argparse.ArgumentTypeError(f"at most {MAX_BATCH} sequences at a time, not {text!r}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    group = parser.add_argument_group(
        f"with {_MODE}",
        "tokens a second on a CPU for each batch with each prompt length, in bfloat16\n"
        "unless --dtype says otherwise. Each system runs in a process of its own with\n"
        "equal threads, once in each of --repeat rounds (default: 3). Prefill gives every\n"
        "sequence its first token; --output-tokens N (default: 128) come in decoding.",
    )
    group.add_argument(
        "--compare",
        action="append",
        choices=tuple(RIVALS),
        help="also measure this one; may be repeated. llama.cpp takes Q8_0 with --quantization "
        "int8 (default: the engine alone)",
    )
    group.add_argument(
        "--batches",
        type=batches,
        metavar="N,N,...",
        help=f"sequences at a time, 1 to {MAX_BATCH} (default: 1,16)",
    )
    group.add_argument(
        "--contexts", type=lengths, metavar="N,N,...", help="tokens of each prompt (default: 128)"
    )
    group.add_argument(
        "--gguf",
        metavar="FILE",
        help="what llama.cpp loads (default: made of --model, and removed at the end)",
    )
    group.add_argument(
        "--timeout",
        type=positive,
        default=900.0,
        metavar="N",
        help="time that one system gets for a round, in seconds (default: 900)",
    )
    group.add_argument(
        "--phases",
        action="store_true",
        help="measure once more where the engine's time goes, by the phases of its CPU kernels "
        "(default: off)",
    )
    group.add_argument("--plot", type=picture_file, metavar="FILE.png", help="draw the rates")


def wanted(args: argparse.Namespace) -> bool:
    """Whether the flags ask for it."""
    return bool(args.compare or args.batches or args.contexts)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print and draw; the report, whose `failed` says which rivals failed and why.

    Raises `UsageError` and `StartError`.
    """
    if args.plot:
        check_plotting()
    cpu = this_cpu()
    task = _task(args, cpu.threads)
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as scratch:
        weights = "int8" if task.options.get("quantization") == "int8" else task.dtype
        systems = [Contender(OURS, __version__, weights, worker_command(OURS, task))]
        for name in dict.fromkeys(args.compare or ()):
            systems.append(RIVALS[name](task, args.gguf, Path(scratch), cpu))
        for system in systems:
            print(f"{system.name}: {system.version}, {system.weights}", flush=True)
        rounds, failed = take_turns(systems, task.grid, args.repeat or 3, args.timeout)
        phases = _phases(task, args.timeout) if args.phases else []
    systems = [system for system in systems if system.name not in failed]
    rows = figures(task.grid, {system.name: rounds[system.name] for system in systems}, OURS)
    title = f"{Path(args.model).name} on {cpu.threads} threads of {cpu.name}"
    count = len(rounds[OURS])
    of_rounds = f"medians of {count} rounds" if count > 1 else "one round"
    print(
        f"\n{title}\n{of_rounds}, {task.grid.output_tokens} output tokens\n\n"
        f"{ratio_table(rows, OURS)}"
    )
    if phases:
        print(f"\nwhere the time of a step goes\n{phase_table(phases)}")
    for name, why in failed.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    if args.plot:
        plot_comparison(rows, systems, args.plot, title)
    return {
        "model": args.model,
        "cpu": {"name": cpu.name, "threads": cpu.threads, "flags": sorted(cpu.flags)},
        "output_tokens": task.grid.output_tokens,
        "options": task.options,
        "systems": {s.name: {"version": s.version, "weights": s.weights} for s in systems},
        "failed": failed,
        "rates": rows,
        "phases": phases,
    }


def _task(args: argparse.Namespace, threads: int) -> Task:
    """What all systems compute. Raises `UsageError` for flags and lengths that do not fit."""
    from minisgl.hub import resolve_model
    from minisgl.models.config import load_model_config

    for name in ("workload", "num_prompts", "prompt_tokens", "profile"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} does not go with {_MODE}")
    least, most = args.output_tokens or (128, 128)
    if least != most:
        raise UsageError(f"--output-tokens must be one number with {_MODE}, not {least}-{most}")
    options = {"device": "cpu", "dtype": "bfloat16"} | given_values(EngineConfig, args)
    config = EngineConfig(**options)
    if config.device != "cpu":
        raise UsageError(f"--device {config.device} does not go with {_MODE}: they are for a CPU")
    folder = resolve_model(config.model)
    model = load_model_config(folder)
    grid = Grid(args.batches or (1, 16), args.contexts or (128,), most)
    limit, longest = config.max_seq_len or model.max_model_len, grid.longest + EXTRA_TOKENS
    if longest > limit:
        raise UsageError(
            f"{longest} tokens do not fit into a sequence of at most {limit}; see --contexts and "
            "--output-tokens"
        )
    del options["model"]
    return Task(
        model=str(folder),
        grid=grid,
        vocab_size=model.vocab_size,
        threads=threads,
        seed=config.seed,
        dtype=model.dtype if config.dtype == "auto" else config.dtype,
        options=options,
    )


def _phases(task: Task, seconds: float) -> list[dict[str, Any]]:
    """What `worker.phases` prints. Raises `StartError`."""
    try:
        found = [*run_command(worker_command("phases", task), {}, seconds).objects]
    except Failed as error:
        raise StartError(f"--phases: {error}") from None
    phases = [line for line in found if {"phase", "seconds"} <= line.keys()]
    if not phases:
        raise StartError(
            "--phases: torch computes here, whose operators have none; see --attention-backend, "
            "--dtype, and the log for what the kernels lack"
        )
    return phases


def _llama_cpp(task: Task, given: str | None, scratch: Path, cpu: Cpu) -> Contender:
    from minisgl.bench.compare.gguf_file import check_gguf, write_gguf
    from minisgl.models.config import load_model_config

    weights = "Q8_0" if task.options.get("quantization") == "int8" else task.dtype
    llama_cpp.check_installed(cpu.flags)
    if given is not None:
        file, weights = Path(given), Path(given).name
        if not file.is_file():
            raise UsageError(f"--gguf: there is no file {given}")
    else:
        file, model = scratch / "model.gguf", load_model_config(task.model)
        check_gguf(model)
        write_gguf(Path(task.model), model, file, weights)
    return llama_cpp.find(dataclasses.replace(task, model=str(file)), weights, cpu.flags)


def _transformers(task: Task, given: str | None, scratch: Path, cpu: Cpu) -> Contender:
    version = f"{metadata.version('transformers')} with torch {metadata.version('torch')}"
    return Contender(
        "transformers", version, task.dtype, worker_command("transformers", task),
        environment={"OMP_NUM_THREADS": str(task.threads)},
    )  # fmt: skip


RIVALS: dict[str, Callable[[Task, str | None, Path, Cpu], Contender]] = {
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}
"""By name: makes it ready. Each raises `UsageError` if something must be installed first."""


def take_turns(
    systems: Sequence[Contender], grid: Grid, rounds: int, seconds: float
) -> tuple[dict[str, list[dict[Cell, Times]]], dict[str, str]]:
    """Run every system once in each round, each round starting with another: (times, failures).

    A rival that fails is left out from then on. Raises `StartError` if the engine itself fails.
    """
    found: dict[str, list[dict[Cell, Times]]] = defaultdict(list)
    failed: dict[str, str] = {}
    for turn in range(rounds):
        first = turn % len(systems)
        for system in (*systems[first:], *systems[:first]):
            if system.name in failed:
                continue
            try:
                times = system.measure(grid.cells, seconds)
            except Failed as error:
                if system.name == OURS:
                    raise StartError(f"{OURS} failed: {error}") from None
                failed[system.name] = str(error)
                print(f"round {turn + 1}, {system.name} failed: {error}", flush=True)
                continue
            found[system.name].append(times)
            total = sum(t.prefill + t.decode for t in times.values())
            print(f"round {turn + 1}, {system.name}: {total:.1f} s", flush=True)
    return found, failed
