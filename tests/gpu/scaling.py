"""How models scale over ranks: `python -m tests.gpu.scaling {speed,load} FOLDER`.

`speed` runs `minisgl bench offline` with dummy weights on 1, 2 and 4 GPUs, as many as there are,
and prints each figure beside what the devices allow at best (`limits.py`). Runs that fit beside
each other on different GPUs run at the same time. JSON files go to FOLDER. `load` writes a
checkpoint of Qwen3-14B's shape with fewer layers into FOLDER and reads it with one process, then
with several at the same time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from minisgl.bench import ending_on_signals
from minisgl.distributed import SingleRank
from minisgl.models.config import load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import load_weights
from tests.gpu.gpu_jobs import Done, Job, run_jobs
from tests.gpu.limits import limit
from tests.gpu.rank_processes import visible_gpus

CONFIGS = Path(__file__).parent / "configs"
LOADED = CONFIGS / "qwen3-14b"
LAYERS = 4
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "": ([], {}),
    "symmetric": ([], {"MINISGL_SYMMETRIC_MEMORY": "1"}),
    "torch": (["--disable-pynccl"], {}),
}
"""Ways to NCCL, with more than one rank."""


def speed_jobs(
    folder: Path, models: list[str], ranks: list[int], ways: list[str], loads: str
) -> list[Job]:
    """The largest first, so that small ones fill the gaps at the end."""
    jobs = []
    for size in sorted(ranks, reverse=True):
        for model in models:
            for way in ways if size > 1 else ways[:1]:
                flags, env = WAYS[way]
                name = f"{model}-tp{size}" + (f"-{way}" if way else "")
                command = [
                    sys.executable, "-m", "minisgl", "bench", "offline",
                    f"--model={CONFIGS / model}", "--load-format=dummy", "--device=cuda",
                    f"--tensor-parallel-size={size}", f"--workload={loads}",
                    f"--json={folder / name}.json", *flags,
                ]  # fmt: skip
                # NVLink multicast stays off where the environment says nothing.
                env = {"NCCL_NVLS_ENABLE": "0", **os.environ, **env}
                jobs.append(Job(name, size, command, env))
    return jobs


def show(folder: Path, done: Done) -> None:
    """A line for each workload of a run, with its share of the limit."""
    name = done.job.name
    if done.code:
        print(f"{name}: code {done.code} after {done.seconds:.0f} s\n{done.output[-2000:]}")
        sys.stdout.flush()
        return
    report = json.loads((folder / f"{name}.json").read_text())
    for run in report.get("runs", [report]):
        load = run["workload_name"]
        least = limit(Path(report["model"]), load, done.job.gpus)
        row = {
            "run": name, "workload": load, "whole_seconds": round(done.seconds, 1),
            "transport": report["start"].get("transport"),
            "prefill_tokens_per_second": round(run["prefill_tokens_per_second"]),
            "prefill_share": round(least.prefill_seconds / run["prefill_seconds"], 3),
            "output_tokens_per_second": round(run["output_tokens_per_second"], 1),
            "output_share": round(
                run["output_tokens_per_second"] / least.output_tokens_per_second, 3
            ),
        }  # fmt: skip
        decoded = run["decode_tokens_per_second"]
        if decoded is not None and least.decode_tokens_per_second is not None:
            row["decode_tokens_per_second"] = round(decoded, 1)
            row["decode_share"] = round(decoded / least.decode_tokens_per_second, 3)
        print(json.dumps(row), flush=True)


class Part(SingleRank):
    """A rank that is only asked which part it holds."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def model_of(folder: Path, rank: int, size: int) -> CausalLM:
    """The network of one rank, still without weights."""
    device = torch.device("cuda", 0)
    return CausalLM(load_model_config(folder), torch.bfloat16, Part(rank, size), device)


def write_checkpoint(folder: Path) -> None:
    """Random weights in files of about 4 GiB, as published checkpoints have."""
    from safetensors.torch import save_file

    config = json.loads((LOADED / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files: list[dict[str, torch.Tensor]] = [{}]
    held = 0
    for piece in model_of(folder, 0, 1).pieces():
        tensor = torch.randn(piece.shape, device="cuda", dtype=torch.bfloat16).cpu()
        if held > 4 << 30:
            files.append({})
            held = 0
        files[-1][piece.source] = tensor
        held += tensor.nbytes
    index = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / name)
        index.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def load_one(folder: Path, rank: int, size: int) -> None:
    """Read one rank's part, and print how long that took."""
    torch.zeros(1, device="cuda")
    model = model_of(folder, rank, size)
    began = time.monotonic()
    total = load_weights(model, folder, torch.device("cuda", 0))
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    print(json.dumps({"rank": rank, "of": size, "gib": round(total / 2**30, 2),
                      "seconds": round(seconds, 2)}), flush=True)  # fmt: skip


def load(folder: Path) -> None:
    """Print the slowest rank of 1, 2 and 4, each twice: the first may find cold pages."""
    began = time.monotonic()
    write_checkpoint(folder)
    print(json.dumps({"written_seconds": round(time.monotonic() - began, 1)}), flush=True)
    for size in [size for size in (1, 2, 4) if size <= len(visible_gpus())] * 2:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.scaling", "load-one", str(folder), str(rank),
                 str(size)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible_gpus()[rank]},
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        ranks: list[dict[str, Any]] = [
            json.loads(process.communicate(timeout=120)[0].splitlines()[-1])
            for process in processes
        ]
        slowest = max(rank["seconds"] for rank in ranks)
        print(json.dumps({"ranks": size, "seconds": slowest, "each": ranks}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("speed")
    timed.add_argument("folder", type=Path)
    timed.add_argument("--models", default="qwen3-32b,qwen3-14b,qwen3-30b-a3b")
    timed.add_argument("--ranks", default="1,2,4")
    timed.add_argument("--ways", default="", help="of '', symmetric, torch")
    timed.add_argument("--workloads", default="nano,decode-1,decode-32")
    read = commands.add_parser("load")
    read.add_argument("folder", type=Path)
    one = commands.add_parser("load-one")
    one.add_argument("folder", type=Path)
    one.add_argument("rank", type=int)
    one.add_argument("size", type=int)
    args = parser.parse_args()
    if args.command == "speed":
        jobs = speed_jobs(
            args.folder, args.models.split(","), [int(n) for n in args.ranks.split(",")],
            args.ways.split(","), args.workloads,
        )  # fmt: skip
        with ending_on_signals():
            run_jobs(jobs, visible_gpus(), lambda done: show(args.folder, done))
    elif args.command == "load":
        load(args.folder)
    else:
        load_one(args.folder, args.rank, args.size)


if __name__ == "__main__":
    main()
