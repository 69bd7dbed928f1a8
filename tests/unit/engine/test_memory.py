"""How many pages the KV cache gets, and what a host leaves to a process."""

import subprocess
import sys
from pathlib import Path

import pytest

from minisgl import host
from minisgl.config import StartError
from minisgl.engine.memory import pages_for_requests, plan_pages

GIB = 2**30


def _plan(**changes: object) -> int:
    given: dict[str, object] = {
        "free_before": [10 * GIB],
        "model_bytes": [GIB],
        "activation_bytes": GIB,
        "memory_ratio": 0.5,
        "page_bytes": 2**20,
        "most": 10**9,
    }
    free = changes.get("free_before", given["free_before"])
    given["sharing"] = [1] * len(free)  # type: ignore[arg-type]
    return plan_pages(**(given | changes))  # type: ignore[arg-type]


def test_pages_fill_the_share_of_free_memory_that_model_and_activations_leave() -> None:
    assert _plan() == 3 * 1024


def test_the_rank_with_the_least_memory_decides() -> None:
    assert _plan(free_before=[10 * GIB, 9 * GIB], model_bytes=[GIB, GIB]) == 2560
    assert _plan(free_before=[10 * GIB] * 2, model_bytes=[GIB, 2 * GIB]) == 2048


def test_ranks_that_differ_by_more_than_two_gib_are_an_error_that_names_them() -> None:
    assert _plan(free_before=[10 * GIB, 8 * GIB], model_bytes=[GIB, GIB]) == 2048
    with pytest.raises(StartError, match=r"rank 1 has 7\.90 GiB free and rank 0 10\.00 GiB"):
        _plan(free_before=[10 * GIB, int(7.9 * GIB)], model_bytes=[GIB, GIB])


def test_ranks_share_the_memory_of_their_own_host_only() -> None:
    free = [12 * GIB] * 3
    models = [GIB // 2] * 3
    alone = _plan(free_before=free, sharing=[1, 1, 1], model_bytes=models)
    packed = _plan(free_before=free, sharing=[2, 2, 1], model_bytes=models)
    assert (alone, packed) == (4608, 1536)


def test_never_more_pages_than_all_requests_need() -> None:
    assert pages_for_requests(3, 10, 4) == 9
    assert _plan(most=9) == 9


def test_a_model_that_leaves_no_page_is_an_error_that_says_what_takes_the_memory() -> None:
    with pytest.raises(StartError, match=r"model takes 9\.00 GiB.*--memory-ratio"):
        _plan(model_bytes=[9 * GIB])


def _cgroup(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_a_container_memory_limit_counts_less_what_is_used_and_not_reclaimable(
    tmp_path: Path,
) -> None:
    _cgroup(
        tmp_path,
        memory_max="1000\n",
        memory_current="700\n",
        memory_stat="anon 1\ninactive_file 200\n",
    )
    assert host._cgroup_left(tmp_path) == 500
    _cgroup(tmp_path, memory_max="max\n")
    assert host._cgroup_left(tmp_path) is None
    assert host._cgroup_left(tmp_path / "none") is None


def test_a_container_cpu_quota_counts_and_never_means_no_core(tmp_path: Path) -> None:
    assert host._cpu_quota(_cgroup(tmp_path, cpu_max="250000 100000\n")) == 2.5
    assert host._cpu_quota(_cgroup(tmp_path, cpu_max="50000 100000\n")) == 1.0
    assert host._cpu_quota(_cgroup(tmp_path, cpu_max="max 100000\n")) is None


def test_every_process_of_this_host_gives_it_the_same_number() -> None:
    asked = "from minisgl.host import host_id; print(host_id())"
    other = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=60
    )
    assert 0 < host.host_id() == int(other.stdout) < 2**63


def test_this_host_has_a_core_and_memory() -> None:
    assert host.usable_cpus() >= 1
    assert host.free_memory() > 0
