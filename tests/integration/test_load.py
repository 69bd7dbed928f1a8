"""Many clients that come, stream, and partly go away: nothing may fail and nothing may be left."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from minisgl.bench.client import Generator, Load, look_at, plan
from minisgl.bench.server import Server
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
WARM_UP = 3
"""Requests of a client before anything is measured: together they fill the KV cache."""
EACH = {"model": 5, "fake": 20}
"""Requests of a client then; more where MINISGL_SOAK_SECONDS is over 30."""
SECONDS_EACH = 5.0
"""Limit for a request on average, far from what the slowest machine takes."""
SILENCE_SECONDS = 600.0
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


def run_load(server: Server, clients: int, each: float, seed: int) -> None:
    """So many clients at a time, until they have made `each` requests on average.

    Nothing may fail, and who is to stay is answered to the end.
    """
    target = look_at(server.url, None, None)
    requests = plan(
        target,
        round(clients * each),
        prompt_tokens=(4, 48),
        output_tokens=(1, 16),
        disconnect_share=0.3,
        seed=seed,
    )
    load = Load(requests=requests, concurrency=clients, seed=seed, timeout=SILENCE_SECONDS)
    generator = Generator(target, load)

    async def run() -> None:
        async with asyncio.timeout(SILENCE_SECONDS + SECONDS_EACH * len(requests)):
            await generator.run()

    asyncio.run(run())
    records = generator.records
    assert [r.error for r in records if r.error] == []
    assert sum(r.whole or r.left for r in records) == len(requests)
    assert sum(r.whole for r in records) >= sum(p.leave_after is None for p in requests)
    # Several tokens may come in one piece, so who wants to leave later may see the end first.
    assert sum(r.left for r in records) >= sum(p.leave_after in (0, 1) for p in requests) > 0


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
@pytest.mark.timeout(0)  # run_load has a limit
@pytest.mark.parametrize("engine", ["model", "fake"])
def test_clients_that_come_and_go_leave_nothing_behind(
    engine: str, real_model: Path, soak_seconds: float
) -> None:
    # The model alone keeps two cores busy; without it the other processes get the load.
    clients = CLIENTS if engine == "fake" or soak_seconds >= 60 else CLIENTS // 4
    each = EACH[engine] * max(1.0, soak_seconds / 30)
    flags = [*FLAGS, "--fake-engine"] if engine == "fake" else FLAGS
    with Server(str(real_model), flags) as server:
        run_load(server, clients, WARM_UP, seed=1)
        wait_until_idle(server)
        pids = descendants(server.pid)
        before = held(pids)

        run_load(server, clients, each, seed=2)
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
