"""Where the time of a product of some tokens goes: it is timed with parts of it left out.

    python -m tests.gpu.wide_linear_parts

Results are wrong, of course. Microseconds in a graph of many products with weights of their own.
"""

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from minisgl.bench.device import time_on_device
from minisgl_kernels import wide_linear as module
from minisgl_kernels.build import CSRC
from minisgl_kernels.cuda_build import cuda_module
from minisgl_kernels.wide_linear import Blocks
from tests.gpu.wide_linear_speed import MODELS, SECONDS, made, wide

Case = tuple[int, int, Blocks]
"""A product of a layer, tokens, and how it is cut."""

LEFT_OUT = {
    "products": [("multiply<TOKENS / 8>(sum, a + 2 * part, b + 2 * part);", ";")],
    "tokens": [
        ("copy_tokens(i, i);", ";"), ("copy_tokens(i, stage);", ";"),
        ("arrive_expecting(barrier, kStageBytes);",
         "arrive_expecting(barrier, kRows * kRowBytes);"),
    ],
    "sums": [("begin < kTurns;", "begin < 0;")],
    "early weights": [
        ("    for (int i = 0; i < ahead; ++i) copy_weights(i, i);\n", ""),
        ("      publish_memory();",
         "for (int i = 0; i < ahead; ++i) copy_weights(i, i);\n publish_memory();"),
    ],
}  # fmt: skip
CASES: tuple[Case, ...] = (
    (0, 16, Blocks(1)), (0, 64, Blocks(1)), (0, 176, Blocks(2, 1, 2)), (0, 176, Blocks(2, 2)),
    (1, 16, Blocks(1, 4)), (1, 176, Blocks(2, 4, 2)), (2, 176, Blocks(2, 1, 2)),
)  # fmt: skip
WITHOUT: tuple[tuple[str, ...], ...] = (
    (), ("products",), ("tokens",), ("sums",), ("products", "sums"), ("products", "tokens"),
    ("products", "tokens", "sums"), ("early weights",),
)  # fmt: skip


def compiled(folder: Path, case: Case, without: tuple[str, ...]) -> object:
    """The kernel for a case, without some parts."""
    text = (CSRC / "wide_linear.cu").read_text()
    for part in without:
        for old, new in LEFT_OUT[part]:
            assert old in text, old
            text = text.replace(old, new)
    folder = folder / "-".join(map(str, (*signature(case), *without))).replace(" ", "_")
    folder.mkdir()
    for name in ("common.cuh", "tensor_core.cuh", "hopper.cuh"):
        shutil.copy(CSRC / name, folder)
    (folder / "wide_linear.cu").write_text(text)
    macros = module._macros(*signature(case))
    return cuda_module("wide_linear", macros, csrc=folder).wide_linear


def signature(case: Case) -> tuple[int, ...]:
    """The key of a case's kernel."""
    index, tokens, cut = case
    return module.signature(tokens, cut, MODELS["0.6b"][index].mode)


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(16) as pool:
        found = {
            (case, without): pool.submit(compiled, Path(folder), case, without)
            for case in CASES for without in WITHOUT
        }  # fmt: skip
        kernels = {key: kernel.result() for key, kernel in found.items()}
    for case in CASES:
        index, tokens, cut = case
        rows, k, mode = MODELS["0.6b"][index]
        weights = [made(rows, k) for _ in range(150_000_000 // (rows * k * 2))]
        x, residual = made(tokens, k), made(tokens, rows)
        figures = []
        for without in WITHOUT:
            module._family._made[signature(case)] = kernels[case, without]
            call = partial(wide, mode, cut, residual)
            took = 1e6 * time_on_device(call, [(x, w) for w in weights], SECONDS)
            figures.append(f"{'+'.join(without) or 'whole'} {took:.2f}")
        del module._family._made[signature(case)]
        print(f"{rows}x{k}", tokens, cut[:3], "| without", ", ".join(figures), flush=True)


if __name__ == "__main__":
    main()
