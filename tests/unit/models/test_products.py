"""Which products of few tokens are the own kernel's."""

from collections.abc import Callable, Mapping, Sequence

from minisgl.models.products import GROUPS, Choice, Own, Product


def test_the_faster_way_is_taken_for_each_product_and_number_of_tokens() -> None:
    calls: list[tuple[str, int, bool]] = []

    def products(tokens: int) -> Mapping[str, Product]:
        def of(name: str) -> Product:
            return lambda layer, own: calls.append((name, layer, own))

        return {name: of(name) for name in ("qkv", "o", "gate_up", "down")}

    seen: list[float] = []

    def seconds(some: Sequence[Callable[[], object]]) -> float:
        calls.clear()
        for call in some:
            call()
        name, _, own = calls[0]
        assert [layer for _, layer, _ in calls] == [0, 1, 2]
        seen.append(1.0)
        round_of = (len(seen) - 1) // 8  # four products, two ways each
        return 1.0 if own == (name == "o" or round_of == 0) else 2.0

    choice = Choice()
    assert choice[1] == Own(), "untimed, the own kernel computes all"
    found = choice.decide(products, 3, seconds)
    assert list(found) == list(GROUPS)
    assert choice[1] == Own()
    for tokens in (2, 8, 9, 32):
        assert choice[tokens] == Own(qkv=False, o=True, gate_up=False, down=False)
