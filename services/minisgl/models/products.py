"""Which products of few tokens the project's own kernel computes: timed once, at the start.

It reads weights early and fuses norm, gate and residual; a library has better tiles once there are
many tokens. Where the border lies depends on the shapes and on the device.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

GROUPS = (1, 8, 16, 32)
"""Products are timed with so many tokens; what was found holds down to the number before."""
REPLAYS = 3

Product = Callable[[int, bool], object]
"""Computes one layer's product: (layer, by the own kernel)."""


@dataclass(frozen=True, slots=True)
class Own:
    """The products of a layer that the own kernel computes."""

    qkv: bool = True
    o: bool = True
    gate_up: bool = True
    down: bool = True


class Choice:
    """What is chosen for each number of tokens."""

    def __init__(self) -> None:
        self._of: list[Own] = [Own()] * len(GROUPS)

    def __getitem__(self, tokens: int) -> Own:
        return self._of[min(bisect.bisect_left(GROUPS, tokens), len(GROUPS) - 1)]

    def decide(
        self, products: Callable[[int], Mapping[str, Product]], layers: int,
        seconds: Callable[[Sequence[Callable[[], object]]], float],
    ) -> dict[int, Own]:  # fmt: skip
        """Time the products, which `products` gives for a number of tokens, over some layers."""
        for i, tokens in enumerate(GROUPS):
            found = {}
            for name, product in products(tokens).items():
                own, library = (
                    seconds([lambda at=at, way=way: product(at, way) for at in range(layers)])  # type: ignore[misc]  # noqa: B023
                    for way in (True, False)
                )
                found[name] = own <= library
            self._of[i] = Own(**found)
        return dict(zip(GROUPS, self._of, strict=True))


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of the calls one after the other in a CUDA graph, the best of some replays.

    The current stream must not be the default one.
    """
    for call in calls:
        call()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    finally:
        graph.capture_end()
    graph.replay()
    best = float("inf")
    for _ in range(REPLAYS):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best
