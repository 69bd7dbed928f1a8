"""NCCL by its C interface: collectives on torch's current stream, without torch.distributed.

torch brings the library along. A call costs a few microseconds on the host, and a CUDA graph can
capture it. The reference is `torch.distributed`, which `--disable-pynccl` takes.
Interface: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
"""

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minisgl_kernels.build import KernelUnavailable

UNIQUE_ID_BYTES = 128
SYMMETRIC = 1
"""NCCL_WIN_COLL_SYMMETRIC: every rank registers a buffer of this size at the same moment."""
_SUM = 0
_IN_PROGRESS = 7
_DTYPES = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6,
    torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
ABORT_SECONDS = 1.0


class NcclError(RuntimeError):
    """A call of NCCL failed; the message is NCCL's."""


class UniqueId(ctypes.Structure):
    """What the ranks of one communicator have in common."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


_comm, _size, _stream, _buffer = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 2)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_comm), ctypes.c_int, UniqueId, ctypes.c_int),
    "ncclCommGetAsyncError": (_comm, ctypes.POINTER(ctypes.c_int)),
    "ncclCommAbort": (_comm,),
    "ncclAllReduce": (_buffer, _buffer, _size, ctypes.c_int, ctypes.c_int, _comm, _stream),
    "ncclAllGather": (_buffer, _buffer, _size, ctypes.c_int, _comm, _stream),
}
_NEWER: dict[str, tuple[Any, ...]] = {
    "ncclMemAlloc": (ctypes.POINTER(_buffer), _size),
    "ncclMemFree": (_buffer,),
    "ncclCommWindowRegister": (
        _comm, _buffer, _size, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int,
    ),
}  # fmt: skip
"""NCCL 2.27 and later."""


class NcclLibrary:
    """The functions of one libnccl."""

    def __init__(self, lib: Any) -> None:
        """`lib` is a `ctypes.CDLL`. Raises `KernelUnavailable` if it is no NCCL."""
        self._lib = lib
        missing = [name for name in _SIGNATURES if not hasattr(lib, name)]
        if missing:
            raise KernelUnavailable(f"libnccl has no {missing[0]}")
        for name, arguments in (_SIGNATURES | _NEWER).items():
            function = getattr(lib, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, ctypes.c_int
        lib.ncclGetErrorString.argtypes = (ctypes.c_int,)
        lib.ncclGetErrorString.restype = ctypes.c_char_p
        if hasattr(lib, "ncclGetLastError"):
            lib.ncclGetLastError.argtypes = (_comm,)
            lib.ncclGetLastError.restype = ctypes.c_char_p
        self.has_symmetric_memory = all(hasattr(lib, name) for name in _NEWER)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises `NcclError` with what NCCL says."""
        code = getattr(self._lib, name)(*arguments)
        if code not in (0, _IN_PROGRESS):
            raise NcclError(f"{name}: {self.error(code)}")

    def error(self, code: int) -> str:
        """NCCL's words for a result, with the last warning of this thread where it has one."""
        words = (self._lib.ncclGetErrorString(code) or b"").decode(errors="replace")
        last = self._lib.ncclGetLastError(None) if hasattr(self._lib, "ncclGetLastError") else b""
        return f"{words} ({last.decode(errors='replace').strip()})" if last else words

    def version(self) -> tuple[int, int, int]:
        """As (2, 28, 9)."""
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        return number.value // 10000, number.value // 100 % 100, number.value % 100

    def unique_id(self) -> bytes:
        """A new one, to be given to all ranks."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def read_settings_again(self) -> None:
        """Let NCCL read NCCL_DEBUG and its kin anew, if it can."""
        if hasattr(self._lib, "ncclResetDebugInit"):
            self._lib.ncclResetDebugInit.restype = None
            self._lib.ncclResetDebugInit()


@functools.cache
def nccl_library() -> NcclLibrary:
    """The NCCL of this torch. Raises `KernelUnavailable` where there is none."""
    name = "libnccl.so.2"
    found = importlib.util.find_spec("nvidia")
    places = list(found.submodule_search_locations or ()) if found else []
    # By its bare name first: that is the one that torch has loaded already.
    reason = ""
    for candidate in (name, *(str(Path(place, "nccl", "lib", name)) for place in places)):
        try:
            return NcclLibrary(ctypes.CDLL(candidate))
        except OSError as error:
            reason = reason or str(error)
    raise KernelUnavailable(f"NCCL cannot be loaded: {reason}")


class NcclComm:
    """This rank's end of an NCCL communicator, on the device that is current when it is made.

    Collectives are queued on the current stream. Only `abort` and `failure` may be called from
    another thread.
    """

    def __init__(self, library: NcclLibrary, unique_id: bytes, rank: int, size: int) -> None:
        """Waits for all ranks. Raises `NcclError`."""
        self._library = library
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = None
        self._memory: list[ctypes.c_void_p] = []
        comm = ctypes.c_void_p()
        library.call(
            "ncclCommInitRank", ctypes.byref(comm), size, UniqueId.from_buffer_copy(unique_id), rank
        )
        self._comm = comm

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks."""
        data, stream = tensor.data_ptr(), torch.cuda.current_stream().cuda_stream
        with self._lock:
            self._library.call(
                "ncclAllReduce", data, data, tensor.numel(), _DTYPES[tensor.dtype], _SUM,
                self._alive(), stream,
            )  # fmt: skip

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put the contiguous tensors of all ranks into out [size, *tensor.shape]."""
        stream = torch.cuda.current_stream().cuda_stream
        with self._lock:
            self._library.call(
                "ncclAllGather", tensor.data_ptr(), out.data_ptr(), tensor.numel(),
                _DTYPES[tensor.dtype], self._alive(), stream,
            )  # fmt: skip

    def symmetric_memory(self, nbytes: int) -> torch.Tensor | None:
        """Bytes [nbytes] on the device whose all-reduce takes NCCL's kernels for small messages.

        All ranks call it. None where NCCL or the way between the ranks has no such thing. It is
        gone after `abort`. NCCL cannot end a collective on it: with a lost peer, that stands still
        until the process ends.
        """
        if not self._library.has_symmetric_memory:
            return None
        data, window = ctypes.c_void_p(), ctypes.c_void_p()
        self._library.call("ncclMemAlloc", ctypes.byref(data), nbytes)
        self._memory.append(data)
        self._library.call(
            "ncclCommWindowRegister", self._alive(), data, nbytes, ctypes.byref(window), SYMMETRIC
        )
        if not window.value or data.value is None:
            return None
        return torch.as_tensor(_DeviceBytes(data.value, nbytes), device="cuda")

    def failure(self) -> str | None:
        """What NCCL found out since by itself, as a closed connection."""
        code = ctypes.c_int()
        with self._lock:
            if self._comm is None:
                return None
            self._library.call("ncclCommGetAsyncError", self._comm, ctypes.byref(code))
        return None if code.value in (0, _IN_PROGRESS) else self._library.error(code.value)

    def abort(self) -> None:
        """End all collectives that are queued or run, and leave. Not collective; may be repeated.

        A call that holds the lock for long is stuck in NCCL, and only the abort gets it out.
        """
        held = self._lock.acquire(timeout=ABORT_SECONDS)
        comm, self._comm = self._comm, None
        if held:
            self._lock.release()
        if comm is not None:
            leave(lambda: self._free(comm))

    def _free(self, comm: ctypes.c_void_p) -> None:
        self._library.call("ncclCommAbort", comm)
        for data in self._memory:
            self._library.call("ncclMemFree", data)

    def _alive(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise NcclError("the communicator was aborted")
        return self._comm


def leave(abort: Callable[[], None]) -> None:
    """Abort a communicator in a thread, and wait a second for it.

    NCCL ends what runs at once, but frees a communicator only when no CUDA graph holds a call of it
    any more, and waits for that.
    """
    thread = threading.Thread(target=abort, name="nccl-abort", daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)


class _DeviceBytes:
    """Device memory in the form that torch takes over without a copy."""

    def __init__(self, data: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (data, False), "version": 3,
        }  # fmt: skip
