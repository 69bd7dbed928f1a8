"""What this host leaves to a process: cores and memory, with the limits of its container."""

import hashlib
import os
import socket
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> int:
    """63 bits that are the same for all processes of one running kernel, in any container."""
    try:
        name = _BOOT.read_text()
    except OSError:  # not Linux
        name = socket.gethostname()
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def usable_cpus() -> int:
    """Cores that this process may keep busy: its affinity, cut by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cpu_quota(_CGROUP)
    return max(1, min(cores or 1, int(quota)) if quota else (cores or 1))


def threads_of_a_rank(ranks: int) -> int:
    """Threads that compute in one of so many ranks on this host.

    OMP_NUM_THREADS goes first: whoever sets it knows of other processes, such as another group's
    ranks. It is read anew and not asked of torch, where another engine of this process may have
    left the number that it needs itself.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, usable_cpus() // ranks)


def free_memory() -> int:
    """Bytes that can be taken without swapping, and within the cgroup's limit."""
    free = _available()
    left = _cgroup_left(_CGROUP)
    return free if left is None else min(free, left)


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Not Linux: half of the machine is a guess that leaves room for everything else.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cpu_quota(root: Path) -> float | None:
    """cgroup v2 `cpu.max`: microseconds of CPU time and of the period, or `max`."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else max(1.0, int(quota) / int(period))
    except (OSError, ValueError):
        return None


def _cgroup_left(root: Path) -> int | None:
    """cgroup v2: the limit less what is used and cannot be reclaimed."""
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
