"""Which kernels compute the products of few tokens."""

import json

import pytest

from minisgl.models.products import GROUPS, Choice, Kernels, Way, Ways
from minisgl_kernels.skinny_linear import skinny_linear_reference
from minisgl_kernels.wide_linear import wide_linear_reference

L, S, W = Way


def test_from_the_fastest_way_for_all_on_each_product_takes_what_makes_the_layer_faster() -> None:
    cost = {
        L: Ways(5.0, 1.0, 4.0, 4.0),  # type: ignore[arg-type]
        W: Ways(3.0, 3.0, 3.0, 3.0),  # type: ignore[arg-type]
    }

    def seconds(tokens: int, ways: Ways) -> float:
        return sum(
            getattr(cost[getattr(ways, name)], name) for name in ("qkv", "o", "gate_up", "down")
        )

    choice = Choice()
    assert choice[1] == Ways(), "untimed, the library computes all"
    choice.decide(lambda tokens: [L, W], seconds)
    assert list(choice.chosen) == list(GROUPS)
    for tokens in (1, 2, 33, 256):
        assert choice[tokens] == Ways(W, L, W, W)


def test_a_way_that_is_hardly_faster_is_not_worth_a_change() -> None:
    choice = Choice()
    choice.decide(lambda tokens: [L, W], lambda tokens, ways: 1.0 if ways == Ways() else 0.995)
    assert choice[8] == Ways.all(W), "of the uniform ways the fastest is taken"
    choice.decide(
        lambda tokens: [L, W], lambda tokens, ways: 1.0 if ways == Ways() else 0.995 + 0.01 * (
            ways == Ways.all(W)
        )
    )  # fmt: skip
    assert choice[8] == Ways()


def test_a_kernel_is_a_choice_up_to_its_most_tokens() -> None:
    kernels = Kernels(
        skinny=skinny_linear_reference, skinny_tokens=32, wide=wide_linear_reference,
        wide_tokens=128,
    )  # fmt: skip
    assert kernels.most == 128
    assert [kernels.ways(n) for n in (1, 32, 33, 128, 129)] == [
        [L, S, W], [L, S, W], [L, W], [L, W], [L],
    ]  # fmt: skip
    assert Kernels(skinny_tokens=32, wide_tokens=256).most == 0


def test_what_was_chosen_is_restored_at_the_next_start() -> None:
    first, second = Choice(), Choice()
    first.decide(lambda tokens: [L, W], lambda tokens, ways: 1.0 if ways.o == W else 2.0)
    kept = json.loads(json.dumps(first.kept()))
    assert second.restore(kept, lambda tokens: [L, W])
    assert second.chosen == first.chosen
    assert second.chosen != Choice().chosen


@pytest.mark.parametrize(
    "kept",
    [
        None, 3, "x", [], {}, {str(n): {} for n in GROUPS},
        {str(n): dict.fromkeys(("qkv", "o", "gate_up", "down"), "abacus") for n in GROUPS},
        {str(n): dict.fromkeys(("qkv", "o", "gate_up", "down"), "skinny") for n in GROUPS},
        {str(n): dict.fromkeys(("qkv", "o", "gate_up", "down"), "wide") for n in GROUPS[1:]},
    ],
)  # fmt: skip
def test_a_choice_that_does_not_fit_is_made_again(kept: object) -> None:
    choice = Choice()
    assert not choice.restore(kept, lambda tokens: [L, W])
    assert choice.chosen == Choice().chosen
