"""What a replayed trace says of server and client, and which flags go with it."""

import argparse
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from minisgl.bench import replay, serve
from minisgl.bench.arrivals import Arrival
from minisgl.bench.client import Target, plan_trace
from minisgl.bench.plot import plot_scales
from minisgl.bench.replay import Gauges, client_was_late, open_seconds, scales_table
from minisgl.bench.stats import RequestRecord, summary
from minisgl.config import UsageError

TARGET = Target(url="", model="m", token_ids=[5, 6], max_model_len=100, headers={})


def sample(steps: int, busy: float, running: int = 0) -> str:
    return (
        "# HELP minisgl_steps\n"
        f'minisgl_step_seconds_count{{group="g0"}} {steps}\n'
        f'minisgl_device_busy_seconds_total{{group="g0"}} {busy}\n'
        f'minisgl_requests_running{{group="g0"}} {running}\n'
        "minisgl_cached_tokens_total 3.0\nother 1\n"
    )


@contextmanager
def exposition(answers: list[str]) -> Iterator[str]:
    """A server whose /metrics gives each of `answers` in turn, the last one again and again."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = (answers.pop(0) if len(answers) > 1 else answers[0]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "SETTLED_SECONDS", 0.5)
    monkeypatch.setattr(replay, "IDLE_LIMIT_SECONDS", 3.0)


@pytest.mark.usefixtures("quick")
def test_the_idle_share_is_what_the_device_did_not_compute_of_the_run() -> None:
    answers = [sample(5, 1.0, running=2), sample(9, 2.0), sample(9, 2.0)]
    with exposition(answers) as url:
        gauges = Gauges(url)
        gauges.wait_until_idle()
        # The rank tells its figures late: the last ones count.
        answers[:] = [sample(20, 3.0, running=1), sample(29, 4.0), sample(30, 4.5)]
        found = gauges.since_idle(seconds=10.0, open_seconds=5.0)
    assert (found["device_busy_seconds"], found["steps"]) == (2.5, 21)
    assert (found["idle_share"], found["idle_share_while_open"]) == (0.75, 0.5)


@pytest.mark.usefixtures("quick")
def test_a_server_that_others_use_is_an_error() -> None:
    with exposition([sample(9, 2.0, running=1)]) as url, pytest.raises(UsageError, match="is busy"):
        Gauges(url).wait_until_idle()


@pytest.mark.usefixtures("quick")
def test_of_a_server_without_these_figures_nothing_is_said() -> None:
    with exposition(["vllm:requests 3\n"]) as url:
        gauges = Gauges(url)
        gauges.wait_until_idle()
        assert gauges.since_idle(1.0, 1.0)["idle_share"] is None


def test_time_with_an_open_request_counts_once() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0)]
    records = [RequestRecord(start=a, prompt_tokens=1, end=b) for a, b in spans]
    assert open_seconds(records) == 4.0 and open_seconds([]) == 0.0


def client(late: float) -> dict[str, object]:
    return {
        "send_late_seconds": summary([0.0, late]),
        "wake_late_seconds": summary([]),
        "processor_share": 0.5,
    }


def test_a_client_that_was_late_is_told_of() -> None:
    assert client_was_late(client(0.5)) and not client_was_late(client(0.001))


def run_of(scale: float, idle: float | None) -> dict[str, object]:
    figures = summary([0.1, 0.2])
    return {
        "time_scale": scale, "offered_requests_per_second": 2.0, "output_tokens_per_second": 9.0,
        "ttft_seconds": figures, "tpot_seconds": summary([]), "e2e_seconds": figures,
        "pause_seconds": figures, "server": {"idle_share": idle},
    }  # fmt: skip


def test_the_table_has_a_line_for_each_scale() -> None:
    head, first, second = scales_table([run_of(0.4, 0.25), run_of(1.6, None)]).splitlines()
    assert "TTFT p99" in head and "TPOT p50" in head and "PAUSE p99" in head and "E2E p90" in head
    assert first.startswith("0.4") and "25.0%" in first and "150.0" in first
    assert second.startswith("1.6") and second.endswith("-")


@pytest.mark.parametrize("idle", [0.25, None])
def test_the_picture_of_scales_is_drawn(idle: float | None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [run_of(0.4, idle), run_of(1.6, idle)]
    for run in runs:
        run["tpot_seconds"] = summary([0.01])
    plot_scales(runs, str(tmp_path / "scales.png"), "a title")
    assert (tmp_path / "scales.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_of_a_trace_have_its_lengths_and_are_new_with_each_seed() -> None:
    arrivals = [Arrival(0.0, 30, 4), Arrival(1.0, 9, 2)]
    one, two = plan_trace(TARGET, arrivals, 1), plan_trace(TARGET, arrivals, 2)
    assert [(len(p.prompt_ids), p.output_tokens) for p in one] == [(30, 4), (9, 2)]
    assert [p.prompt_ids for p in one] != [p.prompt_ids for p in two]


def test_a_request_that_does_not_fit_is_named() -> None:
    with pytest.raises(UsageError, match="request 2 of the trace has 101 tokens.*limit is 100"):
        plan_trace(TARGET, [Arrival(0.0, 1, 1), Arrival(0.0, 61, 40)], 0)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--time-scale", "1"], "--time-scale goes with --trace"),
        (["--trace", "bursts", "--seconds", "3"], "--seconds does not go with --trace bursts"),
        (["--trace", "bursts", "--arrival", "fixed"], "--arrival does not go with"),
        (
            ["--trace", "a.jsonl", "--request-rate", "3"],
            "--request-rate does not go with --trace a",
        ),
        (["--trace", "a.jsonl", "--prompt-tokens", "3"], "--prompt-tokens does not go with"),
        (["--trace", "no-such-file"], "--trace no-such-file: cannot be read"),
    ],
)
def test_flags_that_contradict_a_trace_are_refused_before_a_server_starts(
    flags: list[str], error: str
) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(UsageError, match=error):
        serve.run(parser.parse_args(["--model", "./no-such-model", *flags]))
