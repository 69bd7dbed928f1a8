"""The trial at the start: how the products of few tokens are computed fastest on this device."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from minisgl.models.products import GROUPS, Choice, Kernels, Shapes, Ways, covering, graph_seconds
from minisgl_kernels.cuda_build import Variant, collected, prepare
from minisgl_kernels.measured import measured
from minisgl_kernels.tuned_linear import measuring
from minisgl_kernels.wide_linear import TILE

TIMED_AT_ONCE = 32
"""So many graphs' memory is given back together: torch keeps it, for each graph on its own."""

Chain = Callable[[int, Ways], Sequence[Callable[[], object]]]
"""For some tokens and ways: calls that compute a layer's products each, of layers in a row."""


class Trial:
    """How the choice is made for the layers of one model, on CUDA and not on the default stream."""

    def __init__(
        self, choice: Choice, kernels: Kernels, shapes: Shapes, turned_heads: Callable[[int], int],
        layers: int, chain: Chain,
    ) -> None:  # fmt: skip
        """`chain` has this many `layers`, with weights of these `shapes`. `turned_heads`: for so
        many tokens, the size of the heads that are turned behind a QKV product, or 0."""
        self._choice, self._kernels, self._chain = choice, kernels, chain
        self._timed = itertools.count(1)
        self._options = {
            tokens: kernels.options(tokens, shapes, turned_heads(tokens)) for tokens in GROUPS
        }
        turned = [tokens for tokens in GROUPS if turned_heads(tokens)]
        limits = f"{kernels.skinny_tokens} {kernels.wide_tokens}"
        self._name = f"products {dict(shapes)} {layers} {limits} {turned}"
        self._known = choice.restore(measured().get(self._name), self._options.__getitem__)

    @torch.inference_mode()
    def variants(self) -> list[Variant]:
        """The kernels that `run` calls first: all that are timed, or those of a choice that was
        made at an earlier start."""
        if self._known:
            return self._called(self._chosen())
        return self._called(
            (tokens, ways) for tokens in GROUPS for ways in covering(self._options[tokens])
        )

    @torch.inference_mode()
    def run(self) -> None:
        """Make the choice, or take what was found for such layers at an earlier start. Then the
        kernels that it needs are compiled."""
        if not self._known:
            prepare(self.variants())
            self._choice.decide(self._options.__getitem__, self._seconds)
            measured().put(self._name, self._choice.kept())
        prepare(self._called(self._chosen()))

    def _chosen(self) -> list[tuple[int, Ways]]:
        return [
            (tokens, self._choice[tokens]) for tokens in range(TILE, self._kernels.most + 1, TILE)
        ]

    def _called(self, wanted: Iterable[tuple[int, Ways]]) -> list[Variant]:
        """The kernels that are not compiled yet."""
        with collected() as variants:
            for tokens, ways in wanted:
                self._chain(tokens, ways)[0]()
        return variants

    def _seconds(self, tokens: int, ways: Ways) -> float:
        if next(self._timed) % TIMED_AT_ONCE == 0:
            torch.cuda.empty_cache()
        with measuring():
            return graph_seconds(self._chain(tokens, ways))
