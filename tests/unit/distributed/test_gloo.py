"""Groups of processes and threads over Gloo."""

import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import StartError
from minisgl.distributed import Communicator, PeerError, SingleRank
from minisgl.distributed.gloo import GlooCommunicator


def in_threads(meet: Path, size: int, use: Callable[[Communicator], Any]) -> list[Any]:
    def run(rank: int) -> Any:
        comm = GlooCommunicator(f"file://{meet}", rank, size, 30, host="127.0.0.1")
        try:
            return use(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_sums_and_gathered_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    def use(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.full((3, 2), comm.rank + 1, dtype=dtype)
        comm.all_reduce(total)
        mine = torch.full((2, 4), comm.rank, dtype=dtype)[:, ::2]  # not contiguous
        return total, comm.all_gather(mine)

    for total, gathered in in_threads(tmp_path / "meet", 3, use):
        assert torch.equal(total, torch.full((3, 2), 6, dtype=dtype))
        assert torch.equal(gathered, torch.tensor([[0, 0, 1, 1, 2, 2]] * 2, dtype=dtype))


def test_host_numbers(tmp_path: Path) -> None:
    def use(comm: Communicator) -> tuple[int, list[list[int]]]:
        comm.barrier()
        return comm.broadcast_int(2**60 + comm.rank), comm.gather_ints([comm.rank, -comm.rank])

    for first, numbers in in_threads(tmp_path / "meet", 3, use):
        assert first == 2**60
        assert numbers == [[0, 0], [1, -1], [2, -2]]


def test_ranks_meet_at_a_tcp_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def run(rank: int) -> list[list[int]]:
        comm = GlooCommunicator(address, rank, 2, 30, host="127.0.0.1")
        numbers = comm.gather_ints([rank])
        comm.barrier()  # rank 0 holds the store: it leaves last
        comm.close()
        return numbers

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[[0], [1]]] * 2


def test_a_group_says_what_its_tensors_travel_by(tmp_path: Path) -> None:
    assert in_threads(tmp_path / "meet", 2, lambda comm: comm.transport) == ["gloo/127.0.0.1"] * 2
    assert SingleRank().transport == ""


def test_two_groups_live_at_the_same_time(tmp_path: Path) -> None:
    def use(comm: Communicator) -> int:
        return sum(x[0] for x in comm.gather_ints([comm.rank + 1]))

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(in_threads, tmp_path / str(n), n, use) for n in (2, 3)]
        assert [run.result() for run in runs] == [[3, 3], [6, 6, 6]]


def test_a_single_rank_talks_to_itself() -> None:
    comm = SingleRank()
    x = torch.ones(2)
    comm.all_reduce(x)
    comm.barrier()
    assert x.tolist() == [1, 1]
    assert comm.all_gather(x) is x
    assert comm.broadcast_int(7) == 7
    assert comm.gather_ints([1, 2]) == [[1, 2]]
    comm.close()


def test_a_closed_group_says_so(tmp_path: Path) -> None:
    def use(comm: Communicator) -> None:
        comm.close()
        comm.close()
        with pytest.raises(PeerError, match="left its group"):
            comm.barrier()

    in_threads(tmp_path / "meet", 2, use)


def test_peers_that_do_not_come_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"rank 0 of 2 could not meet its peers at file://"):
        GlooCommunicator(f"file://{tmp_path / 'meet'}", 0, 2, 0.5, host="127.0.0.1")


@pytest.mark.parametrize("address", ["", "meet", "tcp://", "tcp://h", "udp://h:1", "tcp://h:x"])
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(StartError, match="could not meet"):
        GlooCommunicator(address, 0, 2, 0.5)


def _peer(meet: str, told: Connection) -> None:
    comm = GlooCommunicator(meet, 1, 2, 60, host="127.0.0.1")
    x = torch.ones(1000)
    comm.all_reduce(x)
    told.send(float(x.sum()))
    comm.all_reduce(x)  # rank 0 never comes to this one in time: it kills this process


def test_a_killed_process_is_a_lost_peer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    meet = f"file://{tmp_path / 'meet'}"
    here, there = context.Pipe()
    peer = context.Process(target=_peer, args=(meet, there))
    peer.start()
    try:
        comm = GlooCommunicator(meet, 0, 2, 60, host="127.0.0.1")
        x = torch.ones(1000)
        comm.all_reduce(x)
        assert here.recv() == float(x.sum()) == 2000
        peer.kill()
        with pytest.raises(PeerError, match=r"^rank 0 lost a peer: \w") as caught:
            for _ in range(2):  # the first may have been sent before the death was seen
                comm.all_reduce(x)
        assert "pair.cc" not in str(caught.value)  # no places in the source of Gloo
    finally:
        peer.kill()
        peer.join()
