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


def test_a_run_with_failed_requests_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "20", "--output-tokens", "64", "--prompt-tokens", "9")
    code = run("--model", model, "--serve-args=--fake-engine --max-queued-requests 1", *flags)
    shown = capsys.readouterr()
    assert (code == 0) == ("failed" not in shown.err)
    assert "HTTP 429" in shown.err and code == 1
