"""The trial at the start: how the products of few tokens are computed fastest on this device."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from minisgl.models.products import GROUPS, Choice, Kernels, Shapes, Ways, covering, graph_seconds
from minisgl_kernels.cuda_build import collected, prepare
from minisgl_kernels.measured import measured
from minisgl_kernels.tuned_linear import measuring
from minisgl_kernels.wide_linear import TILE

TIMED_AT_ONCE = 32
"""So many graphs' memory is given back together: torch keeps it, for each graph on its own."""

Chain = Callable[[int, Ways], Sequence[Callable[[], object]]]
"""For some tokens and ways: calls that compute a layer's products each, of layers in a row."""


def run_trial(
    choice: Choice, kernels: Kernels, shapes: Shapes, turned_heads: Callable[[int], int],
    layers: int, chain: Chain,
) -> None:  # fmt: skip
    """Make the choice, or take what was found for such layers at an earlier start. Then the
    kernels that it needs are compiled. On CUDA, and not on the default stream.

    `chain` has this many `layers`, with weights of these `shapes`. `turned_heads`: for so many
    tokens, the size of the heads that are turned behind a QKV product, or 0.
    """

    timed = itertools.count(1)

    def seconds(tokens: int, ways: Ways) -> float:
        if next(timed) % TIMED_AT_ONCE == 0:
            torch.cuda.empty_cache()
        with measuring():
            return graph_seconds(chain(tokens, ways))

    def compile_all(wanted: Iterable[tuple[int, Ways]]) -> None:
        with collected() as variants:
            for tokens, ways in wanted:
                chain(tokens, ways)[0]()
        prepare(variants)

    options = {tokens: kernels.options(tokens, shapes, turned_heads(tokens)) for tokens in GROUPS}
    turned = [tokens for tokens in GROUPS if turned_heads(tokens)]
    name = (
        f"products {dict(shapes)} {layers} {kernels.skinny_tokens} {kernels.wide_tokens} {turned}"
    )
    if not choice.restore(measured().get(name), options.__getitem__):
        compile_all((tokens, ways) for tokens in GROUPS for ways in covering(options[tokens]))
        choice.decide(options.__getitem__, seconds)
        measured().put(name, choice.kept())
    compile_all((tokens, choice[tokens]) for tokens in range(TILE, kernels.most + 1, TILE))
