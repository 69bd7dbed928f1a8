"""What is compiled before there is a GPU is what a start asks for."""

import itertools
from pathlib import Path

import pytest
import torch

from minisgl.attention.mini_backend import FUSED_TOKENS
from minisgl.models import trial
from minisgl.models.ahead import COMMON, product_variants, widths_of
from minisgl.models.config import load_model_config
from minisgl.models.products import GROUPS, covering
from minisgl_kernels import skinny_linear, wide_linear
from minisgl_kernels.measured import Measured
from tests.tiny import build_tiny
from tests.unit.models.stepper import Stepper


@pytest.mark.parametrize("head_dim", [32, 64])
def test_all_kernels_of_products_that_a_start_may_call_are_compiled_ahead(
    head_dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Heads of 64 are turned behind a QKV product, those of 32 are not."""
    folder = build_tiny(
        tmp_path / "model", "qwen3", hidden_size=256, intermediate_size=512, head_dim=head_dim
    )
    model = Stepper(folder, dtype=torch.bfloat16).model.model
    model._own, model._steps = True, (False, True)
    model._rope_table = model.rotary.table(8)
    monkeypatch.setattr(wide_linear, "wide_linear_function", lambda: wide_linear.wide_linear)
    monkeypatch.setattr(skinny_linear, "skinny_linear_function", lambda: None)
    monkeypatch.setattr(trial, "measured", lambda: Measured(tmp_path / "kept.json"))
    found = model.trial(FUSED_TOKENS)
    assert found is not None
    between = [
        (tokens, ways)
        for last, group in itertools.pairwise(GROUPS)
        for tokens in range(last // 16 * 16 + 16, group, 16)
        for ways in covering(found._options[group])
    ]
    wanted = {*found.variants(), *found._called(between)}
    turned = any(signature[-1] == wide_linear._TURN for _, signature in wanted)
    assert turned == (head_dim == 64)
    assert set(product_variants([widths_of(load_model_config(folder))])) == wanted


def test_common_models_share_most_of_their_kernels() -> None:
    alone = sum(len(product_variants([widths])) for widths in COMMON.values())
    assert len(product_variants(COMMON.values())) < alone / 3
