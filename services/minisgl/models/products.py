"""Which kernel computes which product of a decode step, and how products hand on to each other.

The project's own kernels read weights early and fuse norm, gate and residual; a library has better
tiles once there are many tokens. Where the borders lie depends on the shapes and on the device, so
all ways are timed once, at the start.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from minisgl.layers.activation import silu_and_mul
from minisgl.layers.linear import Linear, RowParallelLinear, add_product
from minisgl.layers.norm import RMSNorm
from minisgl_kernels.skinny_linear import MAX_TOKENS as SKINNY_TOKENS
from minisgl_kernels.skinny_linear import SkinnyLinear
from minisgl_kernels.wide_linear import Normed, WideAdd, WideLinear, wide_add

GROUPS = (1, 8, 16, 32, 64, 96, 128, 192, 256)
"""Products are timed with so many tokens; what was found holds down to the number before."""
REPLAYS = 3
CLEARLY = 0.99
"""A way must take so much of the best one's time at most to be taken in its place."""


class Way(StrEnum):
    """Who computes a product."""

    LIBRARY = "library"
    SKINNY = "skinny"
    """For few tokens, `skinny_linear`."""
    WIDE = "wide"
    """For up to 256 tokens on Hopper, `wide_linear`."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Who computes the products of a layer."""

    qkv: Way = Way.LIBRARY
    o: Way = Way.LIBRARY
    gate_up: Way = Way.LIBRARY
    down: Way = Way.LIBRARY

    @classmethod
    def all(cls, way: Way) -> "Ways":
        return cls(way, way, way, way)


NAMES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The own kernels that there are, and the most tokens that each is given."""

    skinny: SkinnyLinear | None = None
    skinny_tokens: int = 0
    wide: WideLinear | None = None
    wide_add: WideAdd = wide_add
    wide_tokens: int = 0

    @property
    def most(self) -> int:
        """Tokens of the largest step that some own kernel may be part of."""
        return max(
            self.skinny_tokens if self.skinny is not None else 0,
            self.wide_tokens if self.wide is not None else 0,
        )

    def ways(self, tokens: int) -> list[Way]:
        """Those for so many tokens."""
        found = [Way.LIBRARY]
        if self.skinny is not None and tokens <= min(self.skinny_tokens, SKINNY_TOKENS):
            found.append(Way.SKINNY)
        if self.wide is not None and tokens <= self.wide_tokens:
            found.append(Way.WIDE)
        return found

    def normed(
        self, way: Way, h: torch.Tensor, ready: Normed | None, norm: RMSNorm, project: Linear,
        *, silu: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Norm of h [T, hidden] and product, then the gate. `ready`: what `added` gave with h."""
        if way == Way.WIDE and self.wide is not None:
            if ready is not None:
                return self.wide(ready, project.weight, eps=norm.eps, bias=project.bias, silu=silu)
            x = norm.forward(h)
            return self.wide(x, project.weight, bias=project.bias, silu=silu)
        if way == Way.SKINNY and self.skinny is not None:
            return self.skinny(
                h, project.weight, norm=norm.weight, eps=norm.eps, bias=project.bias, silu=silu
            )
        x = project.forward(norm.forward(h))
        return silu_and_mul(x) if silu else x

    def added(
        self, way: Way, h: torch.Tensor, x: torch.Tensor, by: RowParallelLinear,
        following: RMSNorm | None = None,
    ) -> Normed | None:  # fmt: skip
        """Add the product of x to h, on one rank. With `following`, the norm that comes next, its
        result for `normed`, if this way leaves it behind."""
        if way == Way.WIDE and self.wide is not None:
            if following is not None:
                return self.wide_add(h, x, by.weight, following.weight, bias=by.bias)
            self.wide(x, by.weight, bias=by.bias, residual=h)
            return None
        if way == Way.SKINNY and self.skinny is not None:
            self.skinny(x, by.weight, bias=by.bias, residual=h)
            return None
        add_product(h, x, by.weight)
        if by.bias is not None:
            h.add_(by.bias)
        return None


class Choice:
    """What is chosen for each number of tokens."""

    def __init__(self) -> None:
        self._of: list[Ways] = [Ways()] * len(GROUPS)

    def __getitem__(self, tokens: int) -> Ways:
        return self._of[min(bisect.bisect_left(GROUPS, tokens), len(GROUPS) - 1)]

    def restore(self, kept: object, ways: Callable[[int], Sequence[Way]]) -> bool:
        """Take what `kept` gave at another start, if it fits the ways that there are now."""
        try:
            found = [
                Ways(*(Way(kept[str(tokens)][name]) for name in NAMES))  # type: ignore[index]
                for tokens in GROUPS
            ]
        except (KeyError, TypeError, ValueError):
            return False
        for tokens, one in zip(GROUPS, found, strict=True):
            if not set(ways(tokens)).issuperset(getattr(one, name) for name in NAMES):
                return False
        self._of = found
        return True

    def kept(self) -> dict[str, dict[str, str]]:
        """For `restore`."""
        return {
            str(tokens): {name: str(getattr(ways, name)) for name in NAMES}
            for tokens, ways in self.chosen.items()
        }

    @property
    def chosen(self) -> dict[int, Ways]:
        """By the groups' numbers of tokens."""
        return dict(zip(GROUPS, self._of, strict=True))

    def decide(
        self, ways: Callable[[int], Sequence[Way]], seconds: Callable[[int, Ways], float]
    ) -> None:
        """Time a layer's products as they follow each other: each way for all of them, then, from
        the fastest on, other ways for each product in turn."""
        for i, tokens in enumerate(GROUPS):
            some = ways(tokens)
            times = {Ways.all(way): seconds(tokens, Ways.all(way)) for way in some}
            best = min(times, key=times.__getitem__)
            shortest = times[best]
            for name in NAMES if len(some) > 1 else ():
                for way in some:
                    other = replace(best, **{name: way})
                    if other in times:
                        continue
                    times[other] = seconds(tokens, other)
                    if times[other] < CLEARLY * shortest:
                        best, shortest = other, times[other]
            self._of[i] = best


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
