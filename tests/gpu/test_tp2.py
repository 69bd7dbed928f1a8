"""Two ranks on two GPUs give what one gives."""

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from minisgl import LLM, SamplingParams
from minisgl.distributed import PeerError
from minisgl.distributed.nccl import SYMMETRIC_ENV
from tests.gpu.test_engine import agreement, on_cuda, tokens
from tests.tiny import build_tiny

SHAPES = {
    "qwen3": {"head_dim": 64, "hidden_size": 128},
    "llama-9-3": {"head_dim": 64, "hidden_size": 576},
    "qwen3-moe": {"head_dim": 64, "hidden_size": 128, "moe_intermediate_size": 64},
}
LOST_SECONDS = 20.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: build_tiny(root / family, family, seed=3, **changes)
        for family, changes in SHAPES.items()
    }


@pytest.fixture(scope="module")
def of_two_ranks(folders: dict[str, Path]) -> Callable[[str], list[list[int]]]:
    """The tokens of a family on two ranks."""

    @functools.cache
    def run(family: str) -> list[list[int]]:
        with on_cuda(folders[family], cuda_graph_max_bs=8, tensor_parallel_size=2) as llm:
            assert llm.start_report["transport"] == "P2P"
            return tokens(llm)

    return run


@pytest.mark.parametrize("family", SHAPES)
def test_two_ranks_give_the_tokens_of_one(
    family: str, folders: dict[str, Path], of_two_ranks: Callable[[str], list[list[int]]]
) -> None:
    with on_cuda(folders[family], cuda_graph_max_bs=8) as llm:
        one = tokens(llm)
    share = agreement(one, of_two_ranks(family))
    print(f"{family}: share of equal prefixes between one rank and two {share:.4f}")
    assert share > 0.6  # in bfloat16: other roundings, and from the first other token all differ


def test_two_ranks_give_exactly_the_tokens_of_one_in_float32(folders: dict[str, Path]) -> None:
    options = {"dtype": "float32", "attention_backend": "torch"}
    with on_cuda(folders["qwen3"], **options) as llm:
        one = tokens(llm)
    with on_cuda(folders["qwen3"], tensor_parallel_size=2, **options) as llm:
        assert tokens(llm) == one


@pytest.mark.parametrize(("pynccl", "symmetric"), [(True, "1"), (False, "0")])
def test_the_way_to_nccl_changes_no_token(
    pynccl: bool, symmetric: str, folders: dict[str, Path],
    of_two_ranks: Callable[[str], list[list[int]]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The sum of two numbers is the same in any order."""
    monkeypatch.setenv(SYMMETRIC_ENV, symmetric)
    options = {"pynccl": pynccl, "cuda_graph_max_bs": 8, "tensor_parallel_size": 2}
    with on_cuda(folders["qwen3"], **options) as llm:
        assert tokens(llm) == of_two_ranks("qwen3")


def test_a_rank_that_is_killed_ends_a_run(folders: dict[str, Path]) -> None:
    llm: LLM = on_cuda(folders["qwen3"], tensor_parallel_size=2, cuda_graph_max_bs=8)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        llm._children[0].process.kill()

    timer = threading.Timer(1.0, kill)
    llm.on_step = lambda step: None if timer.is_alive() or killed else timer.start()
    try:
        with pytest.raises(PeerError):
            llm.generate(
                [[5] * 10] * 16,
                SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True),
            )
            while time.monotonic() < (killed or [time.monotonic()])[0] + LOST_SECONDS:
                llm.generate([[5] * 10], SamplingParams(max_tokens=480, ignore_eos=True))
        assert time.monotonic() - killed[0] < LOST_SECONDS
    finally:
        llm.close()
