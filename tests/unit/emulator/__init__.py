"""Runs the CUDA sources of the kernels on a CPU: the logic, not the speed and not the races."""

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl_kernels import build

HERE = Path(__file__).parent
CLUSTERS = {"sample": 8, "filter_bounds": 8}
"""Blocks of a cluster, where a kernel has clusters."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Value(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("number", ctypes.c_double), ("at", ctypes.c_void_p)]


class _Any(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value)]


class EmulatedModule:
    """What TVM FFI makes of a library: its functions, on tensors of the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"__tvm_ffi_{name}")

        def call(*arguments: Any) -> None:
            packed, kept = (_Any * len(arguments))(), []
            for place, argument in zip(packed, arguments, strict=True):
                if isinstance(argument, torch.Tensor):
                    tensor = _tensor(argument)
                    kept.append(tensor)
                    place.type, place.value.at = 7, ctypes.addressof(tensor)
                elif isinstance(argument, float):
                    place.type, place.value.number = 3, argument
                elif argument is not None:
                    place.type, place.value.integer = 1, argument
            if function(None, packed, len(packed), None):
                message = ctypes.c_char_p.in_dll(self._library, "emulator_error").value or b""
                raise RuntimeError(message.decode())

        return call


def emulated_module(
    name: str, macros: Mapping[str, str | int], flags: Sequence[str] = ()
) -> EmulatedModule:
    """In the place of `cuda_build.cuda_module`. Raises `KernelUnavailable`."""
    given = "".join(f"#define {key} {value}\n" for key, value in macros.items())
    parts = (
        *HERE.rglob("*.h"),
        *HERE.glob("*.cuh"),
        *build.CSRC.glob("*.h"),
        *build.CSRC.glob("*.cuh"),
    )
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(parts))).hexdigest()
    source = (build.CSRC / f"{name}.cu").read_text()
    cluster = CLUSTERS.get(name, int(macros.get("SPLIT", 1)))
    text = f"// with headers {digest}\n#define CLUSTER {cluster}\n{given}{source}"
    folder = build._temporary_root() / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.cpp").write_text(text)
    options = (
        "-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread",
        f"-I{HERE}", f"-I{build.CSRC}",
    )  # fmt: skip
    return EmulatedModule(build.library(name, options, csrc=folder))


def _tensor(tensor: torch.Tensor) -> _Tensor:
    dims = tensor.dim()
    longs = ctypes.c_int64 * dims
    return _Tensor(
        data=tensor.data_ptr(), ndim=dims, bits=8 * tensor.itemsize, lanes=1,
        shape=longs(*tensor.shape), strides=longs(*tensor.stride()),
    )  # fmt: skip
