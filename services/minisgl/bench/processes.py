"""The processes of a service under measurement: started, named, and how much they compute."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from minisgl.bench.server import choose_port
from minisgl.config import StartError, UsageError
from minisgl.launch.supervisor import Child, ChildSpec

START_SECONDS = 180.0
STOP_SECONDS = 20.0
_TICKS = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(specs: Sequence[ChildSpec]) -> Iterator[dict[str, int]]:
    """Start these and wait until they are ready; their pids by name. They end with the block.

    They also end when this process is killed. Raises `StartError` if one of them ends before.
    """
    read, write = os.pipe()
    children: list[Child] = []
    try:
        for spec in specs:
            children.append(Child(spec, read))
        deadline = time.monotonic() + START_SECONDS
        while waiting := [c for c in children if c.spec.waited and c.ready is None]:
            if time.monotonic() > deadline:
                raise StartError(f"not ready: {', '.join(c.spec.name for c in waiting)}")
            select.select([c.ready_fd for c in waiting], [], [], 0.5)
            for child in waiting:
                child.read_ready()
            for child in children:
                if child.code is not None:
                    raise StartError(f"{child.ending()} before it was ready")
        yield {child.spec.name: child.process.pid for child in children}
    finally:
        for stage in sorted({child.spec.stage for child in children}):
            of_stage = [child for child in children if child.spec.stage == stage]
            for child in of_stage:
                child.send(signal.SIGTERM)
            for child in of_stage:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(STOP_SECONDS)
        for child in children:
            if child.code is None:
                child.process.kill()
                child.process.wait()
            os.close(child.ready_fd)
        os.close(read)
        os.close(write)


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[str, int]]:
    """URL and pid of a `redis-server` of our own, with an append-only file as the operator's has.

    Raises `UsageError` if there is no such program.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise UsageError("redis-server is missing: apt-get install redis-server, or give --bus URL")
    import redis

    port = choose_port()
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        process = subprocess.Popen(
            [
                program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder,
                "--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + STOP_SECONDS
            with redis.Redis(port=port) as client:
                while True:
                    try:
                        client.ping()
                        break
                    except redis.ConnectionError:
                        if process.poll() is not None or time.monotonic() > deadline:
                            raise StartError("redis-server does not start") from None
                        time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0", process.pid
        finally:
            process.kill()
            process.wait()


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor time that each process has used so far."""
    used = {}
    for name, pid in pids.items():
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        used[name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return used
