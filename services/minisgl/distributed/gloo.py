"""Communication over TCP with Gloo: on CPUs, and for host values anywhere."""

import re
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch._C import _distributed_c10d as c10d

from minisgl.config import StartError
from minisgl.distributed.base import Communicator, PeerError


class GlooCommunicator(Communicator):
    """A group of processes that meet at a file or a TCP address.

    The process group is this object's own, not the default one of `torch.distributed`: several
    groups can live in one process.
    """

    _group: Any
    _store: Any

    def __init__(
        self,
        init_method: str,
        rank: int,
        size: int,
        timeout: float,
        host: str | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Waits until all ranks are there.

        `init_method` is `file:///path` of a file that does not exist yet, or `tcp://host:port`
        where rank 0 listens. `timeout` in seconds holds for the meeting and for each later call.
        `host` is the address that peers reach this rank at; None: what GLOO_SOCKET_IFNAME or the
        host's name say. `listener`: what listens at rank 0's address already; it is taken over.
        `StartError` if the ranks do not meet.
        """
        self.rank, self.size = rank, size
        self.transport = f"gloo/{host}" if host else "gloo"
        self._timeout, self._address = timedelta(seconds=timeout), host
        try:
            self._store = _store(init_method, rank, size, self._timeout, listener)
            self._join(self._store)
        except (RuntimeError, ValueError) as error:
            raise StartError(
                f"rank {rank} of {size} could not meet its peers at {init_method}: {_cause(error)}"
            ) from None

    def twin(self, name: str) -> "GlooCommunicator":
        """Another group of the same ranks, for another thread. All ranks call it."""
        twin = object.__new__(GlooCommunicator)
        twin.rank, twin.size, twin.transport = self.rank, self.size, self.transport
        twin._timeout, twin._address = self._timeout, self._address
        twin._store = self.store(name)
        twin._join(twin._store)
        return twin

    def store(self, name: str) -> Any:
        """The store at which the ranks met, with keys that belong to `name` alone."""
        return c10d.PrefixStore(name, self._store)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._wait(lambda: self._group.allreduce([tensor]))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [mine]))
        return torch.cat(parts, dim=-1)

    def barrier(self) -> None:
        self._wait(lambda: self._group.barrier())

    def broadcast_int(self, value: int) -> int:
        carrier = torch.tensor([value], dtype=torch.int64)
        self._wait(lambda: self._group.broadcast(carrier, 0))
        return int(carrier)

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        both = self.all_gather(torch.tensor(values, dtype=torch.int64))
        return [list(map(int, row)) for row in both.view(self.size, -1)]

    def close(self) -> None:
        self._group = None
        self._store = None

    def _join(self, store: Any) -> None:
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [
            c10d.ProcessGroupGloo.create_device(hostname=self._address)
            if self._address
            else c10d.ProcessGroupGloo.create_default_device()
        ]
        self._group = c10d.ProcessGroupGloo(store, self.rank, self.size, options)
        self.barrier()

    def _wait(self, start: Callable[[], Any]) -> None:
        if self._group is None:
            raise PeerError("this rank has left its group")
        try:
            start().wait()
        except RuntimeError as error:
            raise PeerError(f"rank {self.rank} lost a peer: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """What happened, without the place in Gloo's source before it and the advice after it."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S*:\d+\] ", "", line).split(". ")[0]


def _store(
    init_method: str, rank: int, size: int, timeout: timedelta, listener: socket.socket | None
) -> Any:
    parts = urlsplit(init_method)
    if parts.scheme == "file":
        store: Any = c10d.FileStore(str(Path(parts.path)), size)
    elif parts.scheme == "tcp" and parts.hostname and parts.port:
        store = c10d.TCPStore(
            parts.hostname, parts.port, size, is_master=rank == 0, timeout=timeout,
            wait_for_workers=False, master_listen_fd=listener.detach() if listener else None,
        )  # fmt: skip
    else:
        raise ValueError("the address must be file:///path or tcp://host:port")
    store.set_timeout(timeout)
    return c10d.PrefixStore("minisgl", store)
