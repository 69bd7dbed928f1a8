"""A trace replayed on the whole service: `python -m tests.gpu.serving FOLDER [--model NAME] ...`.

`minisgl serve` runs in its own processes with dummy weights on the GPUs that there are, and
`minisgl bench serve` replays bursts of the published workload's shape. Four GPUs get all 1,000
requests; fewer get a part at a lower rate, or a scale would take minutes. JSON and a picture go to
FOLDER.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.gpu.model_folder import CONFIGS, write_model_folder
from tests.gpu.rank_processes import visible_gpus

SHAPES = {1: (200, 4.0), 2: (400, 8.0), 4: (1000, 16.0)}
"""By ranks: requests, and their mean arrivals a second at time scale 1."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="qwen3-32b", help="one of configs, or a folder")
    parser.add_argument("--ranks", type=int, choices=SHAPES, help="default: as many as there are")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--scales", default="0.4,1,1.6")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--serve-args", default="", help="more flags of the server")
    parser.add_argument("--bench-args", default="", help="more flags of the benchmark")
    args = parser.parse_args()
    ranks = args.ranks or max(n for n in SHAPES if n <= max(1, len(visible_gpus())))
    requests, rate = SHAPES[ranks]
    source = Path(args.model) if Path(args.model).is_dir() else CONFIGS / args.model
    name = source.name
    served = write_model_folder(source, Path(tempfile.mkdtemp(prefix="minisgl-")) / name)
    out = args.folder / f"served-{name}-tp{ranks}"
    command = [
        sys.executable, "-m", "minisgl", "bench", "serve", f"--model={served}",
        f"--serve-args=--load-format dummy --device {args.device} --tensor-parallel-size {ranks} "
        f"--served-model-name {name} {args.serve_args}",
        "--trace=bursts", f"--num-prompts={args.requests or requests}",
        f"--request-rate={args.rate or rate}", f"--time-scale={args.scales}",
        f"--json={out}.json", f"--plot={out}.png", *args.bench_args.split(),
    ]  # fmt: skip
    # NVLink multicast stays off where the environment says nothing.
    os.execve(sys.executable, command, {"NCCL_NVLS_ENABLE": "0", **os.environ})


if __name__ == "__main__":
    main()
