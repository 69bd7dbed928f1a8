"""The arithmetic and the arguments of `minisgl bench bus`."""

import argparse
import os
import subprocess
import sys

import pytest

from minisgl.bench import bus
from minisgl.bench.bus import Look, Run, compare
from minisgl.bench.processes import cpu_seconds, redis_server, running
from minisgl.config import StartError, UsageError
from minisgl.launch.supervisor import ChildSpec

READY = 'import os, time; os.write(int(os.environ["MINISGL_READY_FD"]), b"yes\\n"); time.sleep(60)'


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bus.add_arguments(parser)
    return parser.parse_args(argv)


def run_of(*milliseconds: float) -> Run:
    look = Look(0.0, {}, {})
    return Run(look, look, 1, len(milliseconds), [ms / 1e3 for ms in milliseconds])


def test_the_defaults_are_the_load_of_the_target() -> None:
    args = parsed("--model", "m")
    assert (args.streams, args.load_streams, args.bus) == (64, 128, None)
    assert args.load_streams / args.load_step_seconds[0] > 10_000


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--streams", "0"), ("--step-seconds", "-1"), ("--rounds", "x"),
     ("--load-step-seconds", "0.1,0"), ("--json", "/no/such/folder/file")],
)  # fmt: skip
def test_a_wrong_argument_is_named(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--model", "m", flag, value)
    assert flag in capsys.readouterr().err


def test_a_bus_that_is_no_redis_is_refused() -> None:
    with pytest.raises(UsageError, match="--bus must be redis://"):
        bus.run(parsed("--model", "m", "--bus", "ipc:///tmp/x"))


def test_a_missing_redis_server_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="apt-get install redis-server, or give --bus"):
        redis_server().__enter__()


def test_what_redis_adds_is_the_difference_of_pooled_tokens_and_of_each_round() -> None:
    runs = {
        "zmq": [run_of(1, 2, 3), run_of(1, 2, 3), run_of(5, 6, 7)],
        "redis": [run_of(2, 3, 4), run_of(3, 4, 5), run_of(6, 7, 8)],
    }
    added = compare(runs)["added_seconds"]["p50"]
    assert added["rounds"] == pytest.approx([0.001, 0.002, 0.001])
    assert added["median_of_rounds"] == pytest.approx(0.001)
    assert added["pooled"] == pytest.approx(0.004 - 0.003)
    assert compare(runs)["latency_seconds"]["redis"]["max"] == pytest.approx(0.008)


def test_a_report_counts_what_was_used_between_the_two_looks() -> None:
    begin = Look(10.0, {"rank 0": 1.0, "client": 5.0}, {"xadd": 7, "get": 3})
    end = Look(12.0, {"rank 0": 1.5, "client": 5.2}, {"xadd": 107, "get": 3, "xread": 50})
    report = Run(begin, end, 50, 400, [0.001, 0.003]).report()
    assert report["tokens_per_second"] == 200
    assert report["cpu"] == pytest.approx({"rank 0": 0.25, "client": 0.1})
    assert report["commands_per_step"] == {"xadd": 2.0, "xread": 1.0}
    assert report["latency_seconds"]["p50"] == pytest.approx(0.002)


def test_processes_run_while_the_block_does() -> None:
    spec = ChildSpec(name="sleeper", command=(sys.executable, "-c", READY))
    with running([spec]) as pids:
        assert set(pids) == {"sleeper"}
        os.kill(pids["sleeper"], 0)
        assert cpu_seconds(pids)["sleeper"] >= 0
    with pytest.raises(ProcessLookupError):
        os.kill(pids["sleeper"], 0)


def test_a_process_that_ends_before_it_is_ready_is_an_error_and_ends_the_others() -> None:
    specs = [
        ChildSpec(name="sleeper", command=(sys.executable, "-c", READY)),
        ChildSpec(name="broken", command=(sys.executable, "-c", "raise SystemExit(3)")),
    ]
    with pytest.raises(StartError, match="broken ended with code 3"), running(specs):
        pass


def test_the_time_of_a_process_counts_while_it_computes() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds({"it": process.pid})["it"] >= 0.25
