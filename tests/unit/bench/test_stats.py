"""The figures of benchmarks."""

import json
from pathlib import Path

import pytest

from minisgl.bench.plot import plot_served
from minisgl.bench.stats import RequestRecord, served_report, summary, table, write_json

RECORDS = [
    RequestRecord(start=0.0, prompt_tokens=10, first=1.0, end=4.0, output_tokens=4, pause=2.5),
    RequestRecord(start=1.0, prompt_tokens=10, first=1.5, end=1.5, output_tokens=1),
    RequestRecord(start=2.0, prompt_tokens=10, first=2.5, end=3.0, output_tokens=2, left=True),
    RequestRecord(start=3.0, prompt_tokens=10, end=5.0, error="HTTP 500"),
]


def test_a_summary_has_the_percentiles() -> None:
    figures = summary([float(n) for n in range(101)])
    assert figures == {"count": 101, "mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def test_a_summary_of_nothing_has_no_figures() -> None:
    assert summary([])["count"] == 0 and summary([])["p50"] is None


def test_a_report_counts_each_kind_of_end() -> None:
    report = served_report(RECORDS)
    counts = {k: report[k] for k in ("requests", "completed", "left", "errors")}
    assert counts == {"requests": 4, "completed": 2, "left": 1, "errors": 1}


def test_rates_are_over_the_time_from_the_first_start_to_the_last_end() -> None:
    report = served_report(RECORDS)
    assert report["seconds"] == 5.0
    assert report["output_tokens_per_second"] == pytest.approx(7 / 5)
    assert report["requests_per_second"] == pytest.approx(2 / 5)


def test_latencies_are_those_of_whole_answers() -> None:
    report = served_report(RECORDS)
    assert report["ttft_seconds"]["count"] == 2 and report["ttft_seconds"]["max"] == 1.0
    assert report["tpot_seconds"]["count"] == 1 and report["tpot_seconds"]["p50"] == 1.0
    assert report["pause_seconds"]["count"] == 1 and report["pause_seconds"]["max"] == 2.5
    assert report["e2e_seconds"]["max"] == 4.0


def test_a_report_of_no_request_is_zeros() -> None:
    report = served_report([])
    assert report["output_tokens_per_second"] == 0 and report["ttft_seconds"]["p99"] is None


def test_a_report_is_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(str(path), served_report(RECORDS))
    assert json.loads(path.read_text())["completed"] == 2


def test_a_table_shows_a_dash_for_what_is_not_known() -> None:
    shown = table({"ttft": summary([0.25]), "tpot": summary([])}, "milliseconds", 1e3)
    assert "250.000" in shown.splitlines()[1] and shown.splitlines()[2].split()[1:] == ["-"] * 5


@pytest.mark.parametrize("records", [RECORDS, RECORDS[3:], []])
def test_a_picture_is_drawn_of_any_run(records: list[RequestRecord], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    plot_served(records, str(path), "title")
    assert path.read_bytes().startswith(b"\x89PNG")
