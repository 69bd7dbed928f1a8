"""The Triton kernels against torch: on a GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA")

from minisgl.moe.experts import route, run_experts  # noqa: E402
from minisgl_kernels import moe_align, moe_experts, moe_route  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "block"),
    [(1, 6, 2, 16), (33, 6, 3, 16), (200, 7, 2, 64), (5, 128, 8, 16), (600, 8, 8, 128)],
)
def test_rows_come_by_expert_in_whole_blocks(
    tokens: int, experts: int, top_k: int, block: int, random: torch.Generator
) -> None:
    ids = torch.stack([torch.randperm(experts, generator=random)[:top_k] for _ in range(tokens)])
    ids = ids.int()
    rows, of_blocks, used = (t.cpu() for t in moe_align.align(ids.to(DEVICE), experts, block))
    want_rows, want_of_blocks, want_used = moe_align.align_reference(ids, experts, block)
    n = int(want_used)
    assert int(used) == n <= moe_align.max_blocks(tokens * top_k, experts, block) * block
    assert torch.equal(rows[:n], want_rows[:n])
    assert torch.equal(of_blocks[: n // block], want_of_blocks[: n // block])


def test_an_expert_that_nobody_chose_has_no_block() -> None:
    ids = torch.full((40, 1), 3, dtype=torch.int32, device=DEVICE)
    rows, of_blocks, used = moe_align.align(ids, 5, 16)
    assert int(used) == 48
    assert of_blocks[:3].tolist() == [3, 3, 3]
    assert rows[:48].tolist() == [*range(40), *[40] * 8]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 6, 2), (33, 6, 3), (40, 128, 8)])
def test_the_router_chooses_as_torch_does(
    tokens: int, experts: int, top_k: int, normalise: bool, random: torch.Generator
) -> None:
    scores = torch.randn(tokens, experts, generator=random)
    weights, ids = moe_route.route(scores.to(DEVICE), top_k, normalise)
    want_weights, want_ids = route(scores, top_k, normalise)
    assert torch.equal(ids.cpu().long(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights)


def test_scores_that_are_no_numbers_choose_experts_that_exist() -> None:
    scores = torch.full((3, 6), float("nan"), device=DEVICE)
    ids = moe_route.route(scores, 2, True)[1].cpu()
    assert bool(((ids >= 0) & (ids < 6)).all())


@pytest.mark.parametrize("size", range(len(moe_experts.SIZES)))
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "width"),
    [(1, 5, 3, 96, 24), (33, 5, 3, 96, 24), (40, 6, 2, 64, 40)],
)
def test_each_token_gets_the_sum_of_its_experts_in_blocks_of_any_size(
    tokens: int, experts: int, top_k: int, hidden: int, width: int, size: int,
    random: torch.Generator,
) -> None:  # fmt: skip
    x = torch.randn(tokens, hidden, generator=random)
    gate_up = torch.randn(experts, 2 * width, hidden, generator=random) / hidden**0.5
    down = torch.randn(experts, hidden, width, generator=random) / width**0.5
    weights, ids = route(torch.randn(tokens, experts, generator=random), top_k, True)
    on_device = (t.to(DEVICE) for t in (x, gate_up, down, weights, ids.int()))
    got = moe_experts.run_experts(*on_device, blocks=moe_experts.SIZES[size]).cpu()
    want = run_experts(x, gate_up, down, weights, ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_blocks_grow_with_the_rows_of_an_expert() -> None:
    sizes = [moe_experts.choose_blocks(n, 128, torch.bfloat16)[0].m for n in (8, 2048, 8192, 65536)]
    assert sizes == [16, 16, 64, 128]
    assert moe_experts.choose_blocks(65536, 128, torch.float32)[0].m == 64
    assert all(wide.m == down.m for wide, down in moe_experts.SIZES)
