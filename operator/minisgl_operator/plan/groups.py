"""The groups of an object out of what is live: each with its lives, and what it does now.

A group is an index; its StatefulSets and pods of one epoch are a life of it. At most one life is
current: the newest set, if nobody deletes it. All others are on their way out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from minisgl_operator import names
from minisgl_operator.observed import Desired, Key, Manifest, Observed, Worker
from minisgl_operator.plan.memory import Memory
from minisgl_operator.plan.nodes import lost_nodes
from minisgl_operator.plan.pods import STUCK_SECONDS, Pod, controller
from minisgl_operator.times import seconds

Phase = Literal["Pending", "Starting", "Ready", "Draining", "Restarting", "Failed"]
LET_GO = "its set has let go of it, as somebody has changed its labels"
"""Of a pod, in messages: see `Survey.let_go`."""


@dataclass(frozen=True, slots=True)
class Life:
    """One epoch of a group."""

    index: int
    epoch: int
    set: Manifest | None
    pods: tuple[Pod, ...]
    """By number."""
    revision: str
    memory: Memory
    size: int
    """Pods wanted once it is started."""
    started: bool
    """Whether its set has been given its pods."""
    kept: bool
    """Whether its set is ours and nobody deletes it."""

    @property
    def annotations(self) -> Mapping[str, str]:
        return (self.set or {}).get("metadata", {}).get("annotations") or {}

    @property
    def complete(self) -> bool:
        """Whether each of its pods is there and on a node."""
        return len(self.pods) >= self.size and all(pod.node for pod in self.pods)

    @property
    def waits_for_place(self) -> bool:
        return self.started and not self.complete

    @property
    def running(self) -> bool:
        """Whether every pod has fetched what it needs and runs its ranks."""
        return len(self.pods) >= self.size and all(pod.started is not None for pod in self.pods)


@dataclass(frozen=True, slots=True)
class Group:
    index: int
    lives: tuple[Life, ...]
    """By epoch."""
    current: Life | None
    memory: Memory
    """Of its newest set; where none is left, what the status says."""
    next_epoch: int

    @property
    def older(self) -> tuple[Life, ...]:
        """Lives on their way out."""
        return tuple(life for life in self.lives if life is not self.current)


class Survey:
    """An object's groups and pods, sorted out once for the plan and the status."""

    def __init__(self, observed: Observed, desired: Desired) -> None:
        self.observed = observed
        self.desired = desired
        self.pods = [Pod.of(manifest) for manifest in observed.pods]
        self.lost = lost_nodes(observed, self.pods)
        """Lost nodes, each with the reason."""
        self.groups = self._sort()
        self.current = {i: g.current for i, g in sorted(self.groups.items()) if g.current}
        """The current life of each group that has one."""

    def _sort(self) -> dict[int, Group]:
        obj = self.observed.obj
        pods: dict[int, dict[int, list[Pod]]] = {}
        for pod in self.pods:
            if pod.index is not None and pod.role == "rank":
                pods.setdefault(pod.index, {}).setdefault(pod.epoch, []).append(pod)
        sets: dict[int, dict[int, Manifest]] = {}
        for key, manifest in self.observed.live.items():
            place = names.parse_set(obj, key.name) if key.kind == "StatefulSet" else None
            if place is not None:
                sets.setdefault(place[0], {})[place[1]] = manifest
        taken: dict[int, int] = {}
        for key in self.observed.foreign:
            place = names.parse_set(obj, key.name) if key.kind == "StatefulSet" else None
            if place is not None:
                taken[place[0]] = max(place[1], taken.get(place[0], 0))
        told = {g["index"]: g for g in obj.status.get("groups") or () if "index" in g}
        groups = {}
        for index in sorted(sets.keys() | pods.keys()):
            held, here = sets.get(index, {}), pods.get(index, {})
            lives = tuple(
                self._life(index, epoch, held.get(epoch), here.get(epoch, []), told.get(index))
                for epoch in sorted(held.keys() | here.keys())
            )
            newest = next((life for life in reversed(lives) if life.set is not None), None)
            groups[index] = Group(
                index,
                lives,
                newest if newest is not None and newest.kept else None,
                newest.memory if newest else Memory().with_status(told.get(index, {})),
                1 + max(lives[-1].epoch, taken.get(index, 0), _epoch(told.get(index))),
            )
        self._unknown = {
            index: Group(
                index,
                (),
                None,
                Memory().with_status(told.get(index, {})),
                1 + max(taken.get(index, 0), _epoch(told.get(index))),
            )
            for index in (taken.keys() | told.keys()) - groups.keys()
        }
        return groups

    def group(self, index: int) -> Group:
        """The group of an index, also where nothing of it is live."""
        found = self.groups.get(index) or self._unknown.get(index)
        return found or Group(index, (), None, Memory(), 1)

    def _life(
        self,
        index: int,
        epoch: int,
        held: Manifest | None,
        pods: list[Pod],
        told: Manifest | None,
    ) -> Life:
        obj = self.observed.obj
        pods.sort(key=lambda pod: pod.ordinal)
        revision, replicas, kept = "", 0, False
        annotations: Mapping[str, str] = {}
        if held is not None:
            metadata = held["metadata"]
            labels = metadata.get("labels") or {}
            revision = labels.get(names.REVISION, "")
            annotations = metadata.get("annotations") or {}
            replicas = (held.get("spec") or {}).get("replicas", 0)
            # An orphan of a namesake that is gone: its pods carry the other UID, so we would
            # never see them. Its groups begin anew.
            kept = not metadata.get("deletionTimestamp") and obj.uid in (
                controller(held),
                labels.get(names.OBJECT_UID),
            )
        elif pods:
            revision = (pods[0].manifest["metadata"].get("labels") or {}).get(names.REVISION, "")
        size = self.desired.sizes.get(revision, replicas)
        memory = Memory.of(annotations)
        if told is not None and _epoch(told) > epoch:  # somebody deleted a newer set
            memory = memory.with_status(told)
        return Life(
            index,
            epoch,
            held,
            tuple(pods),
            revision,
            memory,
            size,
            started=replicas > 0,
            kept=kept,
        )

    # --- what a life does now --------------------------------------------------------------------

    @cached_property
    def _ranks(self) -> dict[str, list[Worker]]:
        found: dict[str, list[Worker]] = {}
        for worker in self.observed.bus.workers:
            if worker.role == "rank":
                found.setdefault(worker.id.partition("/")[0], []).append(worker)
        return found

    def ranks(self, life: Life) -> list[Worker]:
        """The life's ranks as the bus shows them."""
        return self._ranks.get(names.bus_group(life.index, life.epoch), [])

    def serves(self, life: Life) -> bool:
        """Whether it answers requests: all pods are ready, none leaves, no rank is silent."""
        if not life.started or not life.kept or len(life.pods) < life.size:
            return False
        if not all(pod.serves and pod.node not in self.lost for pod in life.pods[: life.size]):
            return False
        bus = self.observed.bus
        if bus.state not in ("ok", "full"):
            return True
        limit = self.observed.obj.spec.failure_policy.heartbeat_timeout_seconds
        here = {pod.name for pod in life.pods}
        return not any(w.draining or w.silent >= limit for w in self.ranks(life) if w.pod in here)

    def unheard(self, pod: Pod) -> bool:
        """Whether the bus could be read, and the pod was ready, for long enough to hear it, and
        nobody in it was heard: it may not find its way to Redis, or not know its password."""
        bus = self.observed.bus
        limit = self.observed.obj.spec.failure_policy.heartbeat_timeout_seconds
        if bus.state != "ok" or bus.readable < limit or not pod.serves:
            return False
        if self.observed.wall - (pod.ready_since or self.observed.wall) < limit:
            return False
        return not any(w.pod == pod.name and w.silent < limit for w in bus.workers)

    def answers(self, life: Life) -> bool:
        """Whether it `serves`, and is heard as well: what the status calls serving. Whether it is
        to be replaced is no matter of what an operator does not hear."""
        return self.serves(life) and not any(self.unheard(pod) for pod in life.pods)

    def let_go(self, pod: Pod) -> Manifest | None:
        """The set whose pod this was by its name, if its labels are no longer what the set selects.
        It holds that name still."""
        held = self.observed.live.get(Key("StatefulSet", pod.name.rpartition("-")[0]))
        return held if pod.owner is None else None

    def silent_since(self, life: Life) -> float | None:
        """Since when a life that could serve does not, at the latest; None if it cannot yet."""
        if not life.running or all(pod.serves for pod in life.pods):
            return None  # it cannot serve yet, or it is the bus alone that does not hear it
        return max(
            max(pod.started or 0.0, (not pod.ready and pod.ready_since) or 0.0) for pod in life.pods
        )

    def blocks(self, life: Life) -> bool:
        """Whether the next life must wait for this one, which is on its way out.

        Pods that can't go (their node is lost, or they hang) block nothing."""
        if life.pods:
            return any(self.present(pod, life.index) for pod in life.pods)
        if life.set is None:
            return False
        # No pod of it that we see. A foreground deletion keeps the set until its pods are gone,
        # also pods that carry the UID of a former object.
        deleting = seconds(life.set["metadata"].get("deletionTimestamp"))
        grace = self.observed.obj.spec.ranks.termination_grace_period_seconds
        return deleting is None or self.observed.wall <= deleting + grace + STUCK_SECONDS

    def present(self, pod: Pod, index: int) -> bool:
        """Whether a pod of an old life may still hold its GPUs and ports."""
        current = self.current.get(index)
        avoided = current.memory.avoided if current else ()
        return not (
            pod.node in self.lost
            or (pod.node and pod.node in avoided)
            or pod.stuck(self.observed.wall)
        )

    def blocked(self, index: int) -> bool:
        """Whether an older life of the group must go before the current one may start."""
        return any(self.blocks(life) for life in self.group(index).older)

    def phase(self, index: int) -> Phase:
        """The phase of a group, as its status shows it."""
        life = self.current.get(index)
        if life is None:
            return "Draining"
        if self.answers(life):
            return "Ready"
        if life.memory.failed:
            return "Failed"
        again = life.memory.not_before is not None
        if not life.started:
            if again:
                return "Restarting"
            return "Draining" if self.blocked(index) else "Pending"
        if not life.running:
            return "Pending"
        broken = again or life.memory.served is not None
        return "Restarting" if broken or any(p.exited for p in life.pods) else "Starting"


def _epoch(told: object) -> int:
    epoch = told.get("epoch", 0) if isinstance(told, dict) else 0
    return epoch if isinstance(epoch, int) else 0
