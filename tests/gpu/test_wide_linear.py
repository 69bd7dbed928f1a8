"""Some tokens times a weight matrix on Hopper, fused with what is beside it."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import prepare
from minisgl_kernels.wide_linear import (
    Blocks,
    Normed,
    Turned,
    _family,
    computes,
    likely_blocks,
    possible_blocks,
    shape_of_blocks,
    signature,
    turns,
    wide_add,
    wide_add_reference,
    wide_linear,
    wide_linear_reference,
    wide_turn,
    wide_turn_reference,
)

DEVICE = "cuda"
SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (72, 64), (400, 192),
          (5120, 5120), (2560, 9728)]  # fmt: skip
TOKENS = [1, 8, 9, 33, 100, 170, 256]
MODES = {"plain": 0, "bias": 0, "residual": 1, "following": 1, "silu": 2, "normed": 0}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)


def made(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).bfloat16()


def distance(out: torch.Tensor, exact: torch.Tensor) -> float:
    assert torch.isfinite(out).all()
    return float((out.double() - exact.double()).norm() / exact.double().norm())


def check(tokens: int, rows: int, k: int, option: str, blocks: Blocks | None = None) -> None:
    """One product against float32; what is around the tensors must stay as it is."""
    x, weight = made(tokens, k), made(rows, k, scale=k**-0.5)
    residual, bias, norm = made(tokens, rows), made(rows), made(rows)
    mine: dict[str, Any] = {"blocks": blocks}
    theirs: dict[str, Any] = {}
    if option == "following":
        kept = residual.float()
        expected = wide_add_reference(kept, x.float(), weight.float(), norm.float())
        found = wide_add(residual, x, weight, norm, blocks=blocks)
        assert distance(residual, kept) < 4e-3
        assert distance(found.x, expected.x) < 6e-3
        torch.testing.assert_close(
            found.squares.sum(dim=1), expected.squares[:, 0], rtol=1e-2, atol=0
        )
        return
    given: torch.Tensor | Normed = x
    wide: torch.Tensor | Normed = x.float()
    if option == "bias":
        mine["bias"], theirs["bias"] = bias, bias.float()
    elif option == "residual":
        mine["residual"], theirs["residual"] = residual, residual.float()
    elif option == "silu":
        mine["silu"] = theirs["silu"] = True
    elif option == "normed":
        parts = x.float().square().view(tokens, 8, -1).sum(dim=2)
        given, wide = Normed(x, parts), Normed(x.float(), parts)
        mine["eps"] = theirs["eps"] = 1e-3
    out = wide_linear(given, weight, **mine)
    expected_out = wide_linear_reference(wide, weight.float(), **theirs)
    assert out.shape == expected_out.shape
    assert distance(out, expected_out) < 6e-3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def compile_all(cases: list[tuple[int, Blocks, int]]) -> None:
    """Kernels for tokens, blocks and modes, at the same time."""
    prepare({(_family, signature(tokens, cut, mode)) for tokens, cut, mode in cases})


@pytest.fixture(scope="module")
def _compiled() -> None:
    compile_all(
        [
            (tokens, shape_of_blocks(rows, k, -(-tokens // 16) * 16, mode), mode)
            for rows, k in SHAPES for tokens in TOKENS for mode in range(3)
        ]
    )  # fmt: skip


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("rows", "k"), SHAPES)
def test_every_variant_is_its_reference(rows: int, k: int, tokens: int) -> None:
    for option, mode in MODES.items():
        if computes(rows, k, mode):
            check(tokens, rows, k, option)


CUTS = [Blocks(*cut) for cut in [
    (1,), (2,), (3,), (1, 2), (1, 8), (2, 4), (1, 4, 2), (2, 1, 3), (3, 2, 2), (1, 1, 1, 2),
    (1, 4, 1, 2), (2, 2, 2, 2),
]]  # fmt: skip


@pytest.fixture(scope="module")
def _cuts_compiled() -> None:
    compile_all([(90, cut, mode) for cut in CUTS for mode in range(3)])


@pytest.mark.usefixtures("_cuts_compiled")
@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_gives_the_product(cut: Blocks) -> None:
    for option, mode in MODES.items():
        if cut.groups == 3 and mode == 1:
            continue
        for rows, k in ((1024, 1024), (208, 640)):
            check(90, rows, k, option, cut)
            check(90, rows, k, option, cut._replace(shared=100_000))


@pytest.mark.usefixtures("_cuts_compiled")
def test_the_same_operands_give_the_same_bits() -> None:
    x, weight = made(90, 1024), made(1024, 1024, scale=0.03)
    for cut in CUTS:
        first = wide_linear(x, weight, blocks=cut)
        for _ in range(20):
            assert torch.equal(wide_linear(x, weight, blocks=cut), first), cut


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `run`, which has run once before, and what its replays write."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        run()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = run()
    return graph, result


SMALL = {(960, 576): 0, (576, 576): 1, (3072, 576): 2, (576, 1536): 1}
"""Products of SmolLM2-135M, whose tiles and parts are uneven everywhere, and their modes."""


def test_every_cut_that_a_trial_takes_for_a_small_model_is_right() -> None:
    cases = [
        (tokens, rows, k, mode, cut)
        for tokens in (40, 200) for (rows, k), mode in SMALL.items()
        for cut in likely_blocks(tokens, rows, k, mode)
    ]  # fmt: skip
    compile_all([(tokens, cut, mode) for tokens, _, _, mode, cut in cases])
    for tokens, rows, k, mode, cut in cases:
        for option in (name for name, its in MODES.items() if its == mode):
            check(tokens, rows, k, option, cut)


@pytest.mark.parametrize("tokens", [40, 96, 200])
def test_no_block_ends_while_another_one_reads_its_sums(tokens: int) -> None:
    """Splits of small products right after each other, most of whose warps have no token at the
    end: loads that nobody waits for would find a block that is gone, which is a launch failure."""
    layers = [
        (made(576, 576, scale=0.04), made(3072, 576, scale=0.04), made(576, 1536, scale=0.02))
        for _ in range(12)
    ]
    cut, norm, heads = Blocks(1, 4, 3, shared=115_200), made(576), made(tokens, 576)

    def run() -> torch.Tensor:
        h = heads.clone()
        for o, gate_up, down in layers:
            ready = wide_add(h, heads, o, norm, blocks=cut)
            x = wide_linear(ready, gate_up, eps=1e-5, silu=True, blocks=Blocks(1, 4, 2))
            wide_add(h, x, down, norm, blocks=cut)
        return h

    first = run()
    graph, result = captured(run)
    for _ in range(500):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, first)


TURNING = [(64, Blocks(1)), (64, Blocks(1, 2, 3)), (128, Blocks(2)), (128, Blocks(2, 2, 2)),
           (128, Blocks(2, 1, 3, shared=115_200))]  # fmt: skip


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("tokens", [1, 77, 128, 250])
@pytest.mark.parametrize(("dim", "cut"), TURNING)
def test_heads_are_turned_and_stored_behind_their_product(
    dim: int, cut: Blocks, tokens: int, normalised: bool
) -> None:
    k, heads, kv_heads = 1024, 5, 2
    if not turns(tokens, (heads + 2 * kv_heads) * dim, k, dim, cut):
        pytest.skip("these blocks have no room for so many tokens")
    x, weight = made(tokens, k), made((heads + 2 * kv_heads) * dim, k, scale=k**-0.5)
    weights = [made(dim) if normalised else None for _ in range(2)]
    table = torch.randn(300, dim, device=DEVICE)
    positions = torch.randint(300, (tokens,), device=DEVICE, dtype=torch.int32)
    out_loc = torch.randperm(tokens + 4, device=DEVICE)[:tokens].int()
    slots = made(2, tokens + 4, kv_heads, dim)
    expected = slots.float()
    turned, wanted = (
        Turned(
            weights[0], weights[1], 1e-3, table, positions, out_loc, of[0], of[1], heads, kv_heads
        )
        for of in (slots, expected)
    )
    found = wide_turn(x, weight, turned, blocks=cut)
    exact = wide_turn_reference(x.float(), weight.float(), wanted)
    assert found.shape == (tokens, heads, dim)
    assert distance(found, exact) < 6e-3
    assert distance(slots, expected) < 6e-3


def test_products_that_follow_each_other_without_a_break_are_right() -> None:
    """Each starts while the one before still runs, and reads what that leaves behind."""
    layers = [
        (made(512, 1024, scale=0.03), made(1024, 512, scale=0.04), made(1024)) for _ in range(12)
    ]
    h = made(40, 1024)

    def run() -> torch.Tensor:
        out = h.clone()
        ready: torch.Tensor | Normed = out
        for up, down, following in layers:
            x = wide_linear(ready, up, eps=1e-6)
            ready = wide_add(out, x, down, following)
        return out

    exact, normal = h.float(), h.float()
    for up, down, following in layers:
        exact = exact + (normal @ up.float().T) @ down.float().T
        normal = F.rms_norm(exact, (1024,), following.float(), 1e-6)
    assert distance(run(), exact) < 3e-2
    first = run()
    graph, result = captured(run)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, first)


def test_cuts_of_random_shapes() -> None:
    chosen = random.Random(5)
    cases = []
    for _ in range(24):
        tokens, k = chosen.randint(1, 256), 64 * chosen.randint(1, 40)
        option = chosen.choice(list(MODES))
        rows = 16 * chosen.randint(1, 200)
        cuts = possible_blocks(rows, k, -(-tokens // 16) * 16, MODES[option])
        cases.append((tokens, rows, k, option, chosen.choice(cuts)))
    compile_all([(tokens, cut, MODES[option]) for tokens, _, _, option, cut in cases])
    for tokens, rows, k, option, cut in cases:
        check(tokens, rows, k, option, cut)


def test_what_it_cannot_do_is_said() -> None:
    for x, weight in (
        (made(257, 64), made(8, 64)), (made(1, 96), made(8, 96)), (made(1, 64), made(12, 64)),
        (made(1, 64).half(), made(8, 64).half()),
    ):  # fmt: skip
        with pytest.raises(KernelUnavailable, match="has no kernel"):
            wide_linear(x, weight)
