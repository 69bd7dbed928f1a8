"""Products with packed weights on a CPU: bfloat16, or int8 with a scale for each output.

Weights are packed once, at load (`csrc/cpu_pack.h` has the layout), and take the place of the
tensors that they were: a row of a packed table can be read back for an embedding. Activations are
bfloat16; for int8 weights each 64 values of a row of them are quantised by the largest one when
they are used.

With bfloat16 weights, subnormal numbers count as zero where the CPU's instructions for bfloat16 say
so. With int8 weights a row of activations with an infinity or a NaN gives NaN everywhere.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from minisgl.config import UsageError
from minisgl_kernels.build import OPTIMISED, library
from minisgl_kernels.huge_pages import huge_pages

ISA_ENV = "MINISGL_CPU_ISA"
ISAS = ("portable", "avx2", "avx512", "amx")
AMX = ISAS.index("amx")
THEN = ("store", "add", "silu", "logits")
BLOCK = 16
CHUNK = 32 << 20
GROUP = 64
"""Values of a row of activations that have one scale."""
_LEAST = 4e-37


class PackedMemory:
    """Memory for packed weights that are read one after the other: together in huge pages, where
    the system has them, which spares the CPU looking up an address every 4 KiB."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int) -> torch.Tensor:
        """`count` bytes, aligned to 64. The memory lives as long as any tensor in it."""
        count = -(-count // 64) * 64
        if count > len(self._rest):
            self._rest = huge_pages(max(count, CHUNK))
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


class Packed(ctypes.Structure):
    """`struct Packed` of `csrc/cpu_pack.h`."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64),
        ("stored", ctypes.c_int32), ("gated", ctypes.c_int32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight and its bias; `struct` points into the tensors."""

    data: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    outputs: int
    inputs: int
    gated: bool
    struct: Packed = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Of the memory that it takes."""
        return sum(t.nbytes for t in (self.data, self.scale, self.bias) if t is not None)


@functools.cache
def _library(emulate_tiles: bool = False) -> ctypes.CDLL:
    lib = library(
        "cpu_matmul", (*OPTIMISED, "-DMINISGL_EMULATE_TILES") if emulate_tiles else OPTIMISED
    )
    number, short, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    for name, result, arguments in (
        ("cpu_best_isa", short, ()),
        ("cpu_packed_blocks", number, (number, short)),
        ("cpu_block_bytes", number, (number, short)),
        ("cpu_pack_bf16", None, (pointer, number, number, short, pointer)),
        ("cpu_pack_int8", None, (pointer, number, number, short, pointer, pointer)),
        ("cpu_unpack_rows", None, (pointer, pointer, number, pointer)),
        (
            "cpu_matmul", None,
            (pointer, pointer, number, number, short, pointer, number, short, short, short),
        ),
    ):  # fmt: skip
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@functools.cache
def best_isa() -> int:
    """The index in `ISAS` of what this CPU has. Raises `KernelUnavailable`."""
    return int(_library().cpu_best_isa())


def chosen_isa() -> int:
    """`best_isa`, or the lower one that MINISGL_CPU_ISA names.

    Raises `UsageError` for a name that is none or that this CPU lacks, and `KernelUnavailable`.
    """
    name = os.environ.get(ISA_ENV, "").strip().lower()
    if not name:
        return best_isa()
    if name not in ISAS:
        raise UsageError(f"{ISA_ENV} must be {', '.join(ISAS[:-1])} or {ISAS[-1]}, not {name!r}")
    if ISAS.index(name) > best_isa():
        raise UsageError(f"{ISA_ENV}={name}: this CPU has {ISAS[best_isa()]} at most")
    return ISAS.index(name)


def pack(
    weight: torch.Tensor, *, bias: torch.Tensor | None = None, int8: bool = False,
    gated: bool = False, memory: PackedMemory | None = None,
) -> PackedWeight:  # fmt: skip
    """`weight` [outputs, inputs] of bfloat16, packed; with `gated` its rows are gate, then up.

    `memory` is where it goes: the same one for all weights of a model. Raises `ValueError` for
    another type or shape, and `KernelUnavailable`.
    """
    if weight.dtype != torch.bfloat16 or weight.dim() != 2 or weight.device.type != "cpu":
        raise ValueError(
            "a weight to pack must be a bfloat16 matrix on the CPU, not "
            f"{weight.dtype} {list(weight.shape)} on {weight.device}"
        )
    outputs, inputs = weight.shape
    if gated and outputs % 2:
        raise ValueError(f"gate and up have the same number of rows, but {outputs} is odd")
    lib, weight = _library(), weight.contiguous()
    padded = lib.cpu_packed_blocks(outputs, gated) * BLOCK
    size = padded // BLOCK * lib.cpu_block_bytes(inputs, int8)
    data = torch.empty(size, dtype=torch.uint8) if memory is None else memory.take(size)
    if data.data_ptr() % 64:
        raise ValueError("memory of tensors is not aligned to 64 bytes")
    scale = torch.empty(padded) if int8 else None
    if scale is not None:
        lib.cpu_pack_int8(
            weight.data_ptr(), outputs, inputs, gated, data.data_ptr(), scale.data_ptr()
        )
    else:
        lib.cpu_pack_bf16(weight.data_ptr(), outputs, inputs, gated, data.data_ptr())
    if bias is not None:
        bias = _in_packed_order(bias.float(), gated, padded)
    struct = Packed(*map(_address, (data, scale, bias)), outputs, inputs, int(int8), int(gated))
    return PackedWeight(data, scale, bias, outputs, inputs, gated, struct)


def unpack_rows(weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
    """Rows of the weight for indices [T] of int64, not checked: [T, inputs] bfloat16."""
    out = torch.empty(len(rows), weight.inputs, dtype=torch.bfloat16)
    rows = rows.contiguous()
    _library().cpu_unpack_rows(
        ctypes.byref(weight.struct), rows.data_ptr(), len(rows), out.data_ptr()
    )
    return out


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """What int8 leaves of `weight` [outputs, inputs]: float32. The reference of packing."""
    q, scale = _quantised(weight.float())
    return q * scale


def matmul_reference(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, int8: bool = False,
    then: str = "store", out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same as `matmul` with `weight` [outputs, inputs] as it was packed, in torch operations.

    For int8 the sums of a group are float64, so exact.
    """
    if int8:
        padding = -x.shape[1] % GROUP
        xq, x_scale = _quantised(F.pad(x.float(), (0, padding)).reshape(len(x), -1, GROUP))
        q, scale = _quantised(weight.float())
        groups = F.pad(q, (0, padding)).reshape(len(q), -1, GROUP)
        sums = torch.einsum("mgk,ngk->mng", xq.double(), groups.double()).float()
        value = (sums * x_scale.squeeze(2)[:, None]).sum(dim=2) * scale.T
        value = value if bias is None else value + bias.float()
    else:
        value = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if then == "logits":
        result = value
    elif then == "silu":
        gate, up = value.chunk(2, dim=-1)
        result = (F.silu(gate) * up).bfloat16()
    else:
        result = (value if then == "store" or out is None else out + value).bfloat16()
    return result if out is None else out.copy_(result)


def matmul(
    x: torch.Tensor, weight: PackedWeight, *, then: str = "store", out: torch.Tensor | None = None,
    isa: int | None = None, lanes: Sequence[int] | None = None, threads: int = 1,
    emulate_tiles: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`x @ weight.T + bias` for x [M, inputs] of bfloat16, by one thread: [M, outputs].

    `then`: store; add (to `out`, in place); silu (of gated weights: [M, outputs / 2]); logits
    (float32). Rows of x and of `out` may lie apart. With `lanes` only those of `threads` threads do
    their part. `emulate_tiles`: the code for AMX, with its tiles in plain C++. Raises `ValueError`
    for what does not fit, and `KernelUnavailable`.
    """
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != weight.inputs:
        raise ValueError(f"x must be bfloat16 [M, {weight.inputs}], not {x.dtype} {list(x.shape)}")
    if then not in THEN or (then == "silu") != weight.gated:
        raise ValueError(f"a {'gated' if weight.gated else 'plain'} weight cannot {then}")
    shape = (len(x), weight.outputs // 2 if weight.gated else weight.outputs)
    dtype = torch.float32 if then == "logits" else torch.bfloat16
    if out is None:
        out = torch.zeros(shape, dtype=dtype)
    if out.dtype != dtype or out.shape != shape or out.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"out must be {dtype} {list(shape)} in rows, and x in rows")
    if isa is None:
        isa = AMX if emulate_tiles else best_isa()
    for lane in range(threads) if lanes is None else lanes:
        _library(emulate_tiles).cpu_matmul(
            ctypes.byref(weight.struct), x.data_ptr(), x.stride(0), len(x), THEN.index(then),
            out.data_ptr(), out.stride(0), isa, lane, threads,
        )  # fmt: skip
    return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _in_packed_order(values: torch.Tensor, gated: bool, padded: int) -> torch.Tensor:
    """`values` [outputs] as packed outputs [padded], zero where there is none."""
    parts = values.chunk(2) if gated else (values,)
    blocks = padded // BLOCK // len(parts)
    rows = [F.pad(part, (0, blocks * BLOCK - len(part))).view(blocks, 1, BLOCK) for part in parts]
    return torch.cat(rows, dim=1).reshape(-1)


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [.., K] as whole numbers from -127 to 127, and their scale [.., 1]."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest < _LEAST, 0.0, largest / 127)
    q = torch.where(scale > 0, x * (1 / scale), 0.0).round()
    return q, torch.where(largest.isfinite(), scale, torch.nan)
