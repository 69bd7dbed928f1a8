"""Watching processes and servers from outside, for tests."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

PROC = Path("/proc")
_SAMPLE = re.compile(r"^(\w+)(?:\{.*\})? (\S+)")


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    """Return as soon as `condition` holds; fail with `what` it was instead after `seconds`."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"not within {seconds:.0f} seconds: {what()}")
        time.sleep(0.05)


def lines(answer: httpx.Response) -> Iterator[bytes]:
    """Split at line feeds alone: httpx also splits at what a text may hold, such as U+2028."""
    rest = b""
    for part in answer.iter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        yield from whole


def descendants(pid: int) -> list[int]:
    """The process and all that it started, directly or not, which still run."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        try:
            tasks = list((PROC / str(one) / "task").iterdir())
            todo += [int(c) for t in tasks for c in (t / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append(one)
    return sorted(found)


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_files(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(list((PROC / str(pid) / "fd").iterdir()))


def resident_bytes(pid: int) -> int:
    """Memory of its own that a process holds: what it shares with others does not count."""
    for line in (PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no RssAnon line: it has ended")


def role(pid: int) -> str:
    """What a process of the service does: its `minisgl` command."""
    words = (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
    return " ".join(words[1:5])


def metrics(url: str) -> dict[str, float]:
    """The samples of a server's /metrics, summed over their labels."""
    found: dict[str, float] = defaultdict(float)
    for line in httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text.splitlines():
        sample = _SAMPLE.match(line)
        if sample:
            found[sample[1]] += float(sample[2])
    return dict(found)
