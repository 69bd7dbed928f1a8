"""A benchmark's own server: how it starts, how it ends, and a whole run against it."""

import argparse
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.bench import serve
from minisgl.bench.server import Server, choose_port
from minisgl.config import StartError
from tests.support import descendants, is_running, wait_until
from tests.tiny import build_tiny

OWNER = """
import sys, time
from minisgl.bench.server import Server
with Server(sys.argv[1], ["--fake-engine"]) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("model")))


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(argv))


def test_a_port_that_is_taken_is_replaced_by_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        assert choose_port(taken) not in (0, taken)


def test_a_server_that_cannot_start_is_one_clear_error() -> None:
    with pytest.raises(StartError, match="ended with code 2: .*no-such-model"):
        Server("./no-such-model").__enter__()


def test_a_server_ends_with_the_process_that_started_it(model: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, model], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        pids = descendants(int(owner.stdout.readline()))
        assert len(pids) > 3
    finally:
        owner.kill()
        owner.wait()
    wait_until(lambda: not any(map(is_running, pids)), 20, lambda: "the server is left over")


def test_an_interrupted_run_stops_its_server(model: str) -> None:
    command = [sys.executable, "-m", "minisgl", "bench", "serve", "--model", model]
    command += ["--serve-args=--fake-engine", "--seconds", "600", "--concurrency", "2"]
    bench = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pids: list[int] = []

    def all_started() -> bool:
        pids[:] = descendants(bench.pid)
        return len(pids) >= 5  # the benchmark, the launcher, a rank, a detokenizer, a gateway

    try:
        wait_until(all_started, 120, lambda: f"only {pids} run")
        bench.send_signal(signal.SIGINT)
        assert bench.wait(timeout=60) == 130
    finally:
        bench.kill()
        bench.wait()
    wait_until(lambda: not any(map(is_running, pids)), 20, lambda: "the server is left over")


def test_a_run_is_reported_and_drawn(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "report.json", tmp_path / "run.png"
    flags = ["--num-prompts", "12", "--prompt-tokens", "3-9", "--output-tokens", "2-6"]
    flags += ["--request-rate", "100", "--arrival", "fixed", "--disconnect-share", "0.3"]
    code = run(
        "--model", model, "--serve-args=--fake-engine", *flags,
        "--json", str(report), "--plot", str(picture),
    )  # fmt: skip
    figures = json.loads(report.read_text())
    assert code == 0 and figures["errors"] == 0
    assert figures["completed"] + figures["left"] == figures["requests"] == 12
    assert figures["completed"] > 0
    assert figures["ttft_seconds"]["count"] == figures["completed"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "first token (TTFT)" in capsys.readouterr().out


def test_a_trace_is_replayed_at_each_scale_on_one_server(model: str, tmp_path: Path) -> None:
    """By a real engine: the share of time in which it computes is its own figure."""
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "report.json", tmp_path / "scales.png"
    flags = ["--trace", "bursts", "--num-prompts", "20", "--request-rate", "20"]
    flags += ["--prompt-tokens", "4-60", "--output-tokens", "2-9", "--time-scale", "0.5,2"]
    code = run(
        "--model", model, "--serve-args=--num-pages 4096", *flags,
        "--json", str(report), "--plot", str(picture),
    )  # fmt: skip
    figures = json.loads(report.read_text())
    assert code == 0 and figures["trace"]["requests"] == 20
    assert [r["time_scale"] for r in figures["runs"]] == [0.5, 2.0]
    for run_ in figures["runs"]:
        assert run_["completed"] == 20 and run_["errors"] == 0
        assert run_["offered_requests_per_second"] == pytest.approx(20 / run_["time_scale"])
        assert run_["prompt_tokens"] == figures["runs"][0]["prompt_tokens"]
        server = run_["server"]
        assert 0 < server["device_busy_seconds"] < run_["seconds"]
        assert server["idle_share"] == pytest.approx(
            1 - server["device_busy_seconds"] / run_["seconds"]
        )
        assert server["idle_share_while_open"] <= server["idle_share"]
        assert server["cached_tokens"] < run_["prompt_tokens"] / 10, "prompts were seen before"
        assert run_["client"]["send_late_seconds"]["count"] == 20
    slow = figures["runs"][1]
    assert slow["seconds"] >= 2.0 * 20 / 20
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_with_failed_requests_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "20", "--output-tokens", "64", "--prompt-tokens", "9")
    code = run("--model", model, "--serve-args=--fake-engine --max-queued-requests 1", *flags)
    shown = capsys.readouterr()
    assert (code == 0) == ("failed" not in shown.err)
    assert "HTTP 429" in shown.err and code == 1
