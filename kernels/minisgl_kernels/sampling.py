"""The draw of sampling on a CPU: filters, Philox noise and argmax, without sorting the vocabulary.

The reference is `draw_reference` of minisgl/engine/draw.py.
"""

import ctypes
import functools
import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from minisgl_kernels.build import KernelUnavailable, library

EachRow = Callable[[int, int, int], None]
"""Calls the C function at an address with another address and 0, 1, ..., n - 1, on many threads."""
Draw = Callable[..., None]
Column = npt.NDArray[np.generic] | None

_log = logging.getLogger(__name__)
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off")
_COLUMNS = (
    ("temperature", np.float32), ("top_k", np.int64), ("top_p", np.float64), ("min_p", np.float64),
    ("seeds", np.int64), ("positions", np.int64), ("tokens", np.int64),
)  # fmt: skip
_LIMITS = ("top_k", "top_p", "min_p")


class _Draw(ctypes.Structure):
    """`struct Draw` of `csrc/gumbel_draw.cpp`."""

    _fields_ = (
        ("logits", ctypes.c_void_p), ("stride", ctypes.c_int64), ("vocab_size", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name, _ in _COLUMNS),
    )  # fmt: skip


@functools.cache
def gumbel_draw_function() -> Draw | None:
    """`gumbel_draw`, compiled at the first call; None, with one warning, where it cannot be."""
    try:
        lib = library("gumbel_draw", _FLAGS)
    except KernelUnavailable as error:
        _log.warning("sampling runs in torch, because the C++ kernel is missing: %s", error)
        return None
    lib.draw_rows.restype = None
    lib.draw_rows.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    draw_row = ctypes.cast(lib.draw_row, ctypes.c_void_p).value or 0

    def gumbel_draw(
        logits: npt.NDArray[np.float32], each_row: EachRow | None = None, **columns: Column
    ) -> None:
        """Draw a token for each row of `logits` [n, V] by the definition in minisgl/engine/philox.

        The columns [n] are `temperature`, `top_k`, `top_p` and `min_p` as `bounds` of
        minisgl/engine/filters takes them (None: no row has that limit), `seeds`, `positions`, and
        `tokens`, which holds the ids of the largest logits and is overwritten. `each_row` shares
        the rows among threads. Raises `TypeError` for other types and shapes.
        """
        n, vocab_size = logits.shape
        if logits.dtype != np.float32 or logits.strides[1] != 4 or logits.strides[0] % 4:
            raise TypeError("logits must be float32 with contiguous rows")
        draw = _Draw(logits.ctypes.data, logits.strides[0] // 4, vocab_size)
        for name, dtype in _COLUMNS:
            column = columns[name]
            if column is None and name in _LIMITS:
                continue
            if (
                column is None
                or column.dtype != dtype
                or column.shape != (n,)
                or not column.flags.c_contiguous
            ):
                raise TypeError(f"{name} must be contiguous {np.dtype(dtype)} of shape ({n},)")
            setattr(draw, name, column.ctypes.data)
        if each_row is None or n == 1:
            lib.draw_rows(ctypes.addressof(draw), n)
        else:
            each_row(draw_row, ctypes.addressof(draw), n)

    return gumbel_draw
