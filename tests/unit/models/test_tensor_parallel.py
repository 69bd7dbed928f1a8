"""Ranks compute together what one rank computes alone.

Here the ranks are threads, each with a Gloo group of its own; tests/unit/distributed has processes.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from minisgl.config import UsageError
from minisgl.distributed import SingleRank
from minisgl.distributed.gloo import GlooCommunicator
from minisgl.models.config import load_model_config
from minisgl.models.decoder import CausalLM
from tests.tiny import FAMILIES, build_tiny
from tests.unit.models.stepper import CPU, Stepper
from tests.unit.models.test_logits import close, random_prompts

Tiny = Callable[[str], Path]


def run_ranks(folder: Path, meet: Path, ranks: int) -> list[list[torch.Tensor]]:
    """The logits of a few steps, by rank."""
    a, b = random_prompts(37, 5)

    def run(rank: int) -> list[torch.Tensor]:
        comm = (
            GlooCommunicator(f"file://{meet}", rank, ranks, 60, host="127.0.0.1")
            if ranks > 1
            else SingleRank()
        )
        stepper = Stepper(folder, comm)
        steps = [
            stepper.step((0, a[:20], 0), (1, b[:4], 0)),
            stepper.step((0, a[20:36], 20), (1, b[4:], 4)),
            stepper.step((0, a[36:], 36)),
        ]
        comm.close()
        return steps

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_agree_with_a_single_one(family: str, ranks: int, tiny: Tiny, tmp_path: Path) -> None:
    (want,) = run_ranks(tiny(family), tmp_path / "meet", 1)
    for got in run_ranks(tiny(family), tmp_path / "meet", ranks):
        for mine, alone in zip(got, want, strict=True):
            close(mine, alone)


class _Rank(SingleRank):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize(
    ("family", "field"),
    [("llama", "intermediate_size 160"), ("qwen3-moe", "moe_intermediate_size 24")],
)
def test_a_width_that_the_ranks_do_not_divide_is_named(family: str, field: str, tiny: Tiny) -> None:
    config = load_model_config(tiny(family))
    ranks = 7 if family == "llama" else 5
    with pytest.raises(UsageError, match=rf"{field} does not divide among {ranks} ranks"):
        CausalLM(config, torch.float32, _Rank(0, ranks), CPU)


def test_more_ranks_than_heads_leave_some_ranks_without_work(tmp_path: Path) -> None:
    folder = build_tiny(
        tmp_path / "m", num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1
    )
    (want,) = run_ranks(folder, tmp_path / "meet", 1)
    for got in run_ranks(folder, tmp_path / "meet", 4):
        close(got[0], want[0])
