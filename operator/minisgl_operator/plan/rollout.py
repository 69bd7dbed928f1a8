"""Which groups come, go, or are replaced: scaling and rollouts, by whole groups.

Pure arithmetic over a few facts of each group. Two bounds hold at any time: no more than
`maxSurge` groups above `replicas`, and no serving group taken down while fewer than
`replicas - maxUnavailable` others serve. Groups that do not serve are replaced first and cost
nothing, or a broken revision could never be mended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count, islice


@dataclass(frozen=True, slots=True)
class Standing:
    """What counts of one group."""

    serves: bool
    new: bool
    """Whether it is of the wanted revision."""
    broken: bool = False
    """Whether it does not serve and is not just about to again: costs nothing to replace."""


@dataclass(frozen=True, slots=True)
class Bounds:
    wanted: int
    """Groups in the end."""
    max_unavailable: int = 1
    max_surge: int = 0
    recreate: bool = False
    """All at once."""
    startable: bool = True
    """Whether groups of the wanted revision can be made: its model and its template are there."""


@dataclass(slots=True)
class Moves:
    create: list[int] = field(default_factory=list)
    replace: list[int] = field(default_factory=list)
    """By a new life of the wanted revision under the same index."""
    remove: list[int] = field(default_factory=list)


def moves(groups: Mapping[int, Standing], bounds: Bounds) -> Moves:
    """What to do now; called again after each change, it comes to rest at the wanted state."""
    todo = Moves()
    left = dict(groups)
    surge = 0 if bounds.recreate or bounds.wanted == 0 else bounds.max_surge
    old = sum(not g.new for g in left.values())
    _scale_down(left, bounds, min(surge, old) if bounds.startable else surge, todo)
    if not bounds.startable:
        return todo
    old = sum(not g.new for g in left.values())

    # Scale up; a surge of the new revision beside the old ones that it will replace.
    room = bounds.wanted + min(surge, old) - len(left)
    if room > 0:
        free = (index for index in count() if index not in left)
        todo.create = list(islice(free, room))
    surplus = len(left) + len(todo.create) - bounds.wanted

    def take(index: int) -> None:
        """Give up a group of an old revision: surplus ones at last without a successor."""
        nonlocal old, surplus
        if old > surplus:
            todo.replace.append(index)
        else:
            todo.remove.append(index)
            surplus -= 1
        old -= 1

    olds = sorted(index for index, group in left.items() if not group.new)
    for index in olds:
        if bounds.recreate or left[index].broken:
            take(index)
    if not bounds.recreate:
        budget = sum(g.serves for g in left.values()) - bounds.wanted + bounds.max_unavailable
        for index in olds:
            if left[index].serves and budget > 0:
                take(index)
                budget -= 1
    return todo


def _scale_down(left: dict[int, Standing], bounds: Bounds, surge: int, todo: Moves) -> None:
    """Take the groups above what is wanted out of `left`: those that do not serve, then those of
    the highest index."""
    extra = len(left) - bounds.wanted - surge
    if extra <= 0:
        return
    order = sorted(left, key=lambda i: (left[i].serves, -i))
    for index in order[:extra]:
        todo.remove.append(index)
        del left[index]
