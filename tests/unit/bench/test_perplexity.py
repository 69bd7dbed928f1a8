"""`minisgl bench perplexity`."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch

from minisgl.bench import perplexity
from minisgl.config import UsageError
from minisgl.llm import LLM
from tests import tiny


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    perplexity.add_arguments(parser)
    return perplexity.run(parser.parse_args(argv))


def expected(folder: Path, windows: list[list[int]]) -> float:
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum")
        for window, logits in zip(windows, tiny.reference_logits(folder, windows), strict=True)
    ]
    return math.exp(sum(map(float, losses)) / sum(len(w) - 1 for w in windows))


def test_it_is_that_of_the_model_in_every_window(tmp_path: Path) -> None:
    folder = tiny.build_tiny(tmp_path / "model")
    ids = torch.randint(4, 250, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    with LLM(str(folder), dtype="float32") as llm:
        tokens, value = perplexity.perplexity(llm, ids, window=20)
    windows = [ids[:20], ids[20:40], ids[40:]]
    assert tokens == 19 + 19 + 9
    assert value == pytest.approx(expected(folder, windows), rel=1e-4)


def test_a_text_is_measured_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.build_tiny(tmp_path / "model")
    text, report = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("Ein kleiner Text, drei Fenster.")
    ids = list(tiny.make_tokenizer().encode(text.read_text()))
    flags = ("--text", str(text), "--window", "12", "--json", str(report), "--dtype", "float32")
    assert run("--model", str(folder), *flags) == 0
    found = json.loads(report.read_text())
    windows = [ids[i : i + 12] for i in range(0, len(ids), 12)]
    assert found["perplexity"]["none"] == pytest.approx(expected(folder, windows), rel=1e-4)
    assert f"perplexity of {len(ids) - 3} tokens" in capsys.readouterr().out


def test_what_int8_cannot_do_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, parts = tiny.build_tiny(tmp_path / "model"), []
    measure = perplexity._measure

    def measured(options: dict[str, object], args: argparse.Namespace) -> tuple[int, float]:
        parts.append(options["quantization"])
        return measure(options, args)

    monkeypatch.setattr(perplexity, "_measure", measured)
    with pytest.raises(UsageError, match="--quantization int8 needs"):
        run("--model", str(folder), "--dtype", "float32", "--quantization", "int8")
    assert parts == ["int8"]


def test_a_text_comes_along() -> None:
    assert len(perplexity._text(None).split()) > 1000


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--window", "1"), "--window must be at least 2"),
        (("--window", "600"), "--window must be at most 512 tokens"),
        (("--text", "./no-such-file"), "no-such-file cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_named(
    tmp_path: Path, argv: tuple[str, ...], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        run("--model", str(tiny.build_tiny(tmp_path / "model")), *argv)
