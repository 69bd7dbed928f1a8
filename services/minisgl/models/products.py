"""Which kernel computes which product of a decode step, and how products hand on to each other.

The project's own kernels read weights early and fuse norm, gate and residual; a library has better
tiles once there are many tokens. Where the borders lie depends on the shapes and on the device, so
all ways are timed once, at the start.
"""

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch

from minisgl.layers.activation import silu_and_mul
from minisgl.layers.linear import Linear, RowParallelLinear, add_product
from minisgl.layers.norm import RMSNorm
from minisgl_kernels.skinny_linear import MAX_TOKENS as SKINNY_TOKENS
from minisgl_kernels.skinny_linear import SkinnyLinear
from minisgl_kernels.wide_linear import (
    Blocks,
    Normed,
    Turned,
    WideAdd,
    WideLinear,
    WideTurn,
    computes,
    likely_blocks,
    turning_blocks,
    turns,
    wide_add,
    wide_turn,
)

GROUPS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
"""Products are timed with so many tokens; what was found holds down to the number before."""
REPLAYS = 8
CLEARLY = 0.99
"""A way must take so much of the best one's time at most to be taken in its place."""
HOPELESS = 1.25
"""A way that takes so much of the best one's time for all products is tried for none."""


class Way(StrEnum):
    """Who computes a product."""

    LIBRARY = "library"
    SKINNY = "skinny"
    """For few tokens, `skinny_linear`."""
    WIDE = "wide"
    """For up to 256 tokens on Hopper, `wide_linear`."""


class Option(NamedTuple):
    """One way to compute a product."""

    way: Way
    cut: Blocks | None = None
    """Of WIDE; None: whatever that kernel takes by itself."""


LIBRARY = Option(Way.LIBRARY)


@dataclass(frozen=True, slots=True)
class Ways:
    """How the products of a layer are computed."""

    qkv: Option = LIBRARY
    o: Option = LIBRARY
    gate_up: Option = LIBRARY
    down: Option = LIBRARY


NAMES = ("qkv", "o", "gate_up", "down")

Shapes = Mapping[str, tuple[int, int, int]]
"""By product: rows and columns of its weights, and its mode in `wide_linear`."""
Options = Mapping[str, Sequence[Option]]
"""By product; of each way the likeliest comes first."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The own kernels that there are, and the most tokens that each is given."""

    skinny: SkinnyLinear | None = None
    skinny_tokens: int = 0
    wide: WideLinear | None = None
    wide_add: WideAdd = wide_add
    wide_turn: WideTurn = wide_turn
    wide_tokens: int = 0

    @property
    def most(self) -> int:
        """Tokens of the largest step that some own kernel may be part of."""
        return max(
            self.skinny_tokens if self.skinny is not None else 0,
            self.wide_tokens if self.wide is not None else 0,
        )

    def options(self, tokens: int, shapes: Shapes, turned_heads: int = 0) -> Options:
        """Those for so many tokens. `turned_heads`: size of the heads that are turned behind the
        QKV product, or 0."""
        found = {name: [LIBRARY] for name in shapes}
        for name, shape in shapes.items():
            if self.skinny is not None and tokens <= min(self.skinny_tokens, SKINNY_TOKENS):
                found[name].append(Option(Way.SKINNY))
            if self.wide is not None and tokens <= self.wide_tokens and computes(*shape):
                # A kernel of its own that turns the heads costs more than any other cut saves.
                turning = turned_heads if name == "qkv" else 0
                cuts = turning_blocks(tokens, *shape[:2], turning) if turning else []
                cuts = cuts or likely_blocks(tokens, *shape)
                found[name] += [Option(Way.WIDE, cut) for cut in cuts]
        return found

    def normed(
        self, option: Option, h: torch.Tensor, ready: Normed | None, norm: RMSNorm, project: Linear,
        *, silu: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Norm of h [T, hidden] and product, then the gate. `ready`: what `added` gave with h."""
        if option.way == Way.WIDE and self.wide is not None:
            x = norm.forward(h) if ready is None else ready
            return self.wide(
                x, project.weight, eps=norm.eps, bias=project.bias, silu=silu, blocks=option.cut
            )
        if option.way == Way.SKINNY and self.skinny is not None:
            return self.skinny(
                h, project.weight, norm=norm.weight, eps=norm.eps, bias=project.bias, silu=silu
            )
        x = project.forward(norm.forward(h))
        return silu_and_mul(x) if silu else x

    def turned(
        self, option: Option, h: torch.Tensor, ready: Normed | None, norm: RMSNorm, project: Linear,
        turned: Turned,
    ) -> torch.Tensor | None:  # fmt: skip
        """`normed`, and what comes before attention: queries [T, heads, dim], while keys and
        values are stored. None, and nothing is done, if the QKV product is not computed so."""
        dim = turned.cos_sin.shape[1]
        if (
            option.way != Way.WIDE or self.wide is None or option.cut is None
            or not turns(len(h), *project.weight.shape, dim, option.cut)
        ):  # fmt: skip
            return None
        x = norm.forward(h) if ready is None else ready
        return self.wide_turn(
            x, project.weight, turned, eps=norm.eps, bias=project.bias, blocks=option.cut
        )

    def added(
        self, option: Option, h: torch.Tensor, x: torch.Tensor, by: RowParallelLinear,
        following: RMSNorm | None = None,
    ) -> Normed | None:  # fmt: skip
        """Add the product of x to h, on one rank. With `following`, the norm that comes next, its
        result for `normed`, if this way leaves it behind."""
        if option.way == Way.WIDE and self.wide is not None:
            if following is not None:
                return self.wide_add(
                    h, x, by.weight, following.weight, bias=by.bias, blocks=option.cut
                )
            self.wide(x, by.weight, bias=by.bias, residual=h, blocks=option.cut)
            return None
        if option.way == Way.SKINNY and self.skinny is not None:
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

    @property
    def chosen(self) -> dict[int, Ways]:
        """By the groups' numbers of tokens."""
        return dict(zip(GROUPS, self._of, strict=True))

    def decide(
        self, options: Callable[[int], Options], seconds: Callable[[int, Ways], float]
    ) -> None:
        """Time a layer's products as they follow each other: each way for all of them, then, from
        each of these on, all other options for each product in turn."""
        for i, tokens in enumerate(GROUPS):
            some = options(tokens)
            took = functools.cache(functools.partial(seconds, tokens))
            starts = sorted(uniform(some), key=took)
            able = [ways for ways in starts if took(ways) <= HOPELESS * took(starts[0])]
            ways_able = {ways.qkv.way for ways in able}
            tried = {
                name: [option for option in some[name] if option.way in ways_able] for name in NAMES
            }
            best = descend(able[0], tried, took)
            for start in able[1:]:
                other = descend(start, tried, took)
                if took(other) < CLEARLY * took(best):
                    best = other
            self._of[i] = best

    def kept(self) -> dict[str, dict[str, tuple[str, Blocks | None]]]:
        """For `restore`, through JSON."""
        return {
            str(tokens): {
                name: (str(getattr(ways, name).way), getattr(ways, name).cut) for name in NAMES
            }
            for tokens, ways in self.chosen.items()
        }

    def restore(self, kept: object, options: Callable[[int], Options]) -> bool:
        """Take what `kept` gave at another start, if it is among the options that there are now."""
        found = []
        for tokens in GROUPS:
            some = options(tokens)
            try:
                pairs = [kept[str(tokens)][name] for name in NAMES]  # type: ignore[index]
                ways = [Option(Way(way), cut and Blocks(*cut)) for way, cut in pairs]
            except (KeyError, TypeError, ValueError):
                return False
            if any(way not in some[name] for name, way in zip(NAMES, ways, strict=True)):
                return False
            found.append(Ways(*ways))
        self._of = found
        return True


def uniform(options: Options) -> list[Ways]:
    """Each way for all products, as far as it has all."""
    found = []
    for way in Way:
        firsts = [next((o for o in options[name] if o.way == way), None) for name in NAMES]
        if None not in firsts:
            found.append(Ways(*firsts))  # type: ignore[arg-type]
    return found


def descend(start: Ways, options: Options, took: Callable[[Ways], float]) -> Ways:
    """From `start` on, the best option for each product in turn. Twice: what the first takes may
    pay only beside what the last takes, such as a norm that this one leaves behind for that one."""
    best = start
    for _ in range(2):
        before = best
        for name in NAMES:
            for option in options[name]:
                other = replace(best, **{name: option})
                if took(other) < CLEARLY * took(best):
                    best = other
        if best == before:
            break
    return best


def covering(options: Options) -> list[Ways]:
    """Ways that have every option of every product once at least."""
    most = max(len(some) for some in options.values())
    return [
        Ways(*(options[name][min(i, len(options[name]) - 1)] for name in NAMES))
        for i in range(most)
    ]


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
