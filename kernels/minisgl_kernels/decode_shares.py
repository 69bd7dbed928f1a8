"""How fast each multiprocessor gets keys and values, measured once on a device.

On an H200 24 of 132 read about a quarter more than the others while all read: with even shares they
wait for the rest. Which ones they are differs from one device to another.
"""

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minisgl_kernels.decode_attention import WARPS_PER_SM, DecodeAttention
from minisgl_kernels.measured import measured

BYTES = 2**29
"""Of keys and values that are read: far more than the L2 cache holds."""
REQUESTS = 64
PAGE = 16
ROUNDS = 3
LAUNCHES = 7
CLEARLY = 0.99
"""Shares are taken if attention takes so much of its time with even ones at most."""
LIMITS = 0.75, 1.5
"""Of a speed, as a multiple of the mean."""

Speeds = npt.NDArray[np.float64]

_log = logging.getLogger(__name__)


def multiprocessor_speeds(
    kernel: DecodeAttention, *, num_qo_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> Speeds | None:  # fmt: skip
    """For `DecodeAttention.share_out`: those of an earlier start, or measured now; None: even ones
    are as good, the kernel's blocks have no places, or its batches are small.

    Runs on the current stream and waits for it, and takes `BYTES` of memory meanwhile; without that
    much, shares are even and nothing is kept.
    """
    if not kernel.places or kernel.max_batch < REQUESTS:
        return None
    unit = torch.cuda.get_device_properties(device)
    # Of this very device: others of its kind have other multiprocessors in the same groups.
    name = f"multiprocessors {unit.uuid} {num_qo_heads} {num_kv_heads} {head_dim} {dtype}"
    known = measured().get(name)
    if known == "even":
        return None
    if _are_speeds(known, kernel.places):
        return np.array(known, np.float64)
    try:
        speeds = _measured(kernel, num_qo_heads, num_kv_heads, head_dim, dtype, device)
    except (torch.cuda.OutOfMemoryError, ArithmeticError) as error:
        _log.warning("multiprocessors are not measured, their shares are even: %s", error)
        return None
    finally:
        kernel.share_out(None)
    measured().put(name, "even" if speeds is None else speeds.tolist())
    return speeds


def _are_speeds(known: Any, places: int) -> bool:
    low, high = LIMITS
    return (
        isinstance(known, list) and len(known) == places
        and all(isinstance(x, float) and low / 2 < x < 2 * high for x in known)
    )  # fmt: skip


def _measured(
    kernel: DecodeAttention, num_qo_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype, device: torch.device,
) -> Speeds | None:  # fmt: skip
    """None: even shares are as good. Raises `ArithmeticError` if the device's clock stands."""
    tokens = BYTES // (2 * num_kv_heads * head_dim * dtype.itemsize) // REQUESTS // PAGE * PAGE
    slots = torch.zeros((2, REQUESTS * tokens, num_kv_heads, head_dim), device=device, dtype=dtype)
    table = torch.arange(REQUESTS * tokens, dtype=torch.int32, device=device).view(REQUESTS, -1)
    lens = torch.full((REQUESTS,), tokens, dtype=torch.int32, device=device)
    rows = torch.arange(REQUESTS, dtype=torch.int32, device=device)
    q = torch.zeros((REQUESTS, num_qo_heads, head_dim), device=device, dtype=dtype)
    times = torch.zeros((kernel.places * WARPS_PER_SM, 2), dtype=torch.int64, device=device)

    def launched(speeds: Speeds | None) -> tuple[Speeds, float]:
        """Nanoseconds from the start of a launch until each place is done, and until all are: the
        medians of some launches."""
        kernel.share_out(speeds)
        kernel.plan(lens, rows)
        found = []
        for _ in range(LAUNCHES):
            kernel.attention(q, slots[0], slots[1], table, times)
            both = times.cpu().numpy().reshape(kernel.places, WARPS_PER_SM, 2)
            found.append(both[:, :, 1].max(axis=1) - both[:, :, 0].min())
        some = np.array(found[1:])  # the first one reads what was just written
        if not (some > 0).all():
            raise ArithmeticError("the device's clock does not tell a launch's end from its start")
        return np.median(some, axis=0), float(np.median(some.max(axis=1)))

    speeds = np.ones(kernel.places)
    each, even = launched(None)
    for _ in range(ROUNDS):
        speeds = np.clip(speeds * (each.mean() / each), *LIMITS)
        speeds /= speeds.mean()
        each, whole = launched(speeds)
    return np.round(speeds, 3) if whole < CLEARLY * even else None
