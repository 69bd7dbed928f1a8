"""`minisgl bench timeline` on a small trace."""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench import timeline
from minisgl.config import UsageError


def event(category: str, name: str, start: float, duration: float, of: int = 0) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": 1,
        "args": {"correlation": of},
    }  # fmt: skip


def trace(path: Path) -> Path:
    """Three graphs a millisecond apart; each has 500 us of attention and 200 us of products, of
    which 100 us are at the same time."""
    events = []
    for i in range(3):
        at = 1000.0 * i
        events += [
            event("cuda_runtime", "cudaGraphLaunch", at - 50, 20, of=i),
            event("cuda_runtime", "cudaEventSynchronize", at + 100, 300),
            event("kernel", "mini_attention<128>", at, 500, of=i),
            event("kernel", "nvjet_tst_64x8", at + 400, 200, of=i),
            event("gpu_memcpy", "Memcpy HtoD", at + 700, 10, of=100 + i),
        ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    timeline.add_arguments(parser)
    return timeline.run(parser.parse_args(argv))


def test_a_step_is_split_into_groups_of_kernels(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert run(str(trace(tmp_path / "t.json.gz")), "--json", str(report)) == 0
    found = json.loads(report.read_text())
    assert found["steps"] == 2
    assert found["step_ms"] == pytest.approx(1.0)
    assert found["device_busy_ms"] == pytest.approx(0.61)
    assert found["host_waits_ms"] == pytest.approx(0.3)
    assert found["groups_ms"] == pytest.approx({"copies": 0.01, "products": 0.2, "attention": 0.5})
    assert found["top_kernels"][0]["name"] == "mini_attention<128>"


def test_steps_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "steps.png"
    assert run(str(trace(tmp_path / "t.json.gz")), "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void flash::prepare_varlen_num_blocks", "attention"),
        ("add_rms_norm", "norms"),
        ("void skinny_linear<1, 2>", "products"),
        ("qk_rope_store", "rope and KV store"),
        ("silu_and_mul", "gate"),
        ("sample<...>", "sampling"),
        ("ncclDevKernel_AllReduce", "communication"),
        ("elementwise", "others"),
    ],
)
def test_kernels_are_known_by_their_names(name: str, group: str) -> None:
    assert timeline.group_of(name) == group


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    with pytest.raises(UsageError, match="is no trace"):
        run(str(wrong))
    wrong.write_text('{"traceEvents": []}')
    with pytest.raises(UsageError, match="fewer than two CUDA graphs"):
        run(str(wrong))
