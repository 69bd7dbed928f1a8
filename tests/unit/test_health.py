"""The files that probes read."""

import shutil
import subprocess
from pathlib import Path

import pytest

from minisgl.config import UsageError
from minisgl.health import Health

PROBE = "read up _ < /proc/uptime; [ $((${up%.*} - $(cat live))) -lt 60 ]"


def probe(folder: Path) -> bool:
    return subprocess.run(["sh", "-c", PROBE], cwd=folder, check=False).returncode == 0


def test_a_loop_that_turns_is_alive_for_a_probe_of_the_shell(tmp_path: Path) -> None:
    health = Health(str(tmp_path))
    health.turn()
    assert probe(tmp_path)
    stuck = int((tmp_path / "live").read_text()) - 61
    (tmp_path / "live").write_text(f"{stuck}\n")
    assert not probe(tmp_path)


def test_the_loop_writes_at_most_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.clock_gettime", lambda _: now)
    health = Health(str(tmp_path))
    (tmp_path / "live").write_text("overwritten")
    health.turn()
    assert (tmp_path / "live").read_text() == "overwritten"
    now = 101.0
    health.turn()
    assert (tmp_path / "live").read_text() == "101\n"


def test_ready_exists_exactly_while_the_worker_serves(tmp_path: Path) -> None:
    health = Health(str(tmp_path), "3")
    assert not (tmp_path / "ready.3").exists()
    health.show_ready(True)
    assert (tmp_path / "ready.3").exists()
    health.show_ready(False)
    assert not (tmp_path / "ready.3").exists()


def test_a_restarted_worker_is_not_ready_because_the_one_before_it_was(tmp_path: Path) -> None:
    Health(str(tmp_path)).show_ready(True)
    Health(str(tmp_path))
    assert not (tmp_path / "ready").exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--health-dir .*nowhere.* cannot be written"):
        Health(str(tmp_path / "nowhere"))


def test_a_disk_that_takes_nothing_ends_no_worker_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "probes"
    folder.mkdir()
    health = Health(str(folder))
    monkeypatch.setattr("minisgl.health.LIVE_SECONDS", 0)
    shutil.rmtree(folder)
    for _ in range(3):
        health.turn()
        health.show_ready(True)
    assert len(caplog.records) == 1
    folder.mkdir()
    health.turn()
    health.show_ready(True)
    assert {path.name for path in folder.iterdir()} == {"live", "ready"}


def test_without_a_directory_nothing_is_written() -> None:
    health = Health(None)
    health.turn()
    health.show_ready(True)
