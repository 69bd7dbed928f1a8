"""Many clients that come, stream, and partly go away: nothing may fail and nothing may be left."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from minisgl.bench.client import Generator, Load, look_at, plan
from minisgl.bench.server import Server
from minisgl.bench.stats import RequestRecord
from tests.support import (
    descendants,
    is_running,
    metrics,
    open_files,
    resident_bytes,
    role,
    wait_until,
)

CLIENTS = 200
MAX_GROWTH = {"model": 192 << 20, "fake": 48 << 20}
"""Bytes that one process may grow by after the warm-up. With the model most of it is the heap of
tensors, whose sizes change with every batch; it was seen to wander by 40 MiB and not to grow. The
fake engine answers many times more requests, so a leak for each of them shows there."""
LAZY = 4
"""Files that a process may open after the warm-up: a queue's socket (two) opens at its first use,
and the first abort may come late. A leak is one for each of hundreds of clients."""
# A small KV cache is full after the warm-up, so that its memory is in use before it is measured.
FLAGS = ("--num-pages", "4096", "--max-seq-len", "1024", "--page-size", "1")


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    files: int
    memory: int


def held(pids: list[int]) -> dict[int, Held]:
    return {pid: Held(open_files(pid), resident_bytes(pid)) for pid in pids}


def run_load(server: Server, seconds: float, clients: int, seed: int) -> list[RequestRecord]:
    target = look_at(server.url, None, None)
    requests = plan(
        target,
        1_000,
        prompt_tokens=(4, 48),
        output_tokens=(1, 16),
        disconnect_share=0.3,
        seed=seed,
    )
    load = Load(requests=requests, seconds=seconds, concurrency=clients, seed=seed, timeout=120)
    generator = Generator(target, load)
    asyncio.run(generator.run())
    return generator.records


def wait_until_idle(server: Server) -> None:
    """No request runs or waits, and every page is free or evictable."""

    def idle() -> bool:
        now = metrics(server.url)
        unused = now["minisgl_kv_pages_free"] + now["minisgl_kv_pages_evictable"]
        busy = now["minisgl_requests_running"] + now["minisgl_requests_waiting"]
        return busy == 0 and unused == now["minisgl_kv_pages_total"] > 0

    def shown() -> str:
        wanted = ("minisgl_requests", "minisgl_kv_pages")
        return str({k: v for k, v in metrics(server.url).items() if k.startswith(wanted)})

    wait_until(idle, 30, shown)


@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(0)  # as long as MINISGL_SOAK_SECONDS says
@pytest.mark.parametrize("engine", ["model", "fake"])
def test_clients_that_come_and_go_leave_nothing_behind(
    engine: str, real_model: Path, soak_seconds: float
) -> None:
    # The model alone keeps two cores busy; without it the other processes get the load.
    clients = CLIENTS if engine == "fake" or soak_seconds >= 60 else CLIENTS // 4
    flags = [*FLAGS, "--fake-engine"] if engine == "fake" else FLAGS
    with Server(str(real_model), flags) as server:
        warm_up = run_load(server, max(5.0, soak_seconds / 6), clients, seed=1)
        assert not [r.error for r in warm_up if r.error]
        wait_until_idle(server)
        pids = descendants(server.pid)
        before = held(pids)

        records = run_load(server, soak_seconds, clients, seed=2)
        assert [r.error for r in records if r.error] == []
        assert sum(r.whole for r in records) > clients // 5  # a slow machine answers few
        assert sum(r.left for r in records) > clients // 10
        wait_until_idle(server)
        assert descendants(server.pid) == pids

        def files_are_closed() -> bool:
            return all(now.files <= before[pid].files + LAZY for pid, now in held(pids).items())

        wait_until(files_are_closed, 30, lambda: f"{before} became {held(pids)}")
        growth = {role(p): now.memory - before[p].memory for p, now in held(pids).items()}
        assert max(growth.values()) < MAX_GROWTH[engine], (
            f"bytes that each process grew by: {growth}"
        )
        assert "Traceback" not in server.log
        assert server.stop() == 0
        wait_until(lambda: not any(map(is_running, pids)), 10, lambda: "processes are left over")
