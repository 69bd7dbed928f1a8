"""`minisgl bench offline`."""

import argparse
import json
from pathlib import Path

import pytest

from minisgl.bench import offline
from minisgl.config import UsageError
from minisgl.llm.answers import StepTimes
from tests import tiny


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    return offline.run(parser.parse_args(argv))


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    return parser.parse_args(argv)


def test_the_nano_workload_is_256_sequences_of_100_to_1024_tokens_each_way() -> None:
    loads = offline.workloads(parsed("--workload", "nano"))
    assert loads == {"nano": offline.Workload(256, (100, 1024), (100, 1024))}


def test_flags_change_a_workload() -> None:
    loads = offline.workloads(parsed("--workload", "nano", "--num-prompts", "3"))
    assert loads == {"nano": offline.Workload(3, (100, 1024), (100, 1024))}


def test_several_workloads_run_one_after_the_other_and_a_wrong_name_is_told() -> None:
    loads = offline.workloads(parsed("--workload", "decode-8,prefill-1x128"))
    assert list(loads) == ["decode-8", "prefill-1x128"]
    with pytest.raises(argparse.ArgumentTypeError, match="'nono' is none of small, nano"):
        offline.workload_names("nano,nono")


def test_prefill_ends_when_every_request_has_its_first_token() -> None:
    times = [
        StepTimes(seconds=1.0, tokens=0, first_tokens=0),
        StepTimes(seconds=2.0, tokens=2, first_tokens=2),
        StepTimes(seconds=4.0, tokens=3, first_tokens=1),
        StepTimes(seconds=8.0, tokens=3, first_tokens=0),
    ]
    assert offline.first_token_seconds(times, 2) == 3.0
    assert offline.first_token_seconds(times, 3) == 7.0


def test_requests_are_those_of_the_seed_and_never_end_early() -> None:
    load = offline.Workload(50, (3, 9), (2, 4))
    prompts, sampling = offline.requests(load, 17, 0.6, seed=0)
    assert (prompts, sampling) == offline.requests(load, 17, 0.6, seed=0)
    assert prompts != offline.requests(load, 17, 0.6, seed=1)[0]
    assert {len(p) for p in prompts} == set(range(3, 10))
    assert {s.max_tokens for s in sampling} == {2, 3, 4}
    assert all(s.ignore_eos and s.temperature == 0.6 for s in sampling)
    assert {i for p in prompts for i in p} == set(range(17))


def test_nano_is_the_workload_that_others_measure() -> None:
    prompts, sampling = offline.requests(offline.WORKLOADS["nano"], 151_936, 0.6, seed=0)
    assert sum(map(len, prompts)) == 142_827
    assert sum(s.max_tokens or 0 for s in sampling) == 133_966


def test_a_model_is_measured(tmp_path: Path) -> None:
    folder = tiny.build_tiny(tmp_path / "model")
    report = tmp_path / "report.json"
    flags = ("--num-prompts", "3", "--prompt-tokens", "4-8", "--output-tokens", "5")
    assert run("--model", str(folder), "--dtype", "float32", *flags, "--json", str(report)) == 0
    figures = json.loads(report.read_text())
    assert figures["output_tokens"] == 15
    assert figures["output_tokens_per_second"] > 0
    assert figures["step_seconds"]["count"] == figures["steps"] >= 5
    assert figures["prefill_seconds"] + figures["decode_seconds"] <= figures["seconds"]
    assert figures["decode_tokens_per_second"] > 0


def test_dummy_weights_need_no_tokenizer_and_several_workloads_share_an_engine(
    tmp_path: Path,
) -> None:
    folder = tiny.build_tiny(tmp_path / "model")
    only = tmp_path / "only"
    only.mkdir()
    (only / "config.json").write_bytes((folder / "config.json").read_bytes())
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    flags = ("--prompt-tokens", "4", "--output-tokens", "6", "--repeat", "3")
    profile = ("--profile", str(trace), "--profile-steps", "2-4", "--json", str(report))
    names = ("--workload", "decode-1,decode-8", "--load-format", "dummy")
    assert run("--model", str(only), *names, *flags, *profile) == 0
    runs = json.loads(report.read_text())["runs"]
    assert [one["output_tokens"] for one in runs] == [6, 48]
    assert all(len(one["all_seconds"]) == 3 for one in runs)
    for name in ("decode-1", "decode-8"):
        written = tmp_path / f"trace-{name}.json"
        assert json.loads(written.read_text())["traceEvents"]


def test_step_times_are_reported_at_each_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    flags = ("--requests", "4", "--lengths", "50,100", "--steps", "10")
    assert run("--fake-engine", *flags, "--json", str(report)) == 0
    assert list(json.loads(report.read_text())["step_seconds"]) == ["50", "100"]
    shown = capsys.readouterr().out
    assert "at 50 tokens" in shown and "median at 100 tokens / at 50 tokens" in shown


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ((), "--model is missing"),
        (("--fake-engine", "--workload", "nano"), "--workload does not go with --fake-engine"),
        (("--fake-engine", "--num-prompts", "3"), "--num-prompts does not go with"),
        (("--model", "./no-such-folder"), "no-such-folder"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(argv: tuple[str, ...], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        run(*argv)


def test_sequences_that_do_not_fit_are_refused_before_they_run(tmp_path: Path) -> None:
    folder = tiny.build_tiny(tmp_path / "model")
    flags = ("--prompt-tokens", "500", "--output-tokens", "100")
    with pytest.raises(UsageError, match="600 tokens does not fit.*512"):
        run("--model", str(folder), *flags)
