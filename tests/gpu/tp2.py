"""One rank and two on Qwen3-14B's shape: `python -m tests.gpu.tp2 {speed,load} [FOLDER]`.

`speed` runs `minisgl bench offline` with dummy weights: throughput, and decoding of 1, 8 and 32
requests. `load` writes a checkpoint of that shape with fewer layers into FOLDER and reads it with
one process, then with two at the same time. JSON files of `speed` go to FOLDER.
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

from minisgl.distributed import SingleRank
from minisgl.models.config import load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import load_weights
from tests.gpu.pairs import visible_gpus

CONFIG = Path(__file__).parent / "configs" / "qwen3-14b"
LAYERS = 4
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "tp1": (["--tensor-parallel-size=1"], {}),
    "tp2": (["--tensor-parallel-size=2"], {}),
    "tp2-symmetric": (["--tensor-parallel-size=2"], {"MINISGL_SYMMETRIC_MEMORY": "1"}),
    "tp2-torch": (["--tensor-parallel-size=2", "--disable-pynccl"], {}),
}


def speed(folder: Path, names: list[str], loads: str) -> None:
    """Print a line for each run and workload."""
    for name in names:
        flags, env = RUNS[name]
        out = folder / f"qwen3-14b-{name}.json"
        command = [
            sys.executable, "-m", "minisgl", "bench", "offline", f"--model={CONFIG}",
            "--load-format=dummy", "--device=cuda", f"--workload={loads}", f"--json={out}", *flags,
        ]  # fmt: skip
        began = time.monotonic()
        done = subprocess.run(
            command, env={"NCCL_NVLS_ENABLE": "0", **os.environ, **env}, capture_output=True,
            text=True, timeout=240,
        )  # fmt: skip
        seconds = round(time.monotonic() - began, 1)
        if done.returncode:
            print(f"{name}: code {done.returncode}\n{done.stderr[-2000:]}", flush=True)
            continue
        report = json.loads(out.read_text())
        for run in report.get("runs", [report]):
            print(json.dumps({
                "run": name, "workload": run["workload_name"],
                "output_tokens_per_second": round(run["output_tokens_per_second"], 1),
                "decode_tokens_per_second": run["decode_tokens_per_second"],
                "prefill_tokens_per_second": round(run["prefill_tokens_per_second"]),
                "transport": report["start"].get("transport"), "whole_seconds": seconds,
            }), flush=True)  # fmt: skip


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

    config = json.loads((CONFIG / "config.json").read_text())
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
    """Print the slowest rank of one and of two, each twice: the first may find cold pages."""
    began = time.monotonic()
    write_checkpoint(folder)
    print(json.dumps({"written_seconds": round(time.monotonic() - began, 1)}), flush=True)
    for size in (1, 2, 1, 2):
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.tp2", "load-one", str(folder), str(rank),
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
    timed.add_argument("--runs", default=",".join(RUNS))
    timed.add_argument("--workloads", default="nano,decode-1,decode-8,decode-32")
    read = commands.add_parser("load")
    read.add_argument("folder", type=Path)
    one = commands.add_parser("load-one")
    one.add_argument("folder", type=Path)
    one.add_argument("rank", type=int)
    one.add_argument("size", type=int)
    args = parser.parse_args()
    if args.command == "speed":
        speed(args.folder, args.runs.split(","), args.workloads)
    elif args.command == "load":
        load(args.folder)
    else:
        load_one(args.folder, args.rank, args.size)


if __name__ == "__main__":
    main()
