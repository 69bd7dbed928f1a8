"""Measure how soon children follow changes of many objects, and what the operator does at rest.

    .venv/bin/python -m tests.operator.scale [--objects 200] [--rate 10] [--seconds 300]

An API server, the operator as a process with the rights of its chart, and this program, all on one
machine; no controllers and no nodes, so no pod comes. Objects take turns: groups by `kubectl
scale`'s subresource, replicas of the gateway, a label of the tokenizer's pods, the host of the
ingress, and a field of the engine, which is a new revision. A time is from just before the request
that changes an object to the watch event of the child that shows it. Nothing here is a test.
"""

import argparse
import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.apiserver import ApiServer, Request
from tests.operator.fleet import Fleet
from tests.operator.running import (
    Operator,
    install_chart,
    requests_of_operator,
    settle,
)
from tests.support import PROC, resident_bytes

REST_SECONDS = 30.0
DELAY_SECONDS = 0.05


def main() -> int:
    """Run the measurement that the arguments name, and print it."""
    parser = argparse.ArgumentParser(prog="tests.operator.scale", allow_abbrev=False)
    parser.add_argument("--objects", type=int, default=200, help="default 200")
    parser.add_argument("--rate", type=float, default=10.0, help="changes a second (default 10)")
    parser.add_argument("--seconds", type=float, default=300.0, help="of changes (default 300)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ApiServer() as server:
        install_chart(server)
        with Operator(server, Path(folder)) as operator:
            asyncio.run(_measure(server, operator, args.objects, args.rate, args.seconds))
    return 0


async def _measure(
    server: ApiServer, operator: Operator, objects: int, rate: float, seconds: float
) -> None:
    async with await Fleet.connect(server.kubeconfig, objects) as fleet:
        print(f"{objects} objects: children after {await fleet.create():.1f} s", flush=True)
        await asyncio.to_thread(_rest, server, operator)
        sizes = [resident_bytes(operator.pid)]
        seen, busy = len(requests_of_operator(server)), processor_seconds(operator.pid)
        count, began = round(rate * seconds), time.monotonic()
        changing = asyncio.create_task(fleet.changes(count, rate))
        delays: list[float] = []
        watching = asyncio.create_task(_note_delays(delays))
        for quarter in range(1, 5):
            limit = began + seconds * quarter / 4 - time.monotonic()
            await asyncio.wait({changing}, timeout=max(0.0, limit))
            sizes.append(resident_bytes(operator.pid))
        shown = await changing
        took, busy = time.monotonic() - began, processor_seconds(operator.pid) - busy
        watching.cancel()
        print(f"{count} changes in {took:.1f} s; the operator: {busy / took:.0%} of a processor")
        _tell_times(shown)
        _tell_delays(delays)
        _tell_requests(requests_of_operator(server)[seen:], count)
        await asyncio.to_thread(_rest, server, operator)
        sizes.append(resident_bytes(operator.pid))
        told = ", ".join(f"{size / 2**20:.1f}" for size in sizes)
        print(f"MiB before, after each quarter, and at rest again: {told}")


def _rest(server: ApiServer, operator: Operator) -> None:
    try:
        settle(server, 60)
    except AssertionError as error:
        print(f"it does not come to rest: {error}")
    seen, busy = len(requests_of_operator(server)), processor_seconds(operator.pid)
    time.sleep(REST_SECONDS)
    requests = requests_of_operator(server)[seen:]
    busy = processor_seconds(operator.pid) - busy
    writes = [one for one in requests if one.writes and one.resource != "leases"]
    reads = sum(not one.writes for one in requests)
    print(
        f"at rest for {REST_SECONDS:.0f} s: {len(writes)} writes, its Lease left out;"
        f" {reads / REST_SECONDS:.1f} reads a second; {busy / REST_SECONDS:.0%} of a processor",
        flush=True,
    )
    for one in writes:
        print(f"  {one.verb} {one.resource} {one.name}: {one.code}", flush=True)


async def _note_delays(delays: list[float]) -> None:
    """How much later than asked for this program goes on, as long as it is not cancelled: what
    disturbs it disturbs all that is measured."""
    while True:
        asked = time.monotonic() + DELAY_SECONDS
        await asyncio.sleep(DELAY_SECONDS)
        delays.append(time.monotonic() - asked)


def _tell_delays(delays: Sequence[float]) -> None:
    late = sum(delay > DELAY_SECONDS for delay in delays) / len(delays)
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    print(
        f"this program itself was late by more than {DELAY_SECONDS} s in {late:.1%} of its looks,"
        f" by {max(delays):.2f} s at most; load of the machine: {load}"
    )


def _tell_times(shown: Sequence[tuple[str, float]]) -> None:
    by_kind: dict[str, list[float]] = {"all": [seconds for _, seconds in shown]}
    for kind, seconds in shown:
        by_kind.setdefault(kind, []).append(seconds)
    print(f"{'change':18} {'count':>6} {'p50 s':>7} {'p99 s':>7} {'max s':>7}")
    for kind, times in by_kind.items():
        times.sort()
        p99 = times[math.ceil(0.99 * len(times)) - 1]
        print(
            f"{kind:18} {len(times):6} {statistics.median(times):7.3f} {p99:7.3f} {times[-1]:7.3f}"
        )


def _tell_requests(requests: Sequence[Request], changes: int) -> None:
    kinds = Counter(f"{one.verb} {one.resource}" for one in requests if one.resource != "leases")
    print(f"requests for each change: {kinds.total() / changes:.2f}")
    for kind, count in kinds.most_common():
        print(f"  {kind:30} {count / changes:.3f}")


def processor_seconds(pid: int) -> float:
    """Processor time that a process has taken so far."""
    user, system = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
