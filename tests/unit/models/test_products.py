"""Which kernels compute the products of few tokens."""

import json

import pytest

from minisgl.models.products import (
    GROUPS,
    NAMES,
    Choice,
    Kernels,
    Option,
    Options,
    Way,
    Ways,
    covering,
)
from minisgl_kernels.skinny_linear import skinny_linear_reference
from minisgl_kernels.wide_linear import Blocks, turns, wide_linear_reference

L, S, W = (Option(way) for way in Way)
WIDE, TALL = Option(Way.WIDE, Blocks(1)), Option(Way.WIDE, Blocks(2, 4))
SHAPES = {"qkv": (256, 128, 0), "o": (128, 256, 1), "gate_up": (512, 128, 2), "down": (128, 256, 1)}


def some(*options: Option) -> Options:
    """The same for all products."""
    return dict.fromkeys(NAMES, options)


def test_from_the_fastest_way_for_all_on_each_product_takes_what_makes_the_layer_faster() -> None:
    cost = {L: (5.0, 1.0, 4.0, 4.0), WIDE: (3.0, 3.0, 3.0, 3.0), TALL: (4.0, 4.0, 2.0, 4.0)}

    def seconds(tokens: int, ways: Ways) -> float:
        return sum(cost[getattr(ways, name)][i] for i, name in enumerate(NAMES))

    choice = Choice()
    assert choice[1] == Ways(), "untimed, the library computes all"
    choice.decide(lambda tokens: some(L, WIDE, TALL), seconds)
    assert list(choice.chosen) == list(GROUPS)
    for tokens in (1, 2, 33, 256):
        assert choice[tokens] == Ways(WIDE, L, TALL, WIDE)


def test_an_option_that_is_hardly_faster_is_not_worth_a_change() -> None:
    choice = Choice()
    choice.decide(
        lambda tokens: some(L, WIDE), lambda tokens, ways: 1.0 if ways == Ways() else 0.995
    )
    assert choice[8] == Ways(WIDE, WIDE, WIDE, WIDE), "of the uniform ways the fastest is taken"
    choice.decide(
        lambda tokens: some(L, WIDE, TALL), lambda tokens, ways: 0.995 if TALL in ways_of(ways)
        else 1.0 if ways == Ways() else 1.1,
    )  # fmt: skip
    assert choice[8] == Ways()


def test_what_pays_only_together_is_found() -> None:
    """Each alone costs a norm of its own, as from the library on it does."""

    def seconds(tokens: int, ways: Ways) -> float:
        pair = [ways.qkv.way == Way.WIDE, ways.down.way == Way.WIDE]
        return {0: 2.0, 1: 2.1, 2: 1.8}[sum(pair)] + (ways.o == WIDE) + (ways.gate_up == WIDE)

    choice = Choice()
    choice.decide(lambda tokens: some(L, WIDE), seconds)
    assert choice[200] == Ways(L, L, L, L), "a way that is far slower for all is not tried"
    choice.decide(lambda tokens: some(L, WIDE), lambda n, ways: 10 + seconds(n, ways))
    assert choice[200] == Ways(WIDE, L, L, WIDE)


def ways_of(ways: Ways) -> list[Option]:
    return [getattr(ways, name) for name in NAMES]


def test_a_way_that_is_much_slower_for_all_is_not_tried_for_each() -> None:
    seen: list[Ways] = []

    def seconds(tokens: int, ways: Ways) -> float:
        seen.append(ways)
        return 1.0 + sum(option.way == Way.WIDE for option in ways_of(ways)) / 10

    Choice().decide(lambda tokens: some(L, WIDE, TALL), seconds)
    assert len(seen) == 2 * len(GROUPS)


def test_a_kernel_is_an_option_up_to_its_most_tokens() -> None:
    kernels = Kernels(
        skinny=skinny_linear_reference, skinny_tokens=32, wide=wide_linear_reference,
        wide_tokens=128,
    )  # fmt: skip
    assert kernels.most == 128
    ways = [
        list(dict.fromkeys(option.way for option in kernels.options(n, SHAPES)["o"]))
        for n in (1, 32, 33, 128, 129)
    ]
    one, two, three = Way
    assert ways == [[one, two, three], [one, two, three], [one, three], [one, three], [one]]
    assert Kernels(skinny_tokens=32, wide_tokens=256).most == 0


def test_where_heads_are_turned_own_qkv_products_have_a_head_in_a_block() -> None:
    kernels = Kernels(wide=wide_linear_reference, wide_tokens=256)
    shapes = {**SHAPES, "qkv": (4096, 1024, 0)}
    for tokens in (33, 128, 256):
        turned, plain = (kernels.options(tokens, shapes, heads) for heads in (128, 0))
        cuts = [option.cut for option in turned["qkv"] if option.way == Way.WIDE]
        assert len(cuts) > 1
        assert all(cut is not None and turns(tokens, 4096, 1024, 128, cut) for cut in cuts)
        assert turned["o"] == plain["o"]
        assert kernels.options(tokens, shapes, 80) == plain, "no block has such a head"


def test_all_options_are_covered_by_few_layers() -> None:
    options = {**some(L, WIDE), "o": (L, S, WIDE, TALL)}
    found = covering(options)
    assert len(found) == 4
    for name in NAMES:
        assert {getattr(ways, name) for ways in found} == set(options[name])


def test_what_was_chosen_is_restored_at_the_next_start() -> None:
    first, second = Choice(), Choice()
    first.decide(
        lambda tokens: some(L, WIDE, TALL), lambda tokens, ways: 1.0 if ways.o == TALL else 2.0
    )
    kept = json.loads(json.dumps(first.kept()))
    assert second.restore(kept, lambda tokens: some(L, WIDE, TALL))
    assert second.chosen == first.chosen
    assert second.chosen[8].o == TALL


def every(value: object) -> object:
    return {str(n): dict.fromkeys(NAMES, value) for n in GROUPS}


@pytest.mark.parametrize(
    "kept",
    [
        None, 3, "x", [], {}, {str(n): {} for n in GROUPS}, every("library"), every(7),
        every(["abacus", None]), every(["skinny", None]), every(["wide", None]),
        every(["wide", [2, 4]]), every(["wide", [1, "x"]]), every(["wide", list(range(9))]),
        dict(list(every(["library", None]).items())[1:]),  # type: ignore[attr-defined]
    ],
)  # fmt: skip
def test_a_choice_that_does_not_fit_is_made_again(kept: object) -> None:
    choice = Choice()
    assert not choice.restore(kept, lambda tokens: some(L, WIDE))
    assert choice.chosen == Choice().chosen
