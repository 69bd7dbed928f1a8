"""Flags of benchmarks: what is taken, and what is said of the rest."""

import argparse
import json
from pathlib import Path

import pytest

from minisgl.bench import kernels, serve
from minisgl.bench.arguments import (
    lengths,
    positive,
    positive_int,
    scales,
    share,
    token_range,
)
from minisgl.config import UsageError


def parsed(module: object, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser.parse_args(argv)


def test_a_range_of_tokens_may_be_one_number() -> None:
    assert token_range("10-20") == (10, 20) and token_range("7") == (7, 7)


def test_lengths_and_scales_are_lists() -> None:
    assert scales("0.4, 1") == (0.4, 1.0)
    assert lengths("500, 2000") == (500, 2000)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(token_range, t) for t in ("", "0-5", "9-3", "a-b", "-5", "3-")]
    + [(positive, t) for t in ("0", "-1", "nan", "inf", "x")]
    + [(positive_int, t) for t in ("0", "-1", "1.5", "\u00b2", "")]
    + [(share, t) for t in ("-0.1", "1.1", "nan", "x")]
    + [(scales, t) for t in ("", "1,,2", "0", "1,-2")]
    + [(lengths, t) for t in ("", "5,,6", "0")],
)
def test_anything_else_is_refused_with_what_was_given(kind: object, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        kind(text)  # type: ignore[operator]


def test_a_server_and_a_model_to_serve_exclude_each_other() -> None:
    with pytest.raises(SystemExit):
        parsed(serve, "--url", "http://x", "--model", "m")
    with pytest.raises(SystemExit):
        parsed(serve)


def test_no_key_is_written_into_a_report() -> None:
    args = parsed(serve, "--url", "http://x", "--api-key", "secret")
    assert "secret" not in json.dumps(serve.plain_arguments(args))


def test_kernels_are_timed_beside_their_references(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    args = parsed(kernels, "--kernel", "radix-compare", "--seconds", "0.001", "--json", str(path))
    assert kernels.run(args) == 0
    timings = json.loads(path.read_text())["kernels"]
    assert len(timings) == 4
    assert all(t["seconds"] > 0 and t["reference_seconds"] > 0 for t in timings)


def test_an_unknown_kernel_is_named_with_the_choices() -> None:
    with pytest.raises(UsageError, match=r"radix-compare.*'radx'"):
        kernels.run(parsed(kernels, "--kernel", "radx"))
