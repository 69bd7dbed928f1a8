"""Communication between GPUs: tensors by NCCL, host values by Gloo."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch

from minisgl.config import StartError, env_switch
from minisgl.distributed.base import Communicator, PeerError
from minisgl.distributed.device import gpu_id
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.lifeline import Lifeline
from minisgl.distributed.nccl_log import NcclLog, nccl_transport

_log = logging.getLogger(__name__)

SYMMETRIC_ENV = "MINISGL_SYMMETRIC_MEMORY"
SYMMETRIC_BYTES = 16 << 20
"""512 requests with a hidden size of 16,384 in 16 bits. Beyond that, bandwidth alone counts."""
_PATIENCE = timedelta(days=7)


class DevicePart(Protocol):
    """What carries tensors: `NcclComm` or `TorchNccl`."""

    def all_reduce(self, tensor: torch.Tensor) -> None: ...
    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None: ...
    def symmetric_memory(self, nbytes: int) -> torch.Tensor | None: ...
    def failure(self) -> str | None: ...
    def abort(self) -> None: ...


class NcclCommunicator(Communicator):
    """The ranks of `host` on their GPUs.

    Collectives are queued on the current stream and may be captured in CUDA graphs. What a lost
    peer leaves running is aborted, so the stream goes on with wrong numbers: `check` after each
    wait for the device, before they are used.
    """

    def __init__(
        self, host: GlooCommunicator, device: torch.device, *, pynccl: bool, node: int
    ) -> None:
        """`node` is the same number for all ranks of one node. `host` is closed with this one.

        Raises `StartError` if two ranks have the same GPU or NCCL cannot start.
        """
        self.rank, self.size = host.rank, host.size
        self._host, self._lost = host, ""
        _refuse_shared_gpu(host, device)
        here = [rank for rank, row in enumerate(host.gather_ints([node])) if row == [node]]
        with torch.cuda.device(device):
            with NcclLog() as log:
                try:
                    self._start(device, pynccl)
                except PeerError:
                    raise
                except RuntimeError as error:
                    raise StartError(f"rank {self.rank}: NCCL cannot start: {error}") from None
            self.transport = nccl_transport(log.text, self.rank, here)
            self._symmetric = self._symmetric_memory() if env_switch(SYMMETRIC_ENV) else None
        _log.info(
            "nccl rank=%d of=%d device=%s by=%s transport=%s symmetric=%s", self.rank, self.size,
            device, type(self._part).__name__, self.transport or "unknown",
            self._symmetric is not None,
        )  # fmt: skip

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.check()
        try:
            self._part.all_reduce(tensor)
        except RuntimeError as error:
            raise self._peer_error(error) from error

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.check()
        mine = tensor.contiguous()
        out = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=mine.device)
        try:
            self._part.all_gather(out, mine)
        except RuntimeError as error:
            raise self._peer_error(error) from error
        return side_by_side(out)

    def sum_buffer(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor | None:
        needed = rows * width * dtype.itemsize
        if self._symmetric is None or needed > SYMMETRIC_BYTES:
            return None
        return self._symmetric[:needed].view(dtype).view(rows, width)

    def check(self) -> None:
        if self._lost:
            raise PeerError(self._lost)

    def barrier(self) -> None:
        self._host.barrier()

    def broadcast_int(self, value: int) -> int:
        return self._host.broadcast_int(value)

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        return self._host.gather_ints(values)

    def close(self) -> None:
        self._lifeline.stop()
        self._part.abort()
        self._host.close()

    def _start(self, device: torch.device, pynccl: bool) -> None:
        self._part = _device_part(self._host, pynccl)
        twin = self._host.twin("lifeline")
        self._lifeline = Lifeline(twin, self._on_lost, self._part.failure)
        self._lifeline.start()
        try:
            self._talk(device)
        except BaseException:
            self._lifeline.stop()
            self._part.abort()
            raise

    def _talk(self, device: torch.device) -> None:
        """First collectives, of a small and a large message: now NCCL connects the ranks."""
        for count in (1 << 10, 1 << 21):
            ones = torch.ones(count, dtype=torch.bfloat16, device=device)
            self.all_reduce(ones)
            gathered = self.all_gather(ones[:8])
            torch.cuda.synchronize(device)
            self.check()
            if ones.min().item() != self.size or gathered.shape != (8 * self.size,):
                raise RuntimeError("the sum of ones over the ranks is wrong")

    def _symmetric_memory(self) -> torch.Tensor | None:
        """The buffer if every rank has it: a collective is symmetric on all ranks or on none."""
        found = None
        try:
            found = self._part.symmetric_memory(SYMMETRIC_BYTES)
        except RuntimeError as error:  # ranks that do not reach each other's memory
            _log.warning("no symmetric memory between the ranks: %s", error)
        return found if all(row[0] for row in self.gather_ints([int(found is not None)])) else None

    def _on_lost(self, why: str) -> None:
        self._lost = why  # before the abort: whoever wakes up by it sees this
        _log.error("%s: ending its collectives", why)
        self._part.abort()

    def _peer_error(self, error: Exception) -> PeerError:
        return PeerError(self._lost or f"rank {self.rank} lost a peer: {error}")


def side_by_side(gathered: torch.Tensor) -> torch.Tensor:
    """[size, ..., n] as [..., size * n]: each rank's part of the last dimension in their order."""
    moved = gathered.movedim(0, -2)
    return moved.reshape(*moved.shape[:-2], -1)


def _device_part(host: GlooCommunicator, pynccl: bool) -> DevicePart:
    """NCCL itself if every rank has it, else torch's."""
    from minisgl_kernels.build import KernelUnavailable
    from minisgl_kernels.pynccl import NcclComm, nccl_library

    library = None
    if pynccl:
        try:
            library = nccl_library()
        except KernelUnavailable as error:
            _log.warning("collectives go through torch.distributed: %s", error)
    if all(row[0] for row in host.gather_ints([int(library is not None)])) and library:
        # Rank 0 makes the id, and the others ignore their own.
        unique_id = library.unique_id() if host.rank == 0 else bytes(128)
        words = [
            int.from_bytes(unique_id[at : at + 8], "little", signed=True) for at in range(0, 128, 8)
        ]
        first = host.gather_ints(words)[0]
        unique_id = b"".join(word.to_bytes(8, "little", signed=True) for word in first)
        return NcclComm(library, unique_id, host.rank, host.size)
    from minisgl.distributed.torch_nccl import TorchNccl

    return TorchNccl(host.store("nccl"), host.rank, host.size, _PATIENCE)


def _refuse_shared_gpu(host: Communicator, device: torch.device) -> None:
    """NCCL would only say "invalid usage"."""
    seen = [row[0] for row in host.gather_ints([gpu_id(device)])]
    same = [rank for rank, number in enumerate(seen) if number == seen[host.rank]]
    if len(same) > 1:
        raise StartError(
            f"ranks {same[0]} and {same[1]} have the same GPU: make as many GPUs visible "
            "(CUDA_VISIBLE_DEVICES) as there are ranks on this machine, or use a lower "
            "--tensor-parallel-size"
        )
