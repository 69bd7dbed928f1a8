"""/dev/shm of a pod is emptied, and one that cannot be written is an error."""

import os
from pathlib import Path

import pytest

from minisgl.config import StartError
from minisgl.distributed.shared_memory import empty_shared_memory, prepare_shared_memory


def test_what_an_earlier_rank_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "nccl-a1b2c3").write_bytes(b"left")
    (tmp_path / "folder").mkdir()
    prepare_shared_memory(tmp_path)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_that_cannot_be_written_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot be written .* see ranks\.sharedMemory"):
        prepare_shared_memory(tmp_path / "missing")


def test_at_the_end_nothing_stops_a_rank(tmp_path: Path) -> None:
    empty_shared_memory(tmp_path / "missing")
