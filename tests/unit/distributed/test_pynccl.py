"""The wrapper hands NCCL what its C interface wants, and turns its errors into ours."""

import ctypes
import types
from pathlib import Path

import pytest
import torch

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.pynccl import NcclComm, NcclError, NcclLibrary
from tests.unit.distributed.fake_nccl import fake_nccl

COMM = "0x123456789a"


@pytest.fixture
def lib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    stream = types.SimpleNamespace(cuda_stream=0x7F00000000AB)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    try:
        return fake_nccl(tmp_path)
    except KernelUnavailable as error:
        pytest.skip(str(error))


def told(lib: ctypes.CDLL) -> list[str]:
    lines: list[str] = lib.told().decode().splitlines()
    lib.forget()
    return lines


def test_the_ranks_of_a_communicator_have_its_id_in_common(lib: ctypes.CDLL) -> None:
    library = NcclLibrary(lib)
    unique_id = library.unique_id()
    assert unique_id == bytes(range(128))
    NcclComm(library, unique_id, 2, 4)
    assert told(lib) == ["init 2 of 4 id 0 127"]
    assert library.version() == (2, 28, 9)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.bfloat16, 9), (torch.float16, 6), (torch.float32, 7), (torch.int64, 4)],
)
def test_collectives_go_to_the_current_stream(
    dtype: torch.dtype, number: int, lib: ctypes.CDLL
) -> None:
    comm = NcclComm(NcclLibrary(lib), bytes(128), 0, 2)
    x = torch.zeros(3, 5, dtype=dtype)
    told(lib)
    comm.all_reduce(x)
    comm.all_gather(torch.zeros(2, 3, 5, dtype=dtype), x)
    assert told(lib) == [
        f"reduce 1 15 {number} 0 {COMM} 0x7f00000000ab",
        f"gather 0 15 {number} {COMM} 0x7f00000000ab",
    ]


def test_an_error_has_the_words_of_nccl(lib: ctypes.CDLL) -> None:
    comm = NcclComm(NcclLibrary(lib), bytes(128), 0, 2)
    assert comm.failure() is None
    lib.fail_with(6)
    with pytest.raises(NcclError, match=r"^ncclAllReduce: remote error \(no such door\)$"):
        comm.all_reduce(torch.zeros(1))
    assert comm.failure() == "remote error (no such door)"


def test_work_in_progress_is_no_error(lib: ctypes.CDLL) -> None:
    comm = NcclComm(NcclLibrary(lib), bytes(128), 0, 2)
    lib.fail_with(7)
    comm.all_reduce(torch.zeros(1))
    assert comm.failure() is None


def test_after_an_abort_nothing_is_called_any_more(lib: ctypes.CDLL) -> None:
    comm = NcclComm(NcclLibrary(lib), bytes(128), 0, 2)
    told(lib)
    comm.abort()
    comm.abort()
    with pytest.raises(NcclError, match="aborted"):
        comm.all_reduce(torch.zeros(1))
    assert comm.failure() is None
    assert told(lib) == [f"abort {COMM}"]


def test_symmetric_memory_is_none_where_nccl_gives_no_window(lib: ctypes.CDLL) -> None:
    comm = NcclComm(NcclLibrary(lib), bytes(128), 0, 2)
    told(lib)
    assert comm.symmetric_memory(8192) is None
    assert told(lib) == [f"window {COMM} 8192 1"]
    comm.abort()
    assert told(lib) == [f"abort {COMM}", "free 1"]


def test_a_library_that_is_no_nccl_is_refused() -> None:
    with pytest.raises(KernelUnavailable, match="libnccl has no ncclGetVersion"):
        NcclLibrary(ctypes.CDLL(None))
