"""All layers of a dense decoder in one call, and paged attention alone, on a CPU in bfloat16.

Python's interpreter lock is free meanwhile. The threads are the library's own; they sleep between
steps.
"""

import ctypes
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minisgl_kernels.build import KernelUnavailable, library
from minisgl_kernels.cpu_matmul import Packed, PackedWeight

DIM_STEP = 16
"""Heads must be a multiple of so many dimensions wide."""
PHASES = ("embedding", "qkv", "rope", "attention", "o", "gate_up", "down", "lm_head")
"""What `CpuDecoder.step` adds up the seconds of, in this order."""

_FLAGS = ("-O3", "-pthread", "-Wno-psabi")
_NO_MEMORY, _BAD_LENGTHS = 1, 2
_log = logging.getLogger(__name__)


class _Layer(ctypes.Structure):
    """`struct LayerWeights` of `csrc/cpu_decoder.cpp`; so are the next three."""

    _fields_ = (
        ("qkv", Packed), ("o", Packed), ("gate_up", Packed), ("down", Packed),
        ("input_norm", ctypes.c_void_p), ("post_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p), ("k_norm", ctypes.c_void_p),
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_int64), ("hidden", ctypes.c_int64), ("width", ctypes.c_int64),
        ("heads", ctypes.c_int64), ("kv_heads", ctypes.c_int64), ("head_dim", ctypes.c_int64),
        ("eps", ctypes.c_float), ("isa", ctypes.c_int32), ("threads", ctypes.c_int32),
        ("layer", ctypes.POINTER(_Layer)), ("head", Packed), ("embedding", ctypes.c_void_p),
        ("last_norm", ctypes.c_void_p), ("turns", ctypes.c_void_p),
    )  # fmt: skip


class _Requests(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64), ("rows", ctypes.c_void_p), ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p), ("page_table", ctypes.c_void_p), ("columns", ctypes.c_int64),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int64), ("requests", _Requests), ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p), ("layer_stride", ctypes.c_int64),
        ("logits", ctypes.c_void_p), ("logits_stride", ctypes.c_int64),
        ("seconds", ctypes.c_void_p),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: packed products, and norms [hidden] and [head_dim] of bfloat16."""

    qkv: PackedWeight
    """Queries, keys, values."""
    o: PackedWeight
    gate_up: PackedWeight
    """Gated."""
    down: PackedWeight
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@functools.cache
def _library() -> ctypes.CDLL:
    lib = library("cpu_decoder", _FLAGS)
    number, short, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    for name, result, arguments in (
        ("cpu_decoder_create", pointer, (pointer,)),
        ("cpu_decoder_destroy", None, (pointer,)),
        ("cpu_decoder_step", ctypes.c_int, (pointer, pointer)),
        ("cpu_decoder_each_row", None, (pointer, pointer, pointer, number)),
        ("cpu_attention_create", pointer, (number, number, number, short, short)),
        ("cpu_attention_destroy", None, (pointer,)),
        ("cpu_attention_plan", ctypes.c_int, (pointer, pointer)),
        (
            "cpu_attention_compute", None,
            (pointer, pointer, number, pointer, pointer, pointer, number),
        ),
    ):  # fmt: skip
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@functools.cache
def cpu_decoder_available() -> bool:
    """Whether the library can be compiled and loaded; if not, one debug line says why."""
    try:
        _library()
    except KernelUnavailable as error:
        _log.debug("the CPU computes in torch operations: %s", error)
        return False
    return True


class CpuDecoder:
    """A model and its threads. One thread at a time may call it."""

    def __init__(
        self, layers: Sequence[LayerWeights], *, head: PackedWeight,
        embedding: torch.Tensor | None, last_norm: torch.Tensor, turns: torch.Tensor, eps: float,
        heads: int, kv_heads: int, head_dim: int, isa: int, threads: int,
    ) -> None:  # fmt: skip
        """`embedding` is [vocabulary, hidden] of bfloat16; None: the rows of `head`. `turns`
        [positions, head_dim] float32 is `RotaryEmbedding.table`. Raises `KernelUnavailable`."""
        lib = _library()
        if head_dim % DIM_STEP:
            raise KernelUnavailable(f"heads of {head_dim} dimensions are no multiple of {DIM_STEP}")
        self._keep = (tuple(layers), head, embedding, last_norm, turns)
        self._vocab = head.outputs
        structs = (_Layer * len(layers))(
            *(
                _Layer(
                    w.qkv.struct, w.o.struct, w.gate_up.struct, w.down.struct,
                    *(_bf16(norm) for norm in (w.input_norm, w.post_norm, w.q_norm, w.k_norm)),
                )
                for w in layers
            )
        )  # fmt: skip
        model = _Model(
            len(layers), head.inputs, layers[0].down.inputs, heads, kv_heads, head_dim, eps, isa,
            threads, structs, head.struct, _bf16(embedding), _bf16(last_norm),
            _address(turns, torch.float32),
        )  # fmt: skip
        self._handle = lib.cpu_decoder_create(ctypes.byref(model))
        if not self._handle:
            raise MemoryError("not enough memory for the decoder's threads")
        self._finalizer = _at_end(self, lib.cpu_decoder_destroy, self._handle)
        self._call = lib.cpu_decoder_step
        self._step = _Step()
        self._reference = ctypes.byref(self._step)
        self._logits = torch.empty(0, self._vocab)

    def step(
        self, *, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
        rows: torch.Tensor, before: npt.NDArray[np.int32], after: npt.NDArray[np.int32],
        page_table: torch.Tensor, pool: torch.Tensor,
        seconds: npt.NDArray[np.float64] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Scores of each request's next token: [B, vocabulary] float32, valid until the next call.

        `ids`, `positions` and `slots` [T] and `rows` [B] are int64, `page_table` [rows, columns]
        int32, as `ForwardBatch` has them; `pool` is the buffer of `KVPool`. Nothing checks that
        what they name exists. To `seconds` [PHASES] is added what each phase took.
        """
        count = len(before)
        if len(self._logits) < count:
            self._logits = torch.empty(count, self._vocab)
        step, requests = self._step, self._step.requests
        step.tokens = len(ids)
        step.ids, step.positions = _address(ids), _address(positions)
        step.slots, step.logits = _address(slots), self._logits.data_ptr()
        step.logits_stride = self._vocab
        if pool.dtype != torch.bfloat16 or not pool.is_contiguous():
            raise TypeError("the KV pool must be contiguous bfloat16")
        step.keys = base = pool.data_ptr()
        step.values = base + pool.stride(0) * 2
        step.layer_stride = pool.stride(1)
        step.seconds = None if seconds is None else seconds.ctypes.data
        _set_requests(requests, rows, before, after, page_table)
        _check(self._call(self._handle, self._reference))
        return self._logits[:count]

    def each_row(self, function: int, argument: int, rows: int) -> None:
        """Calls `void function(const void* argument, int64_t row)` for each row, on all threads."""
        _library().cpu_decoder_each_row(self._handle, function, argument, rows)

    def close(self) -> None:
        """End the threads; no step may follow."""
        self._finalizer()


class CpuAttention:
    """Paged attention of bfloat16 heads, and its threads. One thread at a time may call it."""

    def __init__(self, *, heads: int, kv_heads: int, head_dim: int, isa: int, threads: int) -> None:
        """`heads` is a multiple of `kv_heads`. Raises `KernelUnavailable`."""
        lib = _library()
        if head_dim % DIM_STEP:
            raise KernelUnavailable(f"heads of {head_dim} dimensions are no multiple of {DIM_STEP}")
        self._handle = lib.cpu_attention_create(heads, kv_heads, head_dim, isa, threads)
        if not self._handle:
            raise MemoryError("not enough memory for the threads of attention")
        self._finalizer = _at_end(self, lib.cpu_attention_destroy, self._handle)
        self._lib = lib
        self._planned: tuple[object, ...] = ()

    def plan(
        self, rows: torch.Tensor, before: npt.NDArray[np.int32], after: npt.NDArray[np.int32],
        page_table: torch.Tensor,
    ) -> None:  # fmt: skip
        """Share out the work of the next step; as in `CpuDecoder.step`."""
        requests = _Requests()
        _set_requests(requests, rows, before, after, page_table)
        _check(self._lib.cpu_attention_plan(self._handle, ctypes.byref(requests)))
        self._planned = (rows, before, after, page_table)  # the library holds their addresses

    def forward(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [T, heads, head_dim] over keys and values [slots, kv_heads, head_dim]: like q."""
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        self._lib.cpu_attention_compute(
            self._handle, q.data_ptr(), q.stride(0), _bf16(keys), _bf16(values), out.data_ptr(),
            out.stride(0),
        )  # fmt: skip
        return out

    def close(self) -> None:
        """End the threads."""
        self._finalizer()


def _at_end(
    of: object, destroy: Callable[[int], None], handle: int
) -> "weakref.finalize[..., object]":
    """Calls `destroy` when `of` is gone, but not when the process ends: another thread may then be
    in the middle of a step."""
    finalizer = weakref.finalize(of, destroy, handle)
    finalizer.atexit = False
    return finalizer


def _set_requests(
    requests: _Requests, rows: torch.Tensor, before: npt.NDArray[np.int32],
    after: npt.NDArray[np.int32], page_table: torch.Tensor,
) -> None:  # fmt: skip
    if before.dtype != np.int32 or after.dtype != np.int32 or len(after) != len(before):
        raise TypeError("lengths must be int32, as many before as after")
    requests.count, requests.rows = len(before), _address(rows)
    requests.before, requests.after = before.ctypes.data, after.ctypes.data
    requests.page_table = _address(page_table, torch.int32)
    requests.columns = page_table.shape[1]


def _check(result: int) -> None:
    if result == _NO_MEMORY:
        raise MemoryError("not enough memory for a step")
    if result == _BAD_LENGTHS:
        raise ValueError("each request must have new tokens")


def _address(tensor: torch.Tensor, dtype: torch.dtype = torch.int64) -> int:
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise TypeError(f"expected contiguous {dtype}, got {tensor.dtype} {list(tensor.shape)}")
    return tensor.data_ptr()


def _bf16(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else _address(tensor, torch.bfloat16)
