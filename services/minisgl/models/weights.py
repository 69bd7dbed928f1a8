"""Weights from safetensors files, tensor by tensor, or random ones."""

import logging
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from minisgl.config import StartError
from minisgl.hub import read_json
from minisgl.layers.base import BaseOP, Piece

_log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED_DTYPES = ("F32", "BF16", "F16")


def load_weights(
    model: BaseOP, folder: str | Path, device: torch.device, progress: bool = False
) -> int:
    """Fill the model's parameters from the checkpoint in `folder`: bytes read by this rank.

    Each tensor is read for this rank's part only, goes to its place on the device, and is let go
    before the next one. `progress` shows a bar with the rate on stderr. `StartError` names the
    file and the tensor that is missing, has another shape or type, or cannot be read.
    """
    folder = Path(folder)
    files = _tensor_files(folder)
    by_file: dict[Path, list[Piece]] = defaultdict(list)
    pieces = list(model.pieces())
    for piece in pieces:
        if piece.source not in files:
            raise StartError(f"{folder}: tensor {piece.source} is missing from the checkpoint")
        by_file[files[piece.source]].append(piece)
    _refuse_unknown(files, {p.source for p in pieces})
    state = _materialise(model, device)
    total = sum(_count(p) * state[p.target].element_size() for p in pieces)
    began = time.monotonic()
    with tqdm(
        total=total,
        disable=None if progress else True,
        unit="B",
        unit_scale=True,
        desc="loading weights",
    ) as bar:
        for path, group in sorted(by_file.items()):
            _read_file(path, group, state, bar.update)
    seconds = time.monotonic() - began
    _log.info(
        "weights loaded gib=%.2f seconds=%.1f mib_per_second=%.0f",
        total / 2**30, seconds, total / 2**20 / max(seconds, 1e-6),
    )  # fmt: skip
    return total


def dummy_weights(model: BaseOP, device: torch.device, seed: int) -> None:
    """Fill the model's parameters with random numbers: the same model for any number of ranks."""
    state = _materialise(model, device)
    generator = torch.Generator(device)
    for piece in model.pieces():
        generator.manual_seed(zlib.crc32(f"{seed}/{piece.source}".encode()))
        if len(piece.shape) == 1:
            # norms that keep the scale, biases that keep out of the way
            value = 1.0 if piece.source.endswith("norm.weight") else 0.0
            whole = torch.full(piece.shape, value, device=device)
        else:
            target = state[piece.target]
            whole = torch.empty(piece.shape, dtype=target.dtype, device=device)
            whole.normal_(std=1 / math.sqrt(piece.shape[-1]), generator=generator)
        state[piece.target][piece.put].copy_(whole[piece.take])


def _materialise(model: BaseOP, device: torch.device) -> dict[str, torch.Tensor]:
    """Give the model real parameters, all zero."""
    wanted = model.state_dict()
    try:
        state = {
            name: torch.zeros(meta.shape, dtype=meta.dtype, device=device)
            for name, meta in wanted.items()
        }
    except RuntimeError:  # torch.OutOfMemoryError, or what the CPU's allocator raises
        gib = sum(meta.numel() * meta.element_size() for meta in wanted.values()) / 2**30
        raise StartError(
            f"not enough memory on {device} for {gib:.1f} GiB of weights; use more ranks "
            "(--tensor-parallel-size) or a smaller model"
        ) from None
    model.load_state_dict(state)
    return state


def _count(piece: Piece) -> int:
    return math.prod(s.stop - s.start for s in piece.take)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor. A single file goes before an index, as in transformers."""
    single, index = folder / SINGLE, folder / INDEX
    if index.exists() and not single.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in names.values()
        ):
            raise StartError(f"{index}: weight_map must be an object of file names by tensor")
        for file in sorted(set(names.values())):
            if not (folder / file).is_file():
                raise StartError(f"{folder / file}: missing, but {INDEX} names it")
        return {tensor: folder / file for tensor, file in names.items()}
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        others = any(folder.glob("*.bin"))
        raise StartError(
            f"{folder}: no *.safetensors file"
            + ("; convert the *.bin files to safetensors first" if others else "")
        )
    found: dict[str, Path] = {}
    for path in files:
        found.update(dict.fromkeys(_opened(path, lambda f: list(f.keys())), path))
    return found


def _opened(path: Path, use: Callable[[Any], Any]) -> Any:
    """`use` an open safetensors file; what is wrong with it becomes a `StartError`."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return use(file)
    except (SafetensorError, OSError) as error:
        raise StartError(f"{path}: not a whole safetensors file: {error}") from None


def _refuse_unknown(files: dict[str, Path], known: set[str]) -> None:
    """A weight that the config does not know of would leave the model wrong without a word."""
    for name, path in files.items():
        if name not in known and name.startswith("model.") and name.endswith((".weight", ".bias")):
            raise StartError(f"{path}: tensor {name} has no place in the model of config.json")


def _read_file(
    path: Path, pieces: list[Piece], state: dict[str, torch.Tensor], report: Callable[[int], Any]
) -> None:
    def read(file: Any) -> None:
        stored = set(file.keys())
        for piece in pieces:
            if piece.source not in stored:
                raise StartError(f"{path}: tensor {piece.source} is missing from this file")
            tensor = file.get_slice(piece.source)
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            if shape != piece.shape:
                raise StartError(
                    f"{path}: tensor {piece.source} has shape {list(shape)}, but config.json makes "
                    f"it {list(piece.shape)}"
                )
            if dtype not in STORED_DTYPES:
                raise StartError(
                    f"{path}: tensor {piece.source} is of type {dtype}; supported: "
                    + ", ".join(STORED_DTYPES)
                )
            count = _count(piece)
            if count:
                target = state[piece.target]
                target[piece.put].copy_(tensor[piece.take])
                report(count * target.element_size())

    _opened(path, read)
