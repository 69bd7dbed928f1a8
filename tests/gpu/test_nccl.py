"""NCCL on one GPU by itself, and between several where there are several."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.nccl import NcclCommunicator
from minisgl_kernels.pynccl import NcclComm, NcclError, nccl_library
from tests.gpu.rank_processes import PRIVATE, SHARED, run_ranks

SIZES = [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]
two_gpus = pytest.mark.skipif(not SIZES, reason="needs two GPUs")
DEVICE = torch.device("cuda", 0)


@contextlib.contextmanager
def alone() -> Iterator[NcclComm]:
    """A communicator of one rank."""
    library = nccl_library()
    with torch.cuda.device(DEVICE):
        comm = NcclComm(library, library.unique_id(), 0, 1)
        yield comm
        comm.abort()


def test_the_library_of_torch_is_called() -> None:
    assert nccl_library().version() == torch.cuda.nccl.version()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_a_rank_alone_keeps_what_it_has(dtype: torch.dtype) -> None:
    with alone() as comm:
        x = torch.arange(10_000, device=DEVICE).to(dtype)
        before = x.clone()
        comm.all_reduce(x)
        assert torch.equal(x, before)
        out = torch.zeros(1, *x.shape, dtype=dtype, device=DEVICE)
        comm.all_gather(out, x)
        assert torch.equal(out[0], before)
        assert comm.failure() is None


def test_collectives_are_queued_on_the_current_stream_and_captured() -> None:
    with alone() as comm, torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros(1000, device=DEVICE)
        comm.all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x += 1
            comm.all_reduce(x)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert x.eq(2).all()
        del graph


def test_after_an_abort_calls_fail() -> None:
    with alone() as comm:
        comm.abort()
        with pytest.raises(NcclError, match="aborted"):
            comm.all_reduce(torch.zeros(1, device=DEVICE))


@pytest.mark.parametrize("pynccl", [True, False])
def test_a_group_of_one_starts_and_ends(pynccl: bool, tmp_path: Path) -> None:
    host = GlooCommunicator(f"file://{tmp_path / 'meet'}", 0, 1, 30, host="127.0.0.1")
    comm = NcclCommunicator(host, DEVICE, pynccl=pynccl, node=1)
    x = torch.ones(8, device=DEVICE)
    comm.all_reduce(x)
    assert comm.all_gather(x).tolist() == [1.0] * 8
    comm.check()
    comm.close()


@two_gpus
@pytest.mark.parametrize("arguments", [(), ("--torch",)], ids=["pynccl", "torch"])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_sum_and_gather_eagerly_and_in_graphs(size: int, arguments: tuple[str, ...]) -> None:
    results = run_ranks(size, ("--case=collectives", *arguments), symmetric=not arguments)
    assert [result and result["wrong"] for result in results] == [[]] * size
    assert [result and result["transport"] for result in results] == ["P2P"] * size
    assert [result and result["symmetric"] for result in results] == [not arguments] * size


@two_gpus
@pytest.mark.parametrize("arguments", [(), ("--torch",)], ids=["pynccl", "torch"])
@pytest.mark.parametrize("size", SIZES)
def test_a_killed_peer_ends_a_wait_for_the_device(size: int, arguments: tuple[str, ...]) -> None:
    *others, dead = run_ranks(size, ("--case=killed", *arguments))
    assert dead is None
    for alive in others:
        assert alive is not None and alive["error"]
        assert alive["seconds"] < 10


@two_gpus
@pytest.mark.parametrize(("place", "transport"), [(SHARED, "P2P"), (PRIVATE, "Socket")])
def test_pods_of_one_node_need_a_common_shared_memory_for_nvlink(
    place: str, transport: str
) -> None:
    results = run_ranks(2, ("--case=collectives",), place=place)
    assert [result and result["wrong"] for result in results] == [[], []]
    assert [result and result["transport"] for result in results] == [transport] * 2
