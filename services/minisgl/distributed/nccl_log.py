"""What NCCL says of the ways it chose: there is no call that tells, only its log.

The log has it at NCCL_DEBUG=INFO, with INIT among the subsystems, once the ranks have talked.
"""

import contextlib
import os
import re
import sys
from collections.abc import Collection
from typing import Self

from minisgl_kernels.build import KernelUnavailable

_CHANNEL = re.compile(
    r"NCCL INFO Channel [\d/]+ : (\d+)\[\w+\] -> (\d+)\[\w+\]"
    r"(?: \[(?:send|receive)\])? via (\S[^\n]*)"
)

_SETTINGS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


class NcclLog:
    """While this is entered, NCCL writes its log to memory; `text` has it afterwards.

    NCCL reads its settings at its first call in a process, so that must fall into this. Then they
    are again what the user has set, and what the user would have seen goes to stderr.
    """

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> Self:
        self._before = {name: os.environ.get(name) for name in _SETTINGS}
        self._fd = os.memfd_create("nccl-log")  # no file: a pod may have no place to write to
        subsystems = self._before["NCCL_DEBUG_SUBSYS"]
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{self._fd}"
        if subsystems is not None and not subsystems.startswith("^"):
            os.environ["NCCL_DEBUG_SUBSYS"] = f"{subsystems},INIT"
        _read_again()
        return self

    def __exit__(self, *exc: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _read_again()
        self.text = _whole(self._fd)
        os.close(self._fd)
        if (self._before["NCCL_DEBUG"] or "").upper() in ("INFO", "TRACE"):
            sys.stderr.write(self.text)


def _read_again() -> None:
    from minisgl_kernels.pynccl import nccl_library

    with contextlib.suppress(KernelUnavailable):
        nccl_library().read_settings_again()


def _whole(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


def nccl_transport(log: str, rank: int, here: Collection[int]) -> str:
    """The `Communicator.transport` of a rank, by the log of NCCL; empty if it tells of none.

    Args:
        log: lines of the log.
        rank: whose connections count; a log may hold others'.
        here: the ranks on this rank's node. NCCL does not know it: pods of one node may have host
            names of their own, and then it takes them for hosts.
    """
    within: set[str] = set()
    between: set[str] = set()
    for source, target, way in _CHANNEL.findall(log):
        ends = (int(source), int(target))
        if rank in ends:
            (within if {*ends} <= {rank, *here} else between).add(_kind(way))
    return ", ".join([*sorted(within), *(f"{kind} between nodes" for kind in sorted(between))])


def _kind(way: str) -> str:
    """`P2P/CUMEM` is P2P, `NET/IB/3/GDRDMA` is IB."""
    first, *rest = way.split("/")
    return rest[0] if first == "NET" and rest else first
