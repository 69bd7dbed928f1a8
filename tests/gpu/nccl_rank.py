"""One rank, as a process that sees one GPU: what `test_nccl.py` and `nccl_speed.py` start.

    python -m tests.gpu.nccl_rank --rank R --size N --meet tcp://127.0.0.1:PORT --case NAME

Prints one JSON object.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from minisgl.config import env_switch
from minisgl.distributed import PeerError
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.nccl import SYMMETRIC_BYTES, SYMMETRIC_ENV, NcclCommunicator

DEVICE = torch.device("cuda", 0)
SPEED_BYTES = (8 << 10, 80 << 10, 512 << 10, 2560 << 10, 16 << 20, 80 << 20)
"""With a hidden size of 5,120 in bf16, 8 tokens are 80 KiB, 256 are 2.5 MiB, 8,192 are 80 MiB."""
IN_GRAPH = 20
REPLAYS = 5


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`work` in a graph, run once before, and what it gave."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph, result


def collectives(comm: NcclCommunicator) -> dict[str, Any]:
    """Sums and gathered tensors, eager and in a graph, on another stream than the default."""
    rank, size = comm.rank, comm.size
    before = sum(range(size))
    wrong = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
            numbers = (torch.arange(1000, device=DEVICE) % 50).to(dtype)  # sums stay exact
            x = numbers + rank
            comm.all_reduce(x)
            want = numbers * size + before
            if not torch.equal(x, want):
                wrong.append(f"sum of {dtype}")
        mine = torch.arange(12, device=DEVICE, dtype=torch.bfloat16).view(3, 4) + 20 * rank
        every = comm.all_gather(mine[:, 1:3]).tolist()
        if every != [
            [float(start + 20 * r + i) for r in range(size) for i in (1, 2)] for start in (0, 4, 8)
        ]:
            wrong.append("gathered columns")
        static = torch.zeros(64, 512, device=DEVICE, dtype=torch.bfloat16)
        logits = torch.zeros(8, 16, device=DEVICE, dtype=torch.bfloat16)
        total = torch.empty_like(static)

        def step() -> torch.Tensor:
            total.copy_(static)
            comm.all_reduce(total)
            return comm.all_gather(logits)

        graph, gathered = captured(step)
        for value in (1.0, 3.0):
            static.fill_(value + rank)
            logits.fill_(value + rank)
            graph.replay()
            stream.synchronize()
            if not bool((total == size * value + before).all()):
                wrong.append("sum in a graph")
            if gathered[0].tolist() != [value + r for r in range(size) for _ in range(16)]:
                wrong.append("gathered in a graph")
        if (
            env_switch(SYMMETRIC_ENV)
            and (buffer := comm.sum_buffer(64, 512, torch.bfloat16)) is not None
        ):

            def into_buffer() -> None:
                buffer.copy_(static)
                comm.all_reduce(buffer)

            graph, _ = captured(into_buffer)
            static.fill_(5.0 + rank)
            graph.replay()
            stream.synchronize()
            if not bool((buffer == size * 5.0 + before).all()):
                wrong.append("sum in symmetric memory")
    return {"wrong": wrong, "symmetric": comm.sum_buffer(1, 8, torch.bfloat16) is not None}


def killed(comm: NcclCommunicator) -> dict[str, Any]:
    """The last rank dies between two replays: others must hear of it while they wait for them."""
    x = torch.ones(1 << 20, device=DEVICE)
    graph, _ = captured(lambda: comm.all_reduce(x))
    comm.barrier()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(3):
            graph.replay()
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
            comm.check()
    except PeerError as error:
        return {"seconds": time.monotonic() - began, "error": str(error)}
    return {"seconds": time.monotonic() - began, "error": None}


def speed(comm: NcclCommunicator) -> dict[str, Any]:
    """Microseconds and GB/s of an all-reduce by size and by way."""
    ways: dict[str, Callable[[int], tuple[NcclCommunicator, torch.Tensor | None]]] = {
        "pynccl": lambda n: (comm, torch.zeros(n // 2, device=DEVICE, dtype=torch.bfloat16)),
        "symmetric": lambda n: (comm, comm.sum_buffer(1, n // 2, torch.bfloat16)),
    }
    other = NcclCommunicator(comm._host.twin("torch"), DEVICE, pynccl=False, node=0)
    ways["torch"] = lambda n: (other, torch.zeros(n // 2, device=DEVICE, dtype=torch.bfloat16))
    found: dict[str, Any] = {"torch_transport": other.transport}
    for way, make in ways.items():
        for nbytes in SPEED_BYTES:
            through, x = make(nbytes)
            if x is None:
                continue
            found.setdefault(way, {})[nbytes >> 10] = _time(through, x, nbytes)
    other.close()
    return found


def _time(comm: NcclCommunicator, x: torch.Tensor, nbytes: int) -> list[float]:
    """[microseconds in a graph, GB/s in a graph, microseconds of the host for an eager call]."""
    x.zero_()

    def several() -> None:
        for _ in range(IN_GRAPH):
            comm.all_reduce(x)

    graph, _ = captured(several)
    times = []
    for _ in range(REPLAYS):
        comm.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / IN_GRAPH)
    comm.barrier()
    began = time.perf_counter()
    several()
    eager = (time.perf_counter() - began) / IN_GRAPH * 1e6
    torch.cuda.synchronize()
    median = sorted(times)[REPLAYS // 2]
    return [round(median, 1), round(nbytes / median / 1e3, 1), round(eager, 1)]


CASES = {"collectives": collectives, "killed": killed, "speed": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--torch", action="store_true", help="through torch.distributed")
    args = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    began = time.monotonic()
    host = GlooCommunicator(args.meet, args.rank, args.size, 120, host="127.0.0.1")
    comm = NcclCommunicator(host, DEVICE, pynccl=not args.torch, node=0)
    started = round(time.monotonic() - began, 2)
    result = CASES[args.case](comm)
    print(json.dumps({"rank": args.rank, "transport": comm.transport, "start_seconds": started,
                      "symmetric_mib": SYMMETRIC_BYTES >> 20, **result}), flush=True)  # fmt: skip
    comm.close()
    os._exit(0)  # what a lost peer has left behind may wait for ever


if __name__ == "__main__":
    main()
