"""The processor that a comparison runs on."""

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from minisgl.host import usable_cpus


@dataclass(frozen=True, slots=True)
class Cpu:
    """What it calls itself, and what every system may use of it."""

    name: str
    flags: frozenset[str]
    """Instruction sets, by their names in /proc/cpuinfo."""
    threads: int


def this_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """Of this process, with the limits of its container."""
    try:
        text = cpuinfo.read_text()
    except OSError:  # not Linux
        text = ""
    name = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.MULTILINE)
    return Cpu(
        name[1] if name else platform.machine(),
        frozenset(flags[1].split() if flags else ()),
        usable_cpus(),
    )
