"""Few tokens go through a layer in another way, which gives the same."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.models import products, trial
from minisgl.models.products import Choice, Kernels, Option, Way, Ways
from minisgl_kernels import skinny_linear, wide_linear
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family
from minisgl_kernels.measured import Measured
from minisgl_kernels.skinny_linear import skinny_linear_reference
from minisgl_kernels.wide_linear import (
    Blocks,
    wide_add_reference,
    wide_linear_reference,
    wide_turn_reference,
)
from tests.unit.models.stepper import Stepper

Tiny = Callable[[str], Path]

KERNELS = Kernels(
    skinny=skinny_linear_reference, skinny_tokens=64, wide=wide_linear_reference,
    wide_add=wide_add_reference, wide_tokens=256,
)  # fmt: skip
L, S, W = (Option(way) for way in Way)


class Always(Choice):
    """One way for any number of tokens."""

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self._of = [ways] * len(self._of)


@pytest.mark.parametrize(
    "ways",
    [
        Ways(S, S, S, S), Ways(W, W, W, W), Ways(L, L, L, S), Ways(L, S, S, S), Ways(S, L, S, L),
        Ways(W, W, L, W), Ways(W, L, W, S), Ways(L, W, W, W),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3-moe"])
def test_few_tokens_give_what_many_give(tiny: Tiny, family: str, ways: Ways) -> None:
    plain, few = Stepper(tiny(family)), Stepper(tiny(family))
    few.model.model._kernels, few.model.model._choice = KERNELS, Always(ways)
    prompt = list(range(4, 24))
    for work in ((0, prompt, 0), (0, [30], 20)):
        torch.testing.assert_close(few.step(work), plain.step(work), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_product_that_turns_its_heads_gives_the_same(
    tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def turn(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(len(args[2].positions))
        return wide_turn_reference(*args, **options)

    monkeypatch.setattr(products, "turns", lambda *_: True)
    plain, few = Stepper(tiny(family)), Stepper(tiny(family))
    model = few.model.model
    model._rope_table = model.rotary.table(64)
    model._kernels = replace(KERNELS, wide_turn=turn)
    model._choice = Always(Ways(Option(Way.WIDE, Blocks(1)), W, W, W))
    few.backend.fuses = 2
    for work in ((0, [4, 5], 0), (0, list(range(4, 24)), 2), (0, [30, 31, 32], 22)):
        torch.testing.assert_close(few.step(work), plain.step(work), rtol=1e-4, atol=1e-4)
    layers = len(model._layers)
    assert calls == [20] * layers + [3] * layers, "few tokens are turned by attention"


def test_ways_are_timed_over_some_layers_that_hand_on_to_each_other(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = Stepper(tiny("llama")).model.model
    model._own, model._steps = True, (True, True)
    ready: list[bool] = []
    timed: list[list[bool]] = []

    family = Family("kernel", "run", lambda *_: {})

    def wide(x: object, *args: object, **options: object) -> torch.Tensor:
        ready.append(isinstance(x, wide_linear.Normed))
        with suppress(KernelUnavailable):
            family[options["blocks"],]
        return wide_linear_reference(x, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(skinny_linear, "skinny_linear_function", lambda: None)
    monkeypatch.setattr(wide_linear, "wide_linear_function", lambda: wide)
    monkeypatch.setattr(products, "computes", lambda *_: True)
    monkeypatch.setattr(wide_linear, "wide_add", wide_add_reference)

    def seconds(calls: object) -> float:
        del ready[:]
        for call in calls:  # type: ignore[attr-defined]
            call()
        timed.append(list(ready))
        return 1.0 / (1 + len(ready))

    monkeypatch.setattr(trial, "graph_seconds", seconds)
    monkeypatch.setattr(trial, "measured", lambda: Measured(tmp_path / "kept.json"))
    assert model.chosen == {}
    first = model.trial()
    assert first is not None
    to_compile = set(first.variants())
    first.run()
    assert {ways.down.way for ways in model.chosen.values()} == {Way.WIDE}
    _, own, *_ = timed
    assert own == [False] + [True] * (len(own) - 1), "the first norm alone is computed for itself"
    del timed[:]
    model._choice = products.Choice()
    second = model.trial()
    assert second is not None
    assert set(second.variants()) < to_compile, "kernels that were not chosen"
    second.run()
    assert {ways.down.way for ways in model.chosen.values()} == {Way.WIDE}
    assert not timed, "the next start reads what the first found"
