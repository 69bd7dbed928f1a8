"""The control groups under which a node's pods lie: made before its kubelet starts, then removed.

Tried with cgroup v1. With v2 the controllers must be free to be handed on: in a container that has
processes in its root group they are not, and `make` says so.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.programs import Unavailable


def hierarchies() -> Iterator[tuple[Path, str]]:
    """Where hierarchies are mounted, and whether each is `cgroup` (v1) or `cgroup2`."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(where), kind


def make(name: str) -> None:
    """Make the group in each hierarchy; raises `Unavailable` if the kernel refuses."""
    try:
        for root, kind in hierarchies():
            group = root / name
            if kind == "cgroup2" and (wanted := (root / "cgroup.controllers").read_text().split()):
                (root / "cgroup.subtree_control").write_text(" ".join(f"+{one}" for one in wanted))
            group.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if kind == "cgroup" and (root / file).exists():
                    (group / file).write_text((root / file).read_text())
    except OSError as error:
        raise Unavailable(f"cannot make the control group {name}: {error}") from error


def remove(name: str) -> None:
    """Remove the group and all below it, and first kill what is in them."""
    limit = time.monotonic() + 20
    for root, _ in hierarchies():
        while (root / name).exists():
            for folder, _, _ in os.walk(root / name, topdown=False):
                with contextlib.suppress(OSError):
                    for pid in (Path(folder) / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            if time.monotonic() > limit:
                raise Unavailable(f"cannot remove the control group {root / name}")
            if (root / name).exists():
                time.sleep(0.05)
