"""What a start measured is there for the next one, and never in its way."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from minisgl_kernels import measured as module
from minisgl_kernels.build import CACHE_ENV
from minisgl_kernels.measured import Measured, measured


def test_the_next_start_finds_what_was_put(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "measured.json"
    first = Measured(path)
    assert first.get("a") is None
    first.put("a", {"1": [2, "x"]})
    assert first.get("a") == Measured(path).get("a") == {"1": [2, "x"]}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_processes_keep_what_others_found(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    first, second = Measured(path), Measured(path)
    first.put("a", 1)
    second.put("b", 2)
    assert json.loads(path.read_text()) == {"a": 1, "b": 2}


def test_no_reader_ever_finds_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"

    def write(name: str) -> None:
        for i in range(50):
            Measured(path).put(name, "x" * i * 50)

    with ThreadPoolExecutor(4) as pool:
        done = pool.map(write, "abcd")
        for _ in range(200):
            if path.exists():
                json.loads(path.read_text())
        list(done)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', "\x00\xff", "[" * 100_000])
def test_a_damaged_file_is_as_good_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "measured.json"
    path.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        kept = Measured(path)
    assert kept.get("a") is None
    assert "measuring again" in caplog.text
    kept.put("a", 1)
    assert Measured(path).get("a") == 1


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Measured(tmp_path / "file" / "measured.json")
    kept.put("a", 1)
    assert kept.get("a") == 1


def test_another_driver_torch_or_kernel_measures_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {module._key(device) for device in (["H200"], ["H100"], ["H200", "driver 2"])}
    before = module._device()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert module._device() != before
    (tmp_path / "kernel.cu").write_text("one")
    monkeypatch.setattr(module, "CSRC", tmp_path)
    keys.add(module._key(["H200"]))
    (tmp_path / "kernel.cu").write_text("two")
    keys.add(module._key(["H200"]))
    assert len(keys) == 5


def test_the_file_stands_in_the_kernel_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))
    measured.cache_clear()
    try:
        measured().put("a", 1)
        assert [path.name[:9] for path in tmp_path.iterdir()] == ["measured-"]
    finally:
        measured.cache_clear()
