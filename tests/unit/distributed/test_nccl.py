"""What of the communicator between GPUs needs none."""

import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.config import EngineConfig, StartError
from minisgl.distributed import Communicator, PeerError, SingleRank
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.distributed.nccl import (
    NcclCommunicator,
    _device_part,
    _refuse_shared_gpu,
    side_by_side,
)
from minisgl.distributed.torch_nccl import TorchNccl
from minisgl.scheduler.group import device_group
from minisgl_kernels import pynccl
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.pynccl import NcclComm, NcclLibrary
from tests.unit.distributed.fake_nccl import fake_nccl
from tests.unit.distributed.test_gloo import in_threads


def test_each_ranks_part_of_the_vocabulary_comes_in_its_place() -> None:
    whole = torch.arange(24).view(2, 12)
    gathered = torch.stack(whole.split(4, dim=1))  # [3, 2, 4], by rank
    assert torch.equal(side_by_side(gathered), whole)
    assert side_by_side(torch.arange(6).view(2, 3)).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_lost_peer_is_raised_by_the_next_call_of_any_kind() -> None:
    comm = object.__new__(NcclCommunicator)
    comm.rank, comm.size, comm._lost = 0, 2, ""
    aborts: list[str] = []
    comm._part = types.SimpleNamespace(abort=lambda: aborts.append(comm._lost))  # type: ignore[assignment]
    comm.check()
    comm._on_lost("rank 0 lost a peer: it is gone")
    assert aborts == ["rank 0 lost a peer: it is gone"]  # known before anything is let go
    calls: list[Any] = [
        comm.check, lambda: comm.all_reduce(torch.ones(1)), lambda: comm.all_gather(torch.ones(1)),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(PeerError, match="it is gone"):
            call()


def test_all_ranks_get_the_id_that_rank_0_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        library = NcclLibrary(fake_nccl(tmp_path))
    except KernelUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(pynccl, "nccl_library", lambda: library)

    def use(comm: Communicator) -> type:
        assert isinstance(comm, GlooCommunicator)
        return type(_device_part(comm, pynccl=True))

    assert in_threads(tmp_path / "meet", 3, use) == [NcclComm] * 3
    said = library._lib.told().decode().splitlines()
    assert sorted(said) == [f"init {rank} of 3 id 0 127" for rank in range(3)]


def test_two_ranks_on_one_gpu_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(device: torch.device) -> Any:
        return types.SimpleNamespace(uuid=f"GPU-{device.index // 2}")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def use(comm: Communicator) -> str:
        try:
            _refuse_shared_gpu(comm, torch.device("cuda", comm.rank))
        except StartError as error:
            return str(error)
        return ""

    first, second, third = in_threads(tmp_path / "meet", 3, use)
    assert first == second and first.startswith("ranks 0 and 1 have the same GPU")
    assert third == ""


def test_twins_and_stores_of_a_group_do_not_meet(tmp_path: Path) -> None:
    def use(comm: Communicator) -> list[list[int]]:
        assert isinstance(comm, GlooCommunicator)
        twin = comm.twin("lifeline")
        with ThreadPoolExecutor(1) as pool:  # both at once, as the lifeline's thread does
            beside = pool.submit(twin.gather_ints, [comm.rank + 10])
            mine = comm.gather_ints([comm.rank])
            return [*mine, *beside.result()]

    assert in_threads(tmp_path / "meet", 2, use) == [[[0], [1], [10], [11]]] * 2


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "cuda", "fake_engine": True}])
def test_ranks_that_compute_on_no_gpu_stay_with_gloo(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, **options)
    kept = in_threads(tmp_path / "meet", 2, lambda comm: device_group(config, comm) is comm)
    assert kept == [True, True]


def test_a_rank_alone_talks_to_nobody() -> None:
    comm = SingleRank()
    assert device_group(EngineConfig(model="m", device="cuda"), comm) is comm


class Mixed(SingleRank):
    """Rank 1 of 2, where rank 0 has no GPU."""

    rank, size = 1, 2

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        return [[0], list(values)]


def test_a_group_of_which_some_ranks_have_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minisgl.distributed.device.select_device", lambda name, rank: torch.device("cuda", 0)
    )
    with pytest.raises(StartError, match="rank 1 has a GPU, but rank 0 has none"):
        device_group(EngineConfig(model="m", tensor_parallel_size=2), Mixed())


@pytest.mark.parametrize("waits", [False, True])
def test_torchs_handle_of_a_queued_collective_is_waited_for_if_there_is_one(waits: bool) -> None:
    waited: list[str] = []
    handle = types.SimpleNamespace(wait=lambda: waited.append("waited")) if waits else None
    part = object.__new__(TorchNccl)
    part._reduce = part._gather = None
    part._group = types.SimpleNamespace(
        allreduce=lambda tensors, options: handle,
        _allgather_base=lambda out, tensor, options: handle,
    )
    part.all_reduce(torch.ones(1))
    part.all_gather(torch.ones(2, 1), torch.ones(1))
    assert waited == ["waited"] * 2 * waits
