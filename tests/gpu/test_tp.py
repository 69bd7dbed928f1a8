"""Several ranks, each on a GPU of its own, give what one gives."""

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from minisgl import LLM, GenerationOutput, SamplingParams
from minisgl.distributed import PeerError
from minisgl.distributed.nccl import SYMMETRIC_ENV
from tests.gpu.test_engine import OUTPUT, agreement, on_cuda, prompts, tokens
from tests.tiny import build_tiny, reference_logits

SHAPES = {
    "qwen3": {"head_dim": 64, "hidden_size": 128},
    "llama-9-3": {"head_dim": 64, "hidden_size": 576},
    "qwen3-moe": {"head_dim": 64, "hidden_size": 128, "moe_intermediate_size": 128},
}
FAMILIES = [pytest.param(family, marks=pytest.mark.xdist_group(family)) for family in SHAPES]
"""For `-n 4 --dist loadgroup`: one process keeps the outputs that several tests compare with."""
LOST_SECONDS = 20.0
SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: build_tiny(root / family, family, seed=3, **changes)
        for family, changes in SHAPES.items()
    }


@pytest.fixture(scope="module")
def greedy(folders: dict[str, Path]) -> Callable[[str, int], list[GenerationOutput]]:
    """Greedy outputs in bfloat16 of a family on some ranks, with the best tokens' logprobs."""

    @functools.cache
    def run(family: str, ranks: int) -> list[GenerationOutput]:
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, logprobs=20, ignore_eos=True)
        with on_cuda(folders[family], cuda_graph_max_bs=8, tensor_parallel_size=ranks) as llm:
            assert llm.start_report["transport"] == ("P2P" if ranks > 1 else "")
            return llm.generate(prompts(), sampling)

    return run


def float32_error(folder: Path, outputs: list[GenerationOutput]) -> float:
    """How far a token's logprobs are from those of float32: the median of the roots of their mean
    squares, as a router that just takes another expert puts a few far off, on one rank too."""
    whole = [p + o.token_ids for p, o in zip(prompts(), outputs, strict=True)]
    errors = []
    for prompt, out, logits in zip(
        prompts(), outputs, reference_logits(folder, whole), strict=True
    ):
        exact = logits.log_softmax(-1)
        for i, seen in enumerate(out.logprobs or ()):
            want = exact[len(prompt) - 1 + i, torch.tensor(seen.top_ids)]
            errors.append(torch.tensor(seen.top_logprobs) - want)
    return float(torch.stack(errors).square().mean(dim=1).sqrt().median())


def test_a_rank_that_is_killed_ends_a_run(folders: dict[str, Path]) -> None:
    llm: LLM = on_cuda(folders["qwen3"], tensor_parallel_size=2, cuda_graph_max_bs=8)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        llm._children[0].process.kill()

    timer = threading.Timer(0.5, kill)
    llm.on_step = lambda step: None if timer.is_alive() or killed else timer.start()
    long = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True)
    began = time.monotonic()
    try:
        with pytest.raises(PeerError):
            while time.monotonic() < began + LOST_SECONDS:
                llm.generate([[5] * 10] * 16, long)
        print(f"a killed rank was noticed after {time.monotonic() - killed[0]:.2f} s")
        assert time.monotonic() - killed[0] < LOST_SECONDS / 2
    finally:
        llm.close()


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_exactly_the_tokens_of_one_in_float32(
    family: str, ranks: int, folders: dict[str, Path]
) -> None:
    options = {"dtype": "float32", "attention_backend": "torch"}
    with on_cuda(folders[family], **options) as llm:
        one = tokens(llm)
    with on_cuda(folders[family], tensor_parallel_size=ranks, **options) as llm:
        assert tokens(llm) == one


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_are_as_near_to_float32_as_one(
    family: str, ranks: int, folders: dict[str, Path],
    greedy: Callable[[str, int], list[GenerationOutput]],
) -> None:  # fmt: skip
    one, several = (float32_error(folders[family], greedy(family, n)) for n in (1, ranks))
    share = agreement(*([o.token_ids for o in greedy(family, n)] for n in (1, ranks)))
    print(f"{family}: error of one {one:.4f}, of {ranks} {several:.4f}; equal prefixes {share:.4f}")
    assert several < 1.3 * one + 0.01


@pytest.mark.xdist_group("qwen3")
@pytest.mark.parametrize(("pynccl", "symmetric"), [(True, "1"), (False, "0")])
def test_the_way_to_nccl_changes_no_token(
    pynccl: bool, symmetric: str, folders: dict[str, Path],
    greedy: Callable[[str, int], list[GenerationOutput]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The sum of two numbers is the same in any order."""
    monkeypatch.setenv(SYMMETRIC_ENV, symmetric)
    options = {"pynccl": pynccl, "cuda_graph_max_bs": 8, "tensor_parallel_size": 2}
    with on_cuda(folders["qwen3"], **options) as llm:
        assert tokens(llm) == [o.token_ids for o in greedy("qwen3", 2)]
