"""Few tokens go through a layer in another way, which gives the same."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl.models import decoder
from minisgl.models.products import Choice, Own
from minisgl_kernels.skinny_linear import skinny_linear_reference
from tests.unit.models.stepper import Stepper

Tiny = Callable[[str], Path]


class Always(Choice):
    """One way for any number of tokens."""

    def __init__(self, own: Own) -> None:
        super().__init__()
        self._of = [own] * len(self._of)


@pytest.mark.parametrize(
    "own", [Own(), Own(False, False, False, False), Own(qkv=False), Own(o=False, down=False)]
)
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3-moe"])
def test_few_tokens_give_what_many_give(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, family: str, own: Own
) -> None:
    plain, few = Stepper(tiny(family)), Stepper(tiny(family))
    few.model.model._few, few.model.model._choice = 32, Always(own)
    monkeypatch.setattr(decoder, "skinny_linear_function", lambda: skinny_linear_reference)
    prompt = list(range(4, 24))
    for work in ((0, prompt, 0), (0, [30], 20)):
        torch.testing.assert_close(few.step(work), plain.step(work), rtol=1e-4, atol=1e-4)


def test_products_are_timed_on_some_layers(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stepper(tiny("llama")).model.model
    model._few = 32
    monkeypatch.setattr(decoder, "skinny_linear_function", lambda: skinny_linear_reference)

    def seconds(calls: object) -> float:
        for call in calls:  # type: ignore[attr-defined]
            call()
        return 1.0

    monkeypatch.setattr(decoder, "graph_seconds", seconds)
    assert set(model.choose_products().values()) == {Own()}
