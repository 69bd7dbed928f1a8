"""NCCL through torch.distributed: `--disable-pynccl`, and where NCCL itself cannot be loaded."""

import os
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from minisgl_kernels.pynccl import leave


class TorchNccl:
    """A process group of its own, not the default one of `torch.distributed`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        # By default a thread of torch ends the process when a peer is lost. Ours raises.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._group: Any = c10d.ProcessGroupNCCL(store, rank, size, options)
        # On the current stream, as PyNCCL, and without a handle to wait for; else torch takes a
        # stream of its own.
        self._reduce: Any = c10d.AllreduceOptions()
        self._gather: Any = c10d.AllgatherOptions()
        for each in (self._reduce, self._gather):
            each.asyncOp = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks."""
        _queued(self._group.allreduce([tensor], self._reduce))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put the contiguous tensors of all ranks into out [size, *tensor.shape]."""
        _queued(self._group._allgather_base(out, tensor, self._gather))

    def symmetric_memory(self, nbytes: int) -> torch.Tensor | None:
        """None: PyNCCL alone has it."""
        return None

    def failure(self) -> str | None:
        """None: torch raises at the next call."""
        return None

    def abort(self) -> None:
        """End all collectives that are queued or run, and leave."""
        group, self._group = self._group, None
        if group is not None:
            leave(group.abort)


def _queued(work: Any) -> None:
    """Let the current stream wait for `work`, where torch has not queued it there."""
    if work is not None:
        work.wait()
