"""Radix key compare: how far two arrays of token ids agree.

The prefix cache asks this for every node on the way down its tree, so a call must cost little
beside the comparison itself. Measured on one core of a 2.6 GHz EPYC, two equal arrays of 16 and
4,096 ids: C++ through the buffer protocol 0.09 and 0.37 microseconds, numpy 0.5 and 0.9, ctypes 2.0
and 2.4. That is why there is no ctypes binding between the two.
"""

import functools
import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from minisgl_kernels.build import KernelUnavailable, extension

Ids = npt.NDArray[np.int32]
Compare = Callable[[Ids, Ids], int]

_log = logging.getLogger(__name__)


def common_prefix_len_reference(a: Ids, b: Ids) -> int:
    """The same as `common_prefix_len`, in numpy."""
    for ids in (a, b):
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1:
            raise TypeError("token ids must be a one-dimensional int32 array")
        if not ids.flags.c_contiguous:
            raise TypeError("token ids must be a contiguous int32 array")
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


@functools.cache
def compare_function() -> Compare:
    """The fastest `common_prefix_len` that this machine can have; compiles it at the first call.

    Falls back to numpy with one warning where the kernel cannot be built.
    """
    try:
        compiled: Compare = extension("radix_compare").common_prefix_len
    except KernelUnavailable as error:
        _log.warning("radix key compare runs in numpy, because the C++ one is missing: %s", error)
        return common_prefix_len_reference
    return compiled


def common_prefix_len(a: Ids, b: Ids) -> int:
    """How many leading ids `a` [n] and `b` [m] share, 0 to min(n, m).

    Raises `TypeError` unless both are one-dimensional, contiguous and int32. A caller in a hot
    loop keeps `compare_function()` instead, and saves this indirection.
    """
    return compare_function()(a, b)
