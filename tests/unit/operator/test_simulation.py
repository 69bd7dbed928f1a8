"""Whatever happens in whatever order, and wherever the operator is cut off: bounds hold, nothing
that must be remembered is lost, and in the end all is as wanted and nothing more is written."""

from collections.abc import Iterable, Iterator
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minisgl_operator import names
from minisgl_operator.observed import Action, Apply, Delete, DeletePod, Key, Manifest
from minisgl_operator.plan import Survey, decide
from tests.unit.operator.world import World, group_set, running, spec_of

CALM_SECONDS = 900
"""Enough for every limit of the simulated spec, one after another."""


class Operator(RuleBasedStateMachine):
    """People and accidents act on the world, between looks of an operator."""

    world: World

    @initialize(
        replicas=st.integers(0, 4),
        tensor=st.sampled_from([1, 2]),
        unavailable=st.integers(0, 2),
        surge=st.integers(0, 2),
        kind=st.sampled_from(["RollingUpdate", "Recreate"]),
        policy=st.sampled_from(["RecreateGroupAfterStart", "RecreateGroup"]),
        reads_nodes=st.booleans(),
    )
    def begin(
        self,
        replicas: int,
        tensor: int,
        unavailable: int,
        surge: int,
        kind: str,
        policy: str,
        reads_nodes: bool,
    ) -> None:
        self.world = World(
            spec_of(
                replicas=replicas,
                parallelism={"tensor": tensor, "gpusPerPod": 1},
                rolloutStrategy={
                    "type": kind,
                    "maxUnavailable": max(unavailable, 1 if surge == 0 else 0),
                    "maxSurge": surge,
                },
                failurePolicy={"restartPolicy": policy},
            ),
            reads_nodes=reads_nodes,
        )
        self.remembered: dict[int, tuple[int, bool, int]] = {}
        self.images = 0

    # --- time ----------------------------------------------------------------------------------

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.step()
            self.look()

    @rule(seconds=st.integers(1, 60))
    def the_operator_is_away(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.step()
        self.world.operator_from = self.world.wall

    @rule(most=st.integers(0, 12))
    def the_operator_dies_while_it_acts(self, most: int) -> None:
        self.world.step()
        self.world.operate(most)
        self.world.operator_from = self.world.wall

    @rule()
    def the_status_is_deleted(self) -> None:
        self.look()  # what only the status knew is in a set by now
        self.world.status = {}

    # --- people --------------------------------------------------------------------------------

    @rule(replicas=st.integers(0, 4))
    def scale(self, replicas: int) -> None:
        self.world.change(replicas=replicas)

    @rule(good=st.booleans())
    def roll_to_another_image(self, good: bool) -> None:
        self.images += 1
        image = f"{'good' if good else 'broken'}:{self.images + 1}"
        if not good:
            self.world.broken_images.add(image)
        self.world.change(image=image)

    @rule()
    def roll_to_an_image_that_does_not_exist(self) -> None:
        self.images += 1
        self.world.missing_images.add(f"missing:{self.images}")
        self.world.change(image=f"missing:{self.images}")

    @rule(tensor=st.sampled_from([1, 2, 3]))
    def change_the_size_of_groups(self, tensor: int) -> None:
        self.world.change(parallelism={"tensor": tensor, "gpusPerPod": 1})

    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self.world.change(suspend=suspend)

    @rule(data=st.data(), foreground=st.booleans())
    def delete_a_child(self, data: st.DataObject, foreground: bool) -> None:
        self.look()
        keys = sorted(self.world.live)
        if keys:
            key = data.draw(st.sampled_from(keys))
            self.world.remove(key, foreground=foreground)
            place = names.parse_set(self.world.obj, key.name)
            if place and place[0] in self.remembered:
                # A set that never had a pod leaves no trace; its epoch may come again.
                self.remembered[place[0]] = (*self.remembered[place[0]][:2], 0)

    @precondition(lambda self: self.world.rank_pods())
    @rule(data=st.data(), how=st.sampled_from(["delete", "evict", "crash", "fail"]))
    def hit_a_rank(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(p["metadata"]["name"] for p in self.ranks())))
        pod = self.world.pods[name]
        if how == "delete":
            self.world.terminate(pod)
        elif how == "evict":
            self.world.evict(pod)
        elif how == "crash" and running(pod):
            self.world.crash(pod)
        elif how == "fail" and pod["spec"].get("nodeName"):
            pod["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"}

    @rule(node=st.sampled_from(["n1", "n2", "n3"]), how=st.sampled_from(["power", "kubelet"]))
    def lose_a_node(self, node: str, how: str) -> None:
        if how == "power":
            self.world.power_off(node)
        else:
            self.world.kubelet_off(node)

    @rule(node=st.sampled_from(["n1", "n2", "n3"]))
    def a_node_comes_back(self, node: str) -> None:
        self.world.power_on(node)

    @rule(node=st.sampled_from(["n1", "n2", "n3"]), places=st.integers(0, 4))
    def others_take_places(self, node: str, places: int) -> None:
        self.world.machines[node].places = places

    # --- what holds ----------------------------------------------------------------------------

    def ranks(self) -> list[Manifest]:
        return self.world.rank_pods()

    def look(self) -> list[Any]:
        """One whole look, whose decisions are held against the bounds."""
        observed = self.world.observe()
        desired = self.world.desired(observed)
        survey = Survey(observed, desired)
        actions = decide(observed, desired, group_set).actions
        serving = {i for i, life in survey.current.items() if survey.serves(life)}
        given_up = {i for i in serving if any(_gives_up(survey, i, a) for a in actions)}
        for index, epoch in _new_sets(survey, actions):
            assert epoch > self.remembered.get(index, (0, False, 0))[2]
        spec = observed.obj.spec
        if spec.rollout_strategy.type == "RollingUpdate" and given_up and self.harmless(survey):
            wanted = observed.obj.group_indices_wanted
            assert len(serving - given_up) >= wanted - spec.rollout_strategy.max_unavailable
        done = self.world.operate()
        self.check_bounds_and_memory()
        return done

    def harmless(self, survey: Survey) -> bool:
        """Whether nothing forces a serving group to go."""
        policy = survey.observed.obj.spec.failure_policy.restart_policy
        broken = any(
            pod.exited or pod.phase == "Failed" or pod.disrupted or pod.node in survey.lost
            for pod in survey.pods
        )
        return not (broken and policy == "RecreateGroup") and not broken

    def check_bounds_and_memory(self) -> None:
        """After a whole look: not too many groups, nothing forgotten, epochs grow."""
        observed = self.world.observe()
        survey = Survey(observed, self.world.desired(observed))
        spec = observed.obj.spec
        if not spec.suspend:
            assert len(survey.current) <= spec.replicas + spec.rollout_strategy.max_surge
        now = {}
        for index, life in survey.current.items():
            memory = life.memory
            restarts, failure, highest = self.remembered.get(index, (0, False, 0))
            assert memory.restarts >= restarts
            assert memory.last_failure is not None or not failure
            last = max(old.epoch for old in survey.groups[index].lives)
            now[index] = (memory.restarts, memory.last_failure is not None, max(highest, last))
        self.remembered = now

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for name, machine in world.machines.items():
            machine.places = 8
            world.power_on(name)
        world.change(image="good:end", suspend=False)
        for _ in range(CALM_SECONDS):
            world.step()
            self.look()
            if self.settled():
                break
        assert self.settled(), self.describe()
        for _ in range(20):  # services, and figures in the status
            world.step()
            self.look()
        written = world.writes
        told = world.status
        for _ in range(5):
            world.step()
            assert self.look() == []
        assert world.writes == written
        assert world.status == told

    def settled(self) -> bool:
        world, obj = self.world, self.world.obj
        sets = [m for key, m in world.live.items() if key.kind == "StatefulSet"]
        serving = world.status.get("readyReplicas")
        return (
            serving == obj.spec.replicas == len(sets)
            and world.status["updatedReplicas"] == serving
            and world.status["currentRevision"] == world.status["updateRevision"]
            and len(self.ranks()) == serving * obj.spec.parallelism.pods
            and all(p["spec"]["image"] == "good:end" for p in self.ranks())
        )

    def describe(self) -> str:
        lines = [f"{self.world.status}"]
        for key, manifest in self.world.live.items():
            if key.kind == "StatefulSet":
                lines.append(f"{key.name} {manifest['metadata']} {manifest['spec']}")
        for pod in self.ranks():
            lines.append(f"{pod['metadata']['name']} {pod['spec']} {pod['status']}")
        return "\n".join(lines)


def _gives_up(survey: Survey, index: int, action: object) -> bool:
    """Whether an action ends the present life of a group."""
    life = survey.current[index]
    obj = survey.observed.obj
    if isinstance(action, Delete):
        return action.key == Key("StatefulSet", names.group_set(obj, index, life.epoch))
    if isinstance(action, DeletePod):
        return any(pod.name == action.name for pod in life.pods)
    if isinstance(action, Apply) and action.manifest["kind"] == "StatefulSet":
        place = names.parse_set(obj, action.manifest["metadata"]["name"])
        return place is not None and place[0] == index and place[1] > life.epoch
    return False


def _new_sets(survey: Survey, actions: Iterable[Action]) -> Iterator[tuple[int, int]]:
    """Index and epoch of each set to be created."""
    for action in actions:
        if isinstance(action, Apply) and Key.of(action.manifest) not in survey.observed.live:
            place = names.parse_set(survey.observed.obj, Key.of(action.manifest).name)
            if action.manifest["kind"] == "StatefulSet" and place is not None:
                yield place


TestOperator = Operator.TestCase
TestOperator.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
