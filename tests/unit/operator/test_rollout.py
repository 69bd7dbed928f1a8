"""Rollouts, scaling and starts, by whole groups."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_operator import names
from minisgl_operator.observed import Apply, Delete
from minisgl_operator.plan import decide
from minisgl_operator.plan.rollout import Bounds, Moves, Standing, moves
from minisgl_operator.times import rfc3339
from tests.unit.operator.world import World, group_set, spec_of

NEW, OLD = Standing(serves=True, new=True), Standing(serves=True, new=False)
NEW_LOADS = Standing(serves=False, new=True)
OLD_BROKEN = Standing(serves=False, new=False, broken=True)
OLD_BLINKS = Standing(serves=False, new=False)

CASES: dict[str, tuple[list[Standing], Bounds, Moves]] = {
    "nothing to do": ([NEW, NEW], Bounds(2), Moves()),
    "the first groups": ([], Bounds(2), Moves(create=[0, 1])),
    "scale-up takes the lowest free index": ([NEW, NEW], Bounds(4), Moves(create=[2, 3])),
    "scale-down takes the highest index": ([NEW, NEW, NEW], Bounds(1), Moves(remove=[2, 1])),
    "scale-down takes what does not serve first": (
        [NEW, NEW_LOADS, NEW], Bounds(2), Moves(remove=[1]),
    ),
    "to zero, whatever the surge": ([OLD, OLD], Bounds(0, max_surge=1), Moves(remove=[1, 0])),
    "one group at a time": ([OLD, OLD, OLD], Bounds(3), Moves(replace=[0])),
    "not while another one loads": ([NEW_LOADS, OLD, OLD], Bounds(3), Moves()),
    "two at a time": ([OLD, OLD, OLD], Bounds(3, max_unavailable=2), Moves(replace=[0, 1])),
    "H25: broken groups first, outside the budget": (
        [OLD, OLD_BROKEN, OLD_BROKEN], Bounds(3), Moves(replace=[1, 2]),
    ),
    "a good old group that forms again is not broken yet": ([OLD, OLD_BLINKS], Bounds(2), Moves()),
    "H26: the only group goes down, as planned": ([OLD], Bounds(1), Moves(replace=[0])),
    "H24: no surge by default": ([OLD, OLD], Bounds(2), Moves(replace=[0])),
    "a surge comes before anything goes": (
        [OLD, OLD], Bounds(2, max_unavailable=0, max_surge=1), Moves(create=[2]),
    ),
    "a surge that serves lets one go, for a successor": (
        [OLD, OLD, NEW], Bounds(2, max_unavailable=0, max_surge=1), Moves(replace=[0]),
    ),
    "the last old one goes without a successor": (
        [NEW, OLD, NEW], Bounds(2, max_unavailable=0, max_surge=1), Moves(remove=[1]),
    ),
    "no more surge than old groups": (
        [NEW, OLD], Bounds(2, max_unavailable=0, max_surge=3), Moves(create=[2]),
    ),
    "Recreate: all at once": ([OLD, OLD, OLD], Bounds(3, recreate=True), Moves(replace=[0, 1, 2])),
    "old groups serve on while the model is fetched": (
        [OLD, OLD_BROKEN], Bounds(3, startable=False), Moves(),
    ),
    "scaling down needs no model": ([OLD, OLD], Bounds(1, startable=False), Moves(remove=[1])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_moves(case: str) -> None:
    groups, bounds, expected = CASES[case]
    assert moves(dict(enumerate(groups)), bounds) == expected


def test_scale_up_fills_a_gap_of_indices() -> None:
    assert moves({0: NEW, 3: NEW}, Bounds(4)).create == [1, 2]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    groups=st.dictionaries(
        st.integers(0, 9),
        st.builds(Standing, serves=st.booleans(), new=st.booleans(), broken=st.just(False)).map(
            lambda g: Standing(g.serves, g.new, not g.serves)
        ),
        max_size=8,
    ),
    wanted=st.integers(0, 6),
    unavailable=st.integers(0, 3),
    surge=st.integers(0, 3),
)
def test_a_rollout_keeps_its_bounds_at_each_step_and_ends(
    groups: dict[int, Standing], wanted: int, unavailable: int, surge: int
) -> None:
    if unavailable == surge == 0:
        unavailable = 1
    bounds = Bounds(wanted, unavailable, surge)
    for _ in range(60):
        todo = moves(groups, bounds)
        before = sum(g.serves for g in groups.values())
        for index in todo.remove:
            del groups[index]
        for index in [*todo.create, *todo.replace]:
            groups[index] = NEW_LOADS
        assert len(groups) <= wanted + surge
        serves = sum(g.serves for g in groups.values())
        assert serves >= min(before, max(0, wanted - unavailable))
        if todo == Moves():
            loading = [i for i, g in groups.items() if not g.serves]
            if not loading:
                break
            groups[loading[0]] = NEW
    assert len(groups) == wanted and all(g == NEW for g in groups.values())


# --- the same in a cluster ------------------------------------------------------------------------


def world(replicas: int = 3, **spec: Any) -> World:
    return World(spec_of(replicas=replicas, **spec)).settle()


def started(made: World) -> dict[str, int]:
    return {name: m["spec"]["replicas"] for name, m in made.sets().items()}


def test_h25_a_good_image_rolls_out_after_a_broken_one() -> None:
    made = world()
    made.broken_images.add("bad:1")
    made.change(image="bad:1")
    made.run(200)
    assert made.status["readyReplicas"] == 2  # one was given up, the others go on
    made.change(image="good:2")
    made.run(40)
    assert made.status["readyReplicas"] >= 2
    made.settle()
    assert {m["spec"]["image"] for m in made.sets().values()} == {"good:2"}


def test_h25_a_missing_image_takes_one_group_and_names_the_image() -> None:
    made = world()
    made.missing_images.add("gone:1")
    made.change(image="gone:1")
    made.run(30)
    for pod in made.rank_pods():
        if pod["status"]["phase"] == "Pending":
            pod["status"]["containerStatuses"] = [
                {
                    "name": "rank",
                    "image": "gone:1",
                    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
                }
            ]
    made.operate()
    assert made.condition("Degraded")["reason"] == "ImagePullFailed"
    assert "gone:1" in made.condition("Degraded")["message"]
    assert made.status["readyReplicas"] == 2 and made.status["groupRestarts"] == 0
    made.change(image="good:2")
    made.settle()


def test_h26_with_one_replica_and_no_surge_the_group_goes_down_and_comes_back() -> None:
    made = world(1)
    made.change(image="good:2")
    made.operate()
    made.until(lambda: made.status["readyReplicas"] == 0, 5)
    made.settle()
    assert made.group(0)["epoch"] == 2 and made.group(0)["restarts"] == 0


def test_h24_the_new_group_starts_when_the_pods_of_the_old_one_are_gone() -> None:
    made = world(1, parallelism={"tensor": 2})
    made.change(image="good:2")
    for _ in range(40):
        made.step()
        made.operate()
        epochs = {p["metadata"]["labels"][names.EPOCH] for p in made.rank_pods()}
        assert len(epochs) <= 1
    assert made.settled()


def test_h23_a_change_of_tensor_replaces_groups_whole() -> None:
    made = world(2, parallelism={"tensor": 1, "gpusPerPod": 1})
    made.change(parallelism={"tensor": 4, "gpusPerPod": 2})
    for _ in range(80):
        made.step()
        made.operate()
        for name, manifest in made.sets().items():
            old = name.endswith("-1")
            assert manifest["spec"]["replicas"] in ((0, 1) if old else (0, 2)), name
    assert made.settled() and len(made.rank_pods()) == 4


def test_h28_no_group_ever_holds_pods_of_two_revisions() -> None:
    made = world(2, parallelism={"tensor": 2})
    for image in ("good:2", "good:3"):
        made.change(image=image)
        for _ in range(30):
            made.step()
            made.operate()
            groups: dict[str, set[str]] = {}
            for pod in made.rank_pods():
                labels = pod["metadata"]["labels"]
                groups.setdefault(labels[names.GROUP_INDEX], set()).add(labels[names.REVISION])
            assert all(len(revisions) == 1 for revisions in groups.values())
    made.settle()


def test_recreate_starts_nothing_new_beside_anything_old() -> None:
    made = world(3, rolloutStrategy={"type": "Recreate"})
    made.change(image="good:2")
    made.run(3)
    slow = made.rank_pods()[0]
    slow["metadata"]["deletionTimestamp"] = rfc3339(made.wall + 20)  # it drains for longer
    for _ in range(60):
        made.step()
        made.operate()
        images = {p["spec"]["image"] for p in made.rank_pods()}
        assert len(images) <= 1
    assert made.settled()


def test_a_surge_costs_no_capacity_and_ends_with_as_many_groups_as_before() -> None:
    made = world(3, rolloutStrategy={"maxUnavailable": 0, "maxSurge": 1})
    made.change(image="good:2")
    most = 0
    made.step()
    made.operate()
    while not made.settled():
        made.step()
        made.operate()
        live = [n for n, m in made.sets().items() if "deletionTimestamp" not in m["metadata"]]
        most = max(most, made.status["replicas"])
        assert made.status["readyReplicas"] >= 3, live
    assert most == 4 and len(made.sets()) == 3


def test_a_revision_that_comes_back_undoes_a_rollout() -> None:
    made = world(3)
    made.change(image="good:2")
    made.run(8)
    made.change(image="good:1")
    made.settle()
    kept = [name for name in made.sets() if name.endswith("-1")]
    assert len(kept) == 2  # those that were never replaced


def test_no_further_group_starts_while_a_pod_of_an_earlier_one_has_no_place() -> None:
    made = World(spec_of(replicas=4, parallelism={"tensor": 2}))
    for machine in made.machines.values():
        machine.places = 1  # three places: one group, and a half
    made.run(60)
    assert sorted(started(made).values()) == [0, 0, 2, 2]
    made.machines["n1"].places = 6
    made.settle()


def test_groups_of_one_object_do_not_deadlock_for_places() -> None:
    made = World(spec_of(replicas=2, parallelism={"tensor": 3}))
    for machine in made.machines.values():
        machine.places = 1
    made.run(60)
    assert made.status["readyReplicas"] == 1  # two halves would wait for each other for ever


def test_a_set_that_was_deleted_by_hand_comes_back_under_the_next_epoch() -> None:
    made = world(2)
    made.remove(next(k for k in made.live if k.name == "llm-g0-1"))
    made.operate()
    assert "llm-g0-2" in made.sets()
    made.settle()
    assert made.group(0)["restarts"] == 0


@pytest.mark.parametrize("cascade", ["orphan", "foreground"])
def test_pods_without_a_set_go(cascade: str) -> None:
    made = world(1)
    key = next(k for k in made.live if k.name == "llm-g0-1")
    if cascade == "orphan":
        for pod in made.rank_pods():
            pod["metadata"]["ownerReferences"] = [{"uid": "", "controller": False}]
    made.remove(key, foreground=cascade == "foreground")
    made.operate()
    made.settle()
    assert list(made.sets()) == ["llm-g0-2"] and len(made.rank_pods()) == 1


def test_the_next_set_is_there_before_the_old_one_is_deleted() -> None:
    made = world(1)
    made.change(image="good:2")
    made.operate()  # the new revision's template
    done = made.operate()
    assert [a.manifest["metadata"]["name"] for a in done if isinstance(a, Apply)] == ["llm-g0-2"]
    assert not [a for a in done if isinstance(a, Delete)]
    deleted = [a for a in made.operate() if isinstance(a, Delete)]
    assert [(a.key.name, a.foreground) for a in deleted] == [("llm-g0-1", True)]


def test_nothing_of_a_new_revision_starts_before_its_model_is_there() -> None:
    made = world(2)
    made.model_ready = False
    made.change(image="good:2")
    made.run(60)
    assert made.status["readyReplicas"] == 2 and made.status["updatedReplicas"] == 0
    made.model_ready = True
    made.settle()


def test_scaled_to_zero_keeps_the_services() -> None:
    made = world(2)
    made.change(replicas=0)
    made.settle()
    assert not made.rank_pods() and made.condition("Ready")["reason"] == "ScaledToZero"
    assert {p["metadata"]["labels"][names.COMPONENT] for p in made.pods.values()} == {
        "gateway", "tokenizer", "detokenizer", "redis",
    }  # fmt: skip
    made.change(replicas=1)
    made.settle()


def test_a_thousand_groups_are_planned_with_one_set_each() -> None:
    made = World(spec_of(replicas=1024))
    for machine in made.machines.values():
        machine.places = 1024
    built: list[int] = []

    def counting(*arguments: Any) -> dict[str, Any]:
        built.append(arguments[2])
        return group_set(*arguments)

    made.operate()
    observed = made.observe()
    plan = decide(observed, made.desired(observed), counting)
    assert sorted(built) == list(range(1024))
    for action in plan.actions:
        made.act(action)
    assert sum(started(made).values()) == 1
    made.run(3)
    assert made.status["groupPhases"]["Pending"] > 1000 and len(made.status["groups"]) == 64
    assert len(json.dumps(made.status)) < 64 * 1024
