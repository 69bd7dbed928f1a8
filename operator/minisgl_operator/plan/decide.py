"""The plan of one object: what to do now, out of what is seen now. Nothing is remembered here.

A group's next life is made in steps, each of which may be the last one of this operator: (1) the
set of the next epoch is created, with no pods and with all that is remembered; (2) once it is
seen, the old set is deleted, which drains it; (3) once the old pods are gone, the backoff is over
and no other group of the object waits for a place, the new set gets its pods. For a lost node
nothing is waited for.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from minisgl_operator import names
from minisgl_operator.observed import (
    Action,
    Apply,
    Delete,
    Desired,
    GroupSet,
    Key,
    Observed,
    Plan,
    Post,
)
from minisgl_operator.plan import children
from minisgl_operator.plan.failure import (
    Ending,
    after,
    ending,
    exhausted,
    present,
    replaced,
    stable_seconds,
    start_deadline,
)
from minisgl_operator.plan.groups import Life, Survey
from minisgl_operator.plan.memory import Memory
from minisgl_operator.plan.nodes import returned
from minisgl_operator.plan.pods import STUCK_SECONDS
from minisgl_operator.plan.refused import asked_again
from minisgl_operator.plan.rollout import Bounds, Moves, Standing, moves


def decide(observed: Observed, desired: Desired, build: GroupSet) -> Plan:
    """The plan. Every child that is wanted is in it: who acts sends only what differs."""
    if observed.obj.metadata.deletion_timestamp:
        return Plan()  # the garbage collector's work
    survey = Survey(observed, desired)
    actions: list[Action] = [*children.applied(survey)]
    groups = _Groups(survey, build)
    groups.decide()
    actions += groups.actions
    actions, again = asked_again(survey, actions)
    groups.times += [again] if again is not None else []
    actions += children.pruned(survey)
    actions += children.pods(survey)
    return Plan(tuple(actions), groups.wake())


@dataclass(frozen=True, slots=True)
class _Next:
    """A set that is to be there: a life to come, or a current one as it should be."""

    index: int
    epoch: int
    revision: str
    memory: Memory
    started: bool = False
    life: Life | None = None

    @property
    def at_once(self) -> bool:
        """Whether it follows a lost node, so that it waits for nothing of its group."""
        return bool(self.memory.avoided)


@dataclass(slots=True)
class _Groups:
    survey: Survey
    build: GroupSet
    actions: list[Action] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Unix times at which something is due."""

    def decide(self) -> None:
        survey = self.survey
        settled = children.groups_drain(survey)  # suspending: not yet
        ends = {} if settled else self._endings()
        todo = Moves() if settled else self._moves(ends)
        kept = [life for i, life in survey.current.items() if i not in todo.remove]
        nexts: list[_Next] = []
        present_ones: list[_Next] = []
        for life in kept:
            here = self._present(life, ends.get(life.index))
            follows = self._successor(life, here.memory, ends.get(life.index), todo)
            if follows is not None:
                nexts.append(follows)
            elif here.started or not settled:
                present_ones.append(here)
        nexts += [self._created(index) for index in todo.create]
        self._apply(present_ones, nexts)
        self._delete(todo)
        self._tell(todo)

    # --- judging -------------------------------------------------------------------------------

    def _endings(self) -> dict[int, Ending]:
        found = {}
        for index, life in self.survey.current.items():
            end = ending(self.survey, life, self._decided(life))
            if end is not None:
                found[index] = end
            elif (deadline := start_deadline(self.survey, life)) is not None:
                self.times.append(deadline)
        return found

    def _moves(self, ends: dict[int, Ending]) -> Moves:
        survey, desired = self.survey, self.survey.desired
        spec = survey.observed.obj.spec
        groups = {}
        for index, life in survey.current.items():
            serves = survey.serves(life) and index not in ends
            groups[index] = Standing(
                serves=serves,
                new=life.revision == desired.revision,
                broken=not serves and (index in ends or self._broken(life)),
            )
        strategy = spec.rollout_strategy
        bounds = Bounds(
            wanted=survey.observed.obj.group_indices_wanted,
            max_unavailable=strategy.max_unavailable,
            max_surge=strategy.max_surge,
            recreate=strategy.type == "Recreate",
            startable=desired.model_ready and desired.revision in desired.sizes,
        )
        return moves(groups, bounds)

    def _broken(self, life: Life) -> bool:
        """Not: a group whose ranks have just begun to form again in place. Else, with a broken
        new revision, each hiccup of a good old group would be its end."""
        since = self.survey.silent_since(life)
        if since is None or not life.started:
            return True
        until = since + self.survey.observed.obj.spec.failure_policy.heartbeat_timeout_seconds
        if self.survey.observed.wall >= until:
            return True
        self.times.append(until)
        return False

    def _present(self, life: Life, end: Ending | None) -> _Next:
        """A current life with its memory brought up to now, and the Events of what is new."""
        memory = present(self.survey, life)
        if end is not None and end.counts and exhausted(self.survey, memory.spent):
            memory = replace(memory, failed=True, last_failure=end.failure)
            if life.memory.failed:  # as it was first recorded
                memory = replace(memory, last_failure=life.memory.last_failure)
            elif not self._waits_for_revision(life):
                text = (
                    f"{end.event}; its {memory.spent} re-creations are spent, it is left as it is"
                )
                self.actions.append(Post("Warning", "RestartBudgetExhausted", text))
        elif end is None and memory.last_failure not in (None, life.memory.last_failure):
            assert memory.last_failure is not None
            text = f"group {life.index}: {memory.last_failure.sentence()}"
            self.actions.append(Post("Warning", "RankFailed", text))
        if memory.served is not None:
            if life.memory.served is None:
                text = f"group {life.index} serves (epoch {life.epoch})"
                self.actions.append(Post("Normal", "GroupReady", text))
            if memory.spent:
                self.times.append(memory.served + stable_seconds(self.survey))
        return _Next(life.index, life.epoch, life.revision, memory, life.started, life)

    def _waits_for_revision(self, life: Life) -> bool:
        return life.revision != self.survey.desired.revision

    # --- lives to come -------------------------------------------------------------------------

    def _successor(
        self, life: Life, memory: Memory, end: Ending | None, todo: Moves
    ) -> _Next | None:
        """The next life of a group, if the present one is over."""
        survey, desired = self.survey, self.survey.desired
        group = survey.group(life.index)
        make = partial(_Next, life.index, group.next_epoch)
        if life.index in todo.replace:
            follows = replaced(memory)
            if end is not None and not memory.failed:
                follows = replace(self._after(life, end), spent=0)
            return make(desired.revision, follows)
        if life.revision not in desired.sizes:
            return None
        if end is not None:
            if memory.failed:
                return None
            return make(life.revision, self._after(life, end))
        if back := self._places_back(life):
            text = f"group {life.index}: node {', '.join(sorted(back))} may be used again"
            self.actions.append(Post("Normal", "NodeReturned", text))
            avoided = tuple(node for node in memory.avoided if node not in back)
            return make(life.revision, replace(memory, avoided=avoided))
        return None

    def _after(self, life: Life, end: Ending) -> Memory:
        memory = after(self.survey, life, end, self._decided(life))
        lost = end.failure.reason == "NodeLost"
        if lost:
            memory = replace(memory, avoided=tuple(sorted(self.survey.lost)))
        wait = (memory.not_before or 0.0) - (memory.last_restart or 0.0)
        again = f"it starts again in {wait:.0f} s" if wait >= 1 else "it starts again"
        text = f"{end.event}; {again}"
        self.actions.append(Post("Warning", "NodeLost" if lost else "GroupRestarting", text))
        return memory

    def _decided(self, life: Life) -> float:
        """When a re-creation was decided: with a set that is refused, when it was first, so that
        its manifest stays the same while it is refused."""
        epoch = self.survey.group(life.index).next_epoch
        key = Key("StatefulSet", names.group_set(self.survey.observed.obj, life.index, epoch))
        refusal = self.survey.observed.refused.get(key)
        if refusal is None or refusal.deletion:
            return self.survey.observed.wall
        return refusal.since

    def _places_back(self, life: Life) -> set[str]:
        """The nodes that a life avoids and that can be used again, while it waits for a place."""
        if not life.waits_for_place or not life.memory.avoided:
            return set()
        old = self.survey.group(life.index).older
        leftover = {pod.node for past in old for pod in past.pods}
        observed, lost = self.survey.observed, self.survey.lost
        return {n for n in life.memory.avoided if returned(observed, n, lost, leftover)}

    def _created(self, index: int) -> _Next:
        group = self.survey.group(index)
        memory = replaced(group.memory)
        return _Next(index, group.next_epoch, self.survey.desired.revision, memory)

    # --- sets ----------------------------------------------------------------------------------

    def _apply(self, present_ones: list[_Next], nexts: list[_Next]) -> None:
        chosen = self._chosen([*present_ones, *nexts])
        for one in sorted([*present_ones, *nexts], key=lambda one: one.index):
            if one is chosen:
                avoided = tuple(sorted({*one.memory.avoided, *self.survey.lost}))
                one = replace(one, started=True, memory=replace(one.memory, avoided=avoided))
            size = self.survey.desired.sizes.get(one.revision)
            if size is None:
                continue  # its template is gone: it stays as it is
            held = one.life.annotations if one.life else None
            manifest = self.build(
                self.survey.observed,
                one.revision,
                one.index,
                one.epoch,
                size if one.started else 0,
                one.memory.avoided,
                one.memory.annotations(held),
            )
            self.actions.append(Apply(manifest))

    def _chosen(self, candidates: list[_Next]) -> _Next | None:
        """The one group to start now. One at a time, each once the one before has a place: two
        half-placed groups of one object would wait for each other's GPUs for ever."""
        if any(one.life and one.life.waits_for_place for one in candidates):
            return None
        if self._old_ones_in_the_way():
            candidates = [c for c in candidates if c.revision != self.survey.desired.revision]
        waiting = [one for one in candidates if not one.started and self._may_start(one)]
        return min(waiting, key=lambda one: (not one.at_once, one.index), default=None)

    def _may_start(self, one: _Next) -> bool:
        survey = self.survey
        if one.revision not in survey.desired.sizes:
            return False
        if one.revision == survey.desired.revision and not survey.desired.model_ready:
            return False
        if one.at_once:
            return True
        if one.memory.not_before is not None and one.memory.not_before > survey.observed.wall:
            self.times.append(one.memory.not_before)
            return False
        before = survey.group(one.index).lives
        return not any(survey.blocks(life) for life in before if life is not one.life)

    def _old_ones_in_the_way(self) -> bool:
        """Recreate: nothing of the new revision starts beside anything of an old one."""
        survey = self.survey
        if survey.observed.obj.spec.rollout_strategy.type != "Recreate":
            return False
        return any(
            life.pods and life.revision != survey.desired.revision and survey.blocks(life)
            for group in survey.groups.values()
            for life in group.lives
        )

    def _delete(self, todo: Moves) -> None:
        survey = self.survey
        for index, group in survey.groups.items():
            goes = index in todo.remove
            for life in group.lives:
                if life.set is None or life.set["metadata"].get("deletionTimestamp"):
                    continue
                if life is group.current:
                    over = goes
                else:  # what it remembers must be in a newer set first
                    over = group.current is not None or index not in todo.create
                if over:
                    uid = life.set["metadata"].get("uid", "")
                    self.actions.append(Delete(Key.of(life.set), uid, foreground=True))

    # --- telling -------------------------------------------------------------------------------

    def _tell(self, todo: Moves) -> None:
        revision = self.survey.desired.revision
        if todo.create:
            text = f"creating {groups_text(todo.create)} of revision {revision}"
            self.actions.append(Post("Normal", "ScalingUp", text))
        if todo.replace:
            text = f"replacing {groups_text(todo.replace)} by revision {revision}"
            self.actions.append(Post("Normal", "RollingOut", text))
        if todo.remove:
            text = f"draining and removing {groups_text(todo.remove)}"
            self.actions.append(Post("Normal", "ScalingDown", text))

    def wake(self) -> float | None:
        """Seconds until something is due that no event tells."""
        wall = self.survey.observed.wall
        self.times += [
            pod.deleting + STUCK_SECONDS for pod in self.survey.pods if pod.deleting is not None
        ]
        due = [time - wall for time in self.times if time > wall]
        return min(due) + 0.1 if due else None


def groups_text(indices: list[int]) -> str:
    """`group 3`, or `groups 0-4, 7`."""
    spans: list[list[int]] = []
    for index in sorted(indices):
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"group {text}" if len(indices) == 1 else f"groups {text}"
