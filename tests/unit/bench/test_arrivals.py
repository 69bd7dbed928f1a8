"""Traces of arrivals: one that is made, and files of others."""

from pathlib import Path

import numpy as np
import pytest

from minisgl.bench.arrivals import Arrival, bursts, read_trace
from minisgl.config import UsageError


def made(seed: int = 0, count: int = 1000) -> list[Arrival]:
    return bursts(count, 8.0, (100, 8000), (50, 1000), seed)


def test_a_made_trace_is_that_of_its_seed() -> None:
    assert made(1) == made(1) != made(2)


def test_a_made_trace_has_the_mean_rate_and_begins_at_once() -> None:
    times = [a.time for a in made()]
    assert times == sorted(times)
    assert times[0] == 0 and times[-1] == pytest.approx(1000 / 8)


def test_arrivals_come_in_bursts() -> None:
    """Counts of a second vary far more than if each came alone: then the variance is the mean."""
    counts = np.bincount([int(a.time) for a in made(count=4000)])
    assert counts.var() > 4 * counts.mean()


@pytest.mark.parametrize(
    ("field", "low", "high"), [("prompt_tokens", 100, 8000), ("output_tokens", 50, 1000)]
)
def test_lengths_are_log_normal_within_their_range(field: str, low: int, high: int) -> None:
    lengths = np.array([getattr(a, field) for a in made(count=4000)])
    assert low <= lengths.min() and lengths.max() <= high
    logs, middle = np.log(lengths), (np.log(low) + np.log(high)) / 2
    assert abs(logs.mean() - middle) < 0.1 * logs.std()
    assert 0.1 < (lengths < np.exp(middle - logs.std())).mean() < 0.22  # 16 % of a normal one


def test_a_range_of_one_length_gives_that_length() -> None:
    assert {a.prompt_tokens for a in bursts(50, 1.0, (7, 7), (2, 2), 0)} == {7}


ONE = [Arrival(0.0, 100, 20), Arrival(1.5, 7, 1)]
JSON_LINES = (
    '{"time": 4, "prompt_tokens": 100, "output_tokens": 20}\n\n'
    '{"time": 5.5, "prompt_tokens": 7, "output_tokens": 1, "more": []}\n'
)
PUBLISHED = (
    '{"chat_id": 1, "timestamp": 4.0, "input_length": 100, "output_length": 20}\n'
    '{"chat_id": 2, "timestamp": 5.5, "input_length": 7, "output_length": 1}\n'
)
CSV = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.5000000,100,20\n2023-11-16 18:15:48.0000000,7,1\n"
)


@pytest.mark.parametrize("text", [JSON_LINES, PUBLISHED, CSV, "\ufeff" + CSV])
def test_a_file_begins_at_time_zero_whatever_its_form(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert read_trace(str(path)) == ONE
    assert read_trace(str(path), 1) == ONE[:1]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no line with a request"),
        ('{"time": 1, "prompt_tokens": 3}', r"line 1: it lacks output_tokens \(or output_length"),
        ('{"time": 1, "prompt_tokens": 0, "output_tokens": 2}', "line 1: prompt_tokens must be a"),
        ('{"time": 1, "prompt_tokens": 5, "output_tokens": "x"}', "output_tokens must .* not 'x'"),
        ('{"time": "soon", "prompt_tokens": 5, "output_tokens": 2}', "time must be .* not 'soon'"),
        (JSON_LINES + '{"time": 5, "prompt_tokens": 1, "output_tokens": 1}', "line 4: .*sort"),
        ('{"time": 1,', "line 1: not valid JSON"),
        ("time,prompt_tokens,output_tokens\n1,2\n", "line 2: it lacks output_tokens"),
        ("a,b\n1,2\n", "line 2: it lacks time .* it has a, b"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=error):
        read_trace(str(path))


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(str(tmp_path / "none"))
