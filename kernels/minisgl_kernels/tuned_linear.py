"""Products of tokens and weights by cuBLASLt, with the algorithm that is fastest for their shape.

cuBLAS chooses by a rule, which for the small products of a decode step is often off: few large
tiles leave most multiprocessors idle. Here the candidates that the library names are timed once for
each shape that is met within `measuring()`, as an engine's warm-up is; shapes that were never
measured run in torch. The sum of a product and a residual costs nothing: it is the product's own
second operand.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from minisgl_kernels.build import KernelUnavailable, refuse_if_disabled
from minisgl_kernels.measured import Measured, measured

TunedLinear = Callable[..., torch.Tensor]

CANDIDATES = 24
WORKSPACE_BYTES = 32 << 20
CALLS = 6
"""Of each candidate; the fastest counts."""

# cuBLASLt's and CUDA's numbers for what is used of them.
_COMPUTE_32F, _R_32F = 68, 0
_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A, _OP_T = 3, 1
_MAX_WORKSPACE = 1

_MEASURING: ContextVar[bool] = ContextVar("measuring", default=False)
_log = logging.getLogger(__name__)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int), ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


@dataclass(slots=True)
class _Plan:
    """How products of one shape are computed."""

    description: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)
    weight: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)
    x: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)
    out: ctypes.c_void_p = field(default_factory=ctypes.c_void_p)
    candidates: list[_Heuristic] = field(default_factory=list)
    chosen: int = 0


class CublasLt:
    """The library, and what was found for each shape. For one device."""

    def __init__(self, device: torch.device, kept: Measured | None = None) -> None:
        """`kept`: what was found at earlier starts."""
        self._library = _load()
        self._kept = kept
        self._handle = ctypes.c_void_p()
        self._check("cublasLtCreate", ctypes.byref(self._handle))
        self._device = device
        self._workspaces: dict[int, torch.Tensor] = {}
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._plans: dict[tuple[int, int, int, torch.dtype, bool], _Plan] = {}

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> bool:
        """out = x @ weight.T + residual, and True; False if the shape was not measured.

        Raises `KernelUnavailable`.
        """
        key = (x.shape[0], *weight.shape, x.dtype, residual is not None)
        plan = self._plans.get(key)
        if plan is None:
            if not _MEASURING.get() or torch.cuda.is_current_stream_capturing():
                return False
            plan = self._plan(x, weight)
            name = " ".join(("cublaslt", *map(str, key)))
            chosen = None if self._kept is None else self._kept.get(name)
            if type(chosen) is int and 0 <= chosen < len(plan.candidates):
                plan.chosen = chosen
            else:
                self._time(plan, x, weight, residual)
                if self._kept is not None:
                    self._kept.put(name, plan.chosen)
            self._plans[key] = plan
        self._run(plan, plan.chosen, x, weight, residual, out)
        return True

    def _plan(self, x: torch.Tensor, weight: torch.Tensor) -> _Plan:
        tokens, (rows, k), kind = x.shape[0], weight.shape, _TYPES[x.dtype]
        plan = _Plan()
        self._check(
            "cublasLtMatmulDescCreate", ctypes.byref(plan.description), _COMPUTE_32F, _R_32F
        )
        transpose = ctypes.c_int32(_OP_T)
        self._check(
            "cublasLtMatmulDescSetAttribute", plan.description, _TRANSPOSE_A,
            ctypes.byref(transpose), ctypes.c_size_t(4),
        )  # fmt: skip
        # Column by column, as the library counts: out.T [rows, tokens] = weight.T' x.T.
        for layout, height, width in (
            (plan.weight, k, rows), (plan.x, k, tokens), (plan.out, rows, tokens),
        ):  # fmt: skip
            self._check(
                "cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, ctypes.c_uint64(height),
                ctypes.c_uint64(width), ctypes.c_int64(height),
            )  # fmt: skip
        preference = ctypes.c_void_p()
        self._check("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        self._check(
            "cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE,
            ctypes.byref(size), ctypes.c_size_t(8),
        )  # fmt: skip
        found, count = (_Heuristic * CANDIDATES)(), ctypes.c_int()
        self._check(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, plan.description, plan.weight, plan.x,
            plan.out, plan.out, preference, CANDIDATES, found, ctypes.byref(count),
        )  # fmt: skip
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        plan.candidates = [
            _Heuristic.from_buffer_copy(one) for one in found[: count.value] if one.state == 0
        ]
        if not plan.candidates:
            raise KernelUnavailable(f"cuBLASLt has no product of {_shape(tokens, rows, k)}")
        return plan

    def _time(
        self, plan: _Plan, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """Choose the fastest candidate. Waits for the device."""
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        sweep = self._sweep(weight)
        best = [float("inf")] * len(plan.candidates)
        spans: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        for i in range(len(plan.candidates)):
            try:
                self._run(plan, i, x, weight, residual, out)
            except KernelUnavailable as error:  # named, but not for these operands
                _log.debug("candidate %d: %s", i, error)
                continue
            for _ in range(CALLS):
                if sweep is not None:
                    sweep.zero_()
                start, end = _event(), _event()
                start.record()
                self._run(plan, i, x, weight, residual, out)
                end.record()
                spans.append((i, start, end))
        for i, start, end in spans:
            end.synchronize()
            best[i] = min(best[i], start.elapsed_time(end))
        plan.chosen = min(range(len(best)), key=best.__getitem__)
        _log.debug(
            "product of %s: candidate %d of %d takes %.1f us, the first %.1f",
            _shape(x.shape[0], *weight.shape), plan.chosen, len(best),
            1e3 * best[plan.chosen], 1e3 * best[0],
        )  # fmt: skip

    def _sweep(self, weight: torch.Tensor) -> torch.Tensor | None:
        """What is written before each call: in a step the weights of one layer are long gone from
        the cache when the next step needs them."""
        if not weight.is_cuda:
            return None
        l2 = torch.cuda.get_device_properties(weight.device).L2_cache_size
        if weight.nbytes > 4 * l2:
            return None
        return torch.empty(2 * l2, dtype=torch.uint8, device=weight.device)

    def _run(
        self, plan: _Plan, candidate: int, x: torch.Tensor, weight: torch.Tensor,
        residual: torch.Tensor | None, out: torch.Tensor,
    ) -> None:  # fmt: skip
        algorithm = plan.candidates[candidate]
        added = out if residual is None else residual
        stream = torch.cuda.current_stream().cuda_stream
        self._check(
            "cublasLtMatmul", self._handle, plan.description, ctypes.byref(self._one),
            ctypes.c_void_p(weight.data_ptr()), plan.weight, ctypes.c_void_p(x.data_ptr()), plan.x,
            ctypes.byref(self._zero if residual is None else self._one),
            ctypes.c_void_p(added.data_ptr()), plan.out, ctypes.c_void_p(out.data_ptr()), plan.out,
            ctypes.byref(algorithm.algorithm), ctypes.c_void_p(self._workspace(stream)),
            ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(stream),
        )  # fmt: skip

    def _workspace(self, stream: int) -> int:
        """Products of one stream come after each other, so they can share it."""
        made = self._workspaces.get(stream)
        if made is None:
            made = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._workspaces[stream] = made
        return made.data_ptr()

    def _check(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise KernelUnavailable(f"{name} of cuBLASLt failed with status {status}")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _shape(tokens: int, rows: int, k: int) -> str:
    """The shape of a product, for messages."""
    return f"{tokens} tokens of {k} with {rows} rows"


def tuned_linear(
    x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`x @ weight.T` [M, N] for x [M, K] and weight [N, K], contiguous and of one 2-byte type.

    Data starts at multiples of 16 bytes. `residual` [M, N] is added, in place, and returned. Raises
    `KernelUnavailable`. The first call with a shape within `measuring()` takes some milliseconds.
    """
    if x.dtype not in _TYPES:
        raise KernelUnavailable(f"tuned_linear has no product of {x.dtype}")
    if residual is not None:
        out = residual
    elif out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    if _cublas_lt(x.device).linear(x, weight, residual, out):
        return out
    if residual is not None:
        return residual.add_(F.linear(x, weight))
    return torch.mm(x, weight.t(), out=out)


def tuned_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same as `tuned_linear`, in torch operations for any device."""
    product = F.linear(x, weight)
    if residual is not None:
        return residual.add_(product)
    return product if out is None else out.copy_(product)


@contextmanager
def measuring() -> Iterator[None]:
    """Within it the first product of each shape finds the fastest algorithm."""
    token = _MEASURING.set(True)
    try:
        yield
    finally:
        _MEASURING.reset(token)


@functools.cache
def tuned_linear_function() -> TunedLinear | None:
    """`tuned_linear`, or None, with one warning, where cuBLASLt is missing."""
    try:
        refuse_if_disabled()
        if not torch.cuda.is_available():
            raise KernelUnavailable("there is no CUDA device")
        _load()
    except KernelUnavailable as error:
        _log.warning("products run in torch, because cuBLASLt cannot be called: %s", error)
        return None
    return tuned_linear


@functools.cache
def _cublas_lt(device: torch.device) -> CublasLt:
    return CublasLt(device, measured())


@functools.cache
def _load() -> ctypes.CDLL:
    """The library that torch has loaded. Raises `KernelUnavailable`."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise KernelUnavailable(f"cannot look for cuBLASLt: {error}") from error
    loaded = {line.split(maxsplit=5)[-1] for line in lines if "libcublasLt.so" in line}
    if not loaded:
        raise KernelUnavailable("torch has not loaded libcublasLt.so")
    return ctypes.CDLL(min(loaded))
