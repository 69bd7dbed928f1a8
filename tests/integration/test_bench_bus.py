"""`minisgl bench bus` on both buses, with a small load."""

import json
from pathlib import Path

import pytest

from minisgl.cli.main import main
from tests.tiny import build_tiny


@pytest.mark.redis
@pytest.mark.slow
def test_both_buses_are_measured_and_redis_commands_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    model = build_tiny(tmp_path / "model")
    code = main([
        "bench", "bus", "--model", str(model), "--streams", "3", "--rounds", "2",
        "--output-tokens", "60", "--load-streams", "4", "--load-step-seconds", "0.02",
        "--step-seconds", "0.02", "--json", str(report),
    ])  # fmt: skip
    assert code == 0
    found = json.loads(report.read_text())
    assert len(found["added_seconds"]["p99"]["rounds"]) == 2
    assert all(found["latency_seconds"][b]["count"] > 200 for b in ("zmq", "redis"))
    (load,) = found["load"]
    assert {"rank 0", "detokenizer", "gateway", "redis", "client"} <= set(load["cpu"])
    # Two hops, one entry each, whatever the number of streams.
    assert 1.5 < load["commands_per_step"]["xadd"] < 3
