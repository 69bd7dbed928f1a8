"""Streams whose kernels run on a part of a GPU's multiprocessors: green contexts of the driver.

What is captured on such a stream keeps to its part in a graph, too. The other multiprocessors stay
whole groups that are neighbours, as clusters of blocks want.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl_kernels.build import KernelUnavailable, refuse_if_disabled

STEP = 8
"""Multiprocessors are parted by so many, on Hopper."""

# The driver's numbers and sizes for what is used of them.
_SM, _DEFAULT_STREAM, _NON_BLOCKING = 1, 1, 1
_RESOURCE_BYTES, _COUNT_AT = 144, 96


@dataclass(frozen=True, slots=True)
class Partition:
    """Some multiprocessors of a device."""

    count: int
    streams: Sequence[torch.cuda.Stream]


@functools.cache
def partition(device: torch.device, count: int, streams: int) -> Partition:
    """`count` multiprocessors at least, a multiple of 8, and streams on them, for the whole life of
    the process. Raises `KernelUnavailable` where the driver cannot do that."""
    refuse_if_disabled()
    if not torch.cuda.is_available():
        raise KernelUnavailable("there is no CUDA device")
    torch.zeros(1, device=device)  # there is a context now
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        _call(cuda.cuDeviceGet, ctypes.byref(number := ctypes.c_int()), device.index or 0)
        whole, part, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
        _call(cuda.cuDeviceGetDevResource, number, whole, _SM)
        groups = ctypes.c_uint(1)
        _call(cuda.cuDevSmResourceSplitByCount, part, ctypes.byref(groups), whole, rest, 0, count)
        description, context = ctypes.c_void_p(), ctypes.c_void_p()
        _call(cuda.cuDevResourceGenerateDesc, ctypes.byref(description), part, 1)
        _call(cuda.cuGreenCtxCreate, ctypes.byref(context), description, number, _DEFAULT_STREAM)
        made = []
        for _ in range(streams):
            stream = ctypes.c_void_p()
            _call(cuda.cuGreenCtxStreamCreate, ctypes.byref(stream), context, _NON_BLOCKING, 0)
            made.append(torch.cuda.ExternalStream(stream.value or 0, device))  # type: ignore[no-untyped-call]
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"the driver has no green contexts: {error}") from error
    return Partition(ctypes.c_uint.from_buffer(part, _COUNT_AT).value, made)


def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    status = function(*arguments)
    if status:
        raise KernelUnavailable(f"{function.__name__} failed with status {status}")
