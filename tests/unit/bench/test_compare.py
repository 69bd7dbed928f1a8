"""The comparison with other systems: processes, turns, ratios, the table and the picture."""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl.bench import offline
from minisgl.bench.compare import command, report
from minisgl.bench.compare.contender import Cell, Contender, Failed, Grid, Times, run_command
from minisgl.bench.compare.worker import EXTRA_TOKENS, Marks, Task
from minisgl.config import StartError, UsageError
from minisgl_kernels.cpu_decoder import PHASES, cpu_decoder_available
from tests import tiny
from tests.support import is_running, wait_until

GRID = Grid(batches=(1, 4), contexts=(100,), output_tokens=50)
ONE, FOUR = GRID.cells
LINES = [
    {"batch": 1, "prompt_tokens": 100, "prefill_seconds": 2.0, "decode_seconds": 5.0},
    {"batch": 4, "prompt_tokens": 100, "prefill_seconds": 4.0, "decode_seconds": 10.0},
]


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def printing(*lines: object) -> tuple[str, ...]:
    return script("\n".join(f"print({json.dumps(line)!r})" for line in lines))


def system(name: str, run: Sequence[str] = (), weights: str = "bfloat16") -> Contender:
    return Contender(name, "1.0", weights, tuple(run) or printing(*LINES))


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    return offline.run(parser.parse_args(argv))


# --- processes -----------------------------------------------------------------------------------


def test_times_are_read_from_what_a_system_prints_among_other_things() -> None:
    noise = "print('{broken'); print('loading'); print('{\"other\": 1}')\n"
    process = script(noise + "\n".join(f"print({json.dumps(line)!r})" for line in LINES))
    found = system("rival", process).measure(GRID.cells, 60)
    assert found == {ONE: Times(2.0, 5.0), FOUR: Times(4.0, 10.0)}


def test_a_cell_that_was_not_measured_is_named() -> None:
    with pytest.raises(Failed, match="no times for batch 4 with prompts of 100 tokens"):
        system("rival", printing(LINES[0])).measure(GRID.cells, 60)


def test_one_that_may_lose_lines_runs_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    late = script(
        f"open({str(log)!r}, 'a').write('x')\n"
        f"if len(open({str(log)!r}).read()) == 2: print({json.dumps(LINES[0])!r})"
    )
    forgetful = Contender("rival", "1.0", "bfloat16", late, attempts=3)
    assert forgetful.measure([ONE], 60) == {ONE: Times(2.0, 5.0)}
    assert log.read_text() == "xx"


def test_the_end_of_a_crashed_process_is_told_with_its_last_line() -> None:
    crash = script("import sys; print('first', file=sys.stderr); sys.exit('no memory left')")
    with pytest.raises(Failed, match="ended with code 1: no memory left"):
        run_command(crash, {}, 60)
    illegal = script("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(Failed, match="killed by SIGILL") as raised:
        run_command(illegal, {}, 60)
    assert raised.value.killed_by == signal.SIGILL
    with pytest.raises(Failed, match="no-such-program cannot be run: No such file"):
        run_command(["/no-such-program"], {}, 60)


def test_a_process_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hanging = ("sh", "-c", f"sleep 600 & echo $$ $! > {pids}; wait")
    with pytest.raises(Failed, match="more than 3 seconds"):
        run_command(hanging, {}, 3)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    wait_until(lambda: not any(map(is_running, started)), 10, lambda: f"{started} still run")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot follow their parent")
def test_a_process_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    inner = (
        f"import os, signal; open({str(pid) + '.new'!r}, 'w').write(str(os.getpid()));"
        f"os.rename({str(pid) + '.new'!r}, {str(pid)!r}); signal.pause()"
    )
    outer = (
        "import sys; from minisgl.bench.compare.contender import run_command;"
        f"run_command([sys.executable, '-c', {inner!r}], {{}}, 600)"
    )
    with subprocess.Popen(script(outer)) as process:
        try:
            wait_until(pid.exists, 60, lambda: "it has not started")
        finally:
            process.kill()
    rival = int(pid.read_text())
    wait_until(lambda: not is_running(rival), 10, lambda: f"{rival} still runs")


# --- turns ---------------------------------------------------------------------------------------


def test_systems_take_turns_and_each_round_starts_with_another(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def logged(name: str) -> Contender:
        text = "\n".join(f"print({json.dumps(line)!r})" for line in LINES)
        return system(name, script(f"open({str(log)!r}, 'a').write({name!r})\n{text}"))

    rounds, failed = command.take_turns([logged("minisgl"), logged("b")], GRID, 3, 60)
    assert log.read_text() == "minisgl" + "b" + "b" + "minisgl" + "minisgl" + "b"
    assert {name: len(times) for name, times in rounds.items()} == {"minisgl": 3, "b": 3}
    assert not failed


def test_a_rival_that_fails_is_left_out_and_the_others_go_on() -> None:
    rival = system("rival", script("import sys; sys.exit('broken')"))
    rounds, failed = command.take_turns([system("minisgl"), rival], GRID, 2, 60)
    assert len(rounds["minisgl"]) == 2
    assert failed == {"rival": "it ended with code 1: broken"}


def test_nothing_is_reported_if_the_engine_itself_fails() -> None:
    ours = system("minisgl", script("import sys; sys.exit('broken')"))
    with pytest.raises(StartError, match="minisgl failed: it ended with code 1: broken"):
        command.take_turns([ours, system("rival")], GRID, 2, 60)


# --- what counts ---------------------------------------------------------------------------------


def test_a_grid_has_every_batch_with_every_length() -> None:
    grid = Grid(batches=(1, 2), contexts=(8, 16), output_tokens=4)
    assert grid.cells == (Cell(1, 8), Cell(2, 8), Cell(1, 16), Cell(2, 16))
    assert grid.longest == 20


def test_decoding_counts_from_the_last_first_token_to_the_last_of_as_many_further_ones() -> None:
    marks = Marks(batch=2, output_tokens=2)
    for now, tokens in enumerate((1, 1, 2, 2, 2)):
        marks.add(tokens, float(now))
    assert (marks.first, marks.last, marks.seconds) == (1.0, 3.0, 2.0)


def test_prompts_are_the_same_for_all_systems_and_others_each_time() -> None:
    task = Task(model="m", grid=GRID, vocab_size=300, threads=1, seed=3)
    again = Task.loads(task.dumps())
    assert again == task
    prompts = task.prompts(FOUR)
    first, second = next(prompts), next(prompts)
    assert first == next(again.prompts(FOUR)) and first != second
    assert [len(p) for p in first] == [100] * 4
    assert all(0 <= token < 300 for prompt in first for token in prompt)


def test_rates_are_medians_of_rounds_and_ratios_show_their_spread() -> None:
    ours = [{ONE: Times(1.0, 10.0)}, {ONE: Times(2.0, 5.0)}, {ONE: Times(4.0, 2.0)}]
    theirs = [{ONE: Times(2.0, 20.0)}, {ONE: Times(2.0, 20.0)}, {ONE: Times(2.0, 20.0)}]
    grid = Grid(batches=(1,), contexts=(100,), output_tokens=50)
    decode, prefill = report.figures(grid, {"minisgl": ours, "rival": theirs}, "minisgl")
    assert decode["phase"] == "decode" and prefill["phase"] == "prefill"
    assert decode["rounds"]["minisgl"] == [5.0, 10.0, 25.0]
    assert decode["tokens_per_second"] == {"minisgl": 10.0, "rival": 2.5}
    assert decode["ratios"] == {"rival": {"ratio": 4.0, "lowest": 2.0, "highest": 10.0}}
    assert prefill["tokens_per_second"] == {"minisgl": 50.0, "rival": 50.0}
    assert prefill["ratios"]["rival"] == {"ratio": 1.0, "lowest": 0.5, "highest": 2.0}


def test_the_table_has_a_line_for_each_cell_and_columns_for_each_rival() -> None:
    times = [{ONE: Times(2.0, 5.0), FOUR: Times(4.0, 10.0)}]
    slower = [{ONE: Times(4.0, 10.0), FOUR: Times(4.0, 20.0)}]
    rows = report.figures(GRID, {"minisgl": times, "rival": slower}, "minisgl")
    lines = [line.split() for line in report.ratio_table(rows, "minisgl").splitlines()]
    assert lines[1:] == [
        ["decode", "1", "100", "10.0", "100.00", "5.0", "2.00", "2.00-2.00"],
        ["decode", "4", "100", "20.0", "200.00", "10.0", "2.00", "2.00-2.00"],
        ["prefill", "1", "100", "50.0", "2,000.00", "25.0", "2.00", "2.00-2.00"],
        ["prefill", "4", "100", "100.0", "4,000.00", "100.0", "1.00", "1.00-1.00"],
    ]
    alone = report.ratio_table(report.figures(GRID, {"minisgl": times}, "minisgl"), "minisgl")
    assert "times" not in alone and len(alone.splitlines()) == 5


def test_phases_stand_in_milliseconds_beside_their_sum() -> None:
    rows = [
        {"phase": phase, "batch": 1, "prompt_tokens": 8, "seconds": {"qkv": 0.002, "rest": time}}
        for phase, time in (("prefill", 0.001), ("decode", 0.0005))
    ]
    lines = [line.split() for line in report.phase_table(rows).splitlines()]
    assert lines == [
        ["ms", "batch", "prompt", "qkv", "rest", "all"],
        ["decode", "1", "8", "2.000", "0.500", "2.500"],
        ["prefill", "1", "8", "2.000", "1.000", "3.000"],
    ]


@pytest.mark.parametrize("batches", [(1, 4), (1, 2, 4, 8, 16)])
def test_the_picture_is_a_png(tmp_path: Path, batches: tuple[int, ...]) -> None:
    grid = Grid(batches, (100, 200), 50)
    times = [dict.fromkeys(grid.cells, Times(2.0, 5.0))]
    rows = report.figures(grid, {"minisgl": times, "rival": times}, "minisgl")
    path = tmp_path / "plot.png"
    report.plot_comparison(rows, [system("minisgl"), system("rival")], str(path), "title")
    assert path.read_bytes().startswith(b"\x89PNG")


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return tiny.build_tiny(tmp_path / "model")


def test_the_engine_is_measured_beside_transformers(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_file, plot = tmp_path / "report.json", tmp_path / "plot.png"
    grid = ("--batches", "1,2", "--contexts", "12", "--output-tokens", "3", "--repeat", "2")
    files = ("--json", str(report_file), "--plot", str(plot))
    assert run("--model", str(small), "--compare", "transformers", *grid, *files) == 0
    found = json.loads(report_file.read_text())
    assert {s: v["weights"] for s, v in found["systems"].items()} == {
        "minisgl": "bfloat16",
        "transformers": "bfloat16",
    }
    assert [(r["phase"], r["batch"]) for r in found["rates"]] == [
        ("decode", 1), ("decode", 2), ("prefill", 1), ("prefill", 2),
    ]  # fmt: skip
    for row in found["rates"]:
        assert all(len(each) == 2 for each in row["rounds"].values())
        assert row["ratios"]["transformers"]["ratio"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "round 2, transformers" in shown and "medians of 2 rounds" in shown


def test_where_the_time_goes_is_told_or_why_it_is_not_known(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_file = tmp_path / "report.json"
    grid = ("--batches", "2", "--contexts", "8", "--output-tokens", "2", "--repeat", "1")
    flags = ("--model", str(small), *grid, "--phases", "--json", str(report_file))
    with pytest.raises(StartError, match="torch computes here"):
        run(*flags, "--attention-backend", "torch")
    if not cpu_decoder_available():
        pytest.skip("the kernels of the CPU do not compile here")
    assert run(*flags) == 0
    phases = json.loads(report_file.read_text())["phases"]
    assert [line["phase"] for line in phases] == ["prefill", "decode"]
    assert all(list(line["seconds"]) == [*PHASES, "rest"] for line in phases)
    assert "attention" in capsys.readouterr().out


def test_a_rival_that_fails_makes_the_exit_code_1(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> Contender:
        return system("transformers", script("import sys; sys.exit('broken')"))

    monkeypatch.setitem(command.RIVALS, "transformers", broken)
    grid = ("--batches", "1", "--contexts", "4", "--output-tokens", "2", "--repeat", "1")
    assert run("--model", str(small), "--compare", "transformers", *grid) == 1
    shown = capsys.readouterr()
    assert "transformers failed: it ended with code 1: broken" in shown.err
    assert "decode" in shown.out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--batches", "1", "--workload", "nano"), "--workload does not go with --compare"),
        (("--batches", "1", "--num-prompts", "3"), "--num-prompts does not go with"),
        (("--contexts", "8", "--prompt-tokens", "3"), "--prompt-tokens does not go with"),
        (("--batches", "1", "--output-tokens", "3-9"), "--output-tokens must be one number"),
        (("--batches", "1", "--device", "cuda"), "--device cuda does not go with"),
        (("--contexts", "500", "--output-tokens", "11"), "513 tokens do not fit.*512"),
        (("--fake-engine", "--batches", "2"), "--batches does not go with --fake-engine"),
    ],
)
def test_flags_and_lengths_that_do_not_fit_are_named(
    small: Path, argv: tuple[str, ...], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        run("--model", str(small), *argv)


def test_a_batch_has_at_most_64_sequences() -> None:
    assert command.batches("1,64") == (1, 64)
    with pytest.raises(argparse.ArgumentTypeError, match="at most 64 sequences"):
        command.batches("1,65")


def test_the_longest_sequence_that_fits_is_measured_to_its_end(small: Path) -> None:
    longest = 512 - EXTRA_TOKENS - 2
    grid = ("--batches", "1", "--contexts", str(longest), "--output-tokens", "2", "--repeat", "1")
    assert run("--model", str(small), *grid) == 0
