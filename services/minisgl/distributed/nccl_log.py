"""What NCCL says of the ways it chose: there is no call that tells, only its log.

The log has it at NCCL_DEBUG=INFO, with INIT among the subsystems, once the ranks have talked.
"""

import re
from collections.abc import Collection

_CHANNEL = re.compile(
    r"NCCL INFO Channel [\d/]+ : (\d+)\[\w+\] -> (\d+)\[\w+\]"
    r"(?: \[(?:send|receive)\])? via (\S[^\n]*)"
)


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
