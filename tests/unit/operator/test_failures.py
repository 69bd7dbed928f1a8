"""When a group is created anew, how long that waits, and what is kept of the failure."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from minisgl_operator import names
from minisgl_operator.observed import Apply, Key, Refusal
from minisgl_operator.plan import decide
from minisgl_operator.plan.failure import first_line
from minisgl_operator.plan.memory import Failure, Memory
from tests.unit.operator.world import World, group_set, set_condition, spec_of


def world(**spec: Any) -> World:
    return World(spec_of(**{"parallelism": {"tensor": 2}, **spec})).settle()


def crashing(**policy: Any) -> World:
    """A group that ends at each start."""
    made = World(spec_of(image="bad:1", failurePolicy=policy), broken_images={"bad:1"})
    made.operate()
    return made


def starts(made: World, seconds: int) -> list[tuple[int, float]]:
    """(epoch, time since the first start) of each life that was given its pods."""
    found: dict[int, float] = {}
    for _ in range(seconds):
        made.step()
        made.operate()
        for name, manifest in made.sets().items():
            epoch = int(name.rpartition("-")[2])
            if manifest["spec"]["replicas"] and epoch not in found:
                found[epoch] = made.wall
    first = min(found.values())
    return [(epoch, time - first) for epoch, time in sorted(found.items())]


def test_containers_restart_in_place_first() -> None:
    made = world()
    made.crash(made.rank_pods()[1])
    made.run(30)
    assert list(made.sets()) == ["llm-g0-1"]
    assert made.status["readyReplicas"] == 1 and made.status["groupRestarts"] == 0
    failure = made.group(0)["lastFailure"]
    assert (failure["rank"], failure["reason"], failure["exitCode"]) == (1, "Error", 1)
    assert failure["message"] == "RuntimeError: boom"
    assert any("RuntimeError: boom" in text for text in made.events("RankFailed"))


def test_h14_a_crash_at_each_start_backs_off_and_ends_in_restart_budget_exhausted() -> None:
    made = crashing(maxGroupRestarts=4, backoffBaseSeconds=20, backoffMaxSeconds=80)
    gaps = starts(made, 900)
    assert [epoch for epoch, _ in gaps] == [1, 2, 3, 4, 5]
    waits = [b[1] - a[1] for a, b in pairwise(gaps)]
    # Each life has 60 s to serve; meanwhile its pods go, which takes some seconds.
    assert [wait - 60 for wait in waits] == pytest.approx([6, 20, 40, 80], abs=4)
    degraded = made.condition("Degraded")
    assert degraded["reason"] == "RestartBudgetExhausted"
    assert "RuntimeError: this image is broken" in degraded["message"]
    group = made.group(0)
    assert group["phase"] == "Failed" and group["restarts"] == 4
    assert group["lastFailure"]["message"] == "RuntimeError: this image is broken"
    assert len(made.events("RestartBudgetExhausted")) == 1
    assert made.condition("Progressing")["reason"] == "ProgressDeadlineExceeded"


def test_the_backoff_is_bounded() -> None:
    made = crashing(backoffBaseSeconds=20, backoffMaxSeconds=30)
    gaps = starts(made, 600)
    waits = [b[1] - a[1] for a, b in pairwise(gaps)]
    assert max(waits) - 60 == pytest.approx(30, abs=4) and len(waits) > 4


def test_h16_restarts_and_the_last_failure_survive_the_recreation_and_a_lost_status() -> None:
    made = crashing()
    made.until(lambda: made.status["groupRestarts"] == 2)
    made.status = {}
    made.operate()
    assert made.group(0)["restarts"] == 2
    assert made.group(0)["lastFailure"]["message"] == "RuntimeError: this image is broken"
    assert made.group(0)["lastRestartTime"]
    assert len(made.events("GroupRestarting")) == 2
    made.change(image="good:1")
    made.settle()
    assert made.group(0)["restarts"] == 2 and made.group(0)["lastFailure"]["exitCode"] == 1


def test_the_memory_survives_the_deletion_of_the_set_by_hand() -> None:
    made = crashing()
    made.until(lambda: made.status["groupRestarts"] == 1)
    name = next(n for n, m in made.sets().items() if "deletionTimestamp" not in m["metadata"])
    made.remove(next(k for k in made.live if k.name == name))
    made.run(30)
    assert made.group(0)["restarts"] == 1 and made.group(0)["lastFailure"]["exitCode"] == 1


def test_the_memory_survives_that_deletion_also_while_no_group_can_be_created() -> None:
    made = crashing()
    made.until(lambda: made.status["groupRestarts"] == 1)
    made.model_ready = False
    for name in made.sets():
        made.remove(next(k for k in made.live if k.name == name))
    made.run(30)
    assert not made.sets() and made.group(0)["restarts"] == 1
    made.model_ready = True
    made.run(5)
    assert made.sets() and made.group(0)["lastFailure"]["exitCode"] == 1


@pytest.mark.parametrize("renew", [{"restartedAt": "now"}, {"image": "bad:2"}])
def test_a_new_revision_starts_a_spent_group_again(renew: dict[str, str]) -> None:
    made = crashing(maxGroupRestarts=1)
    made.broken_images.add("bad:2")
    made.until(lambda: made.group(0).get("phase") == "Failed")
    epoch = made.group(0)["epoch"]
    made.change(**renew)
    made.until(lambda: made.group(0)["epoch"] > epoch + 1)  # with a budget of its own again
    assert made.group(0)["restarts"] == 2


def test_a_raised_budget_starts_a_spent_group_again() -> None:
    made = crashing(maxGroupRestarts=1)
    made.until(lambda: made.group(0).get("phase") == "Failed")
    made.change(failurePolicy={"maxGroupRestarts": 2})
    made.until(lambda: made.group(0)["restarts"] == 2)


def test_a_spent_group_is_left_as_it_is_also_when_a_pod_of_it_is_evicted() -> None:
    made = crashing(maxGroupRestarts=1)
    made.until(lambda: made.group(0).get("phase") == "Failed")
    epoch = made.group(0)["epoch"]
    made.evict(made.rank_pods()[0])
    made.run(100)
    assert made.group(0)["epoch"] == epoch and made.group(0)["phase"] == "Failed"


def test_a_stable_time_makes_the_backoff_start_from_zero() -> None:
    made = crashing()
    made.until(lambda: made.status["groupRestarts"] == 3)
    made.broken_images.clear()
    made.settle()
    (name,) = made.sets()
    spent = lambda: made.sets()[name]["metadata"]["annotations"][names.SPENT]  # noqa: E731
    made.run(595)
    assert spent() == "3"
    made.run(15)
    assert spent() == ""
    assert made.group(0)["restarts"] == 3


def test_the_stable_time_is_twice_the_longest_backoff_if_that_is_more() -> None:
    made = crashing(backoffMaxSeconds=400, backoffBaseSeconds=1)
    made.until(lambda: made.status["groupRestarts"] == 1)
    made.broken_images.clear()
    made.settle()
    (name,) = made.sets()
    made.run(700, dt=5)
    assert made.sets()[name]["metadata"]["annotations"][names.SPENT] == "1"
    made.run(120, dt=5)
    assert made.sets()[name]["metadata"]["annotations"][names.SPENT] == ""


def test_a_group_is_never_given_up_while_a_pod_of_it_is_pending() -> None:
    made = World(spec_of(image="missing:1"), missing_images={"missing:1"})
    made.run(600)
    assert list(made.sets()) == ["llm-g0-1"] and made.status["groupRestarts"] == 0


def test_a_group_that_does_not_serve_again_within_the_limit_is_created_anew() -> None:
    made = world()
    for pod in made.rank_pods():
        pod["loaded"] = made.wall + 1000
    made.run(58)
    assert list(made.sets()) == ["llm-g0-1"]
    made.run(6)
    assert "llm-g0-2" in made.sets()
    assert made.group(0)["lastFailure"]["reason"] == "StartupTimeout"


@pytest.mark.parametrize(
    ("policy", "again"),
    [("RecreateGroup", True), ("RecreateGroupAfterStart", False), ("None", False)],
)
def test_only_recreate_group_creates_a_group_anew_at_each_exit(policy: str, again: bool) -> None:
    made = world(failurePolicy={"restartPolicy": policy})
    made.crash(made.rank_pods()[0])
    made.run(40)
    assert made.status["groupRestarts"] == int(again)


def fail(made: World) -> None:
    made.rank_pods()[0]["status"] |= {
        "phase": "Failed", "reason": "Evicted", "message": "The node was low on memory",
    }  # fmt: skip


def test_a_failed_pod_ends_its_group_and_is_told() -> None:
    made = world()
    fail(made)
    made.operate()
    made.run(40)
    assert made.status["readyReplicas"] == 1 and made.group(0)["epoch"] == 2
    failure = made.group(0)["lastFailure"]
    assert failure["reason"] == "Evicted" and "low on memory" in failure["message"]


def test_the_event_of_a_failed_pod_says_each_thing_once() -> None:
    for status in ({"reason": "Evicted", "message": "The node was low on memory"}, {}):
        made = world()
        pod = made.rank_pods()[0]
        pod["status"] |= {"phase": "Failed", **status}
        made.operate()
        (text,) = made.events("GroupRestarting")
        for said in (*status.values(), pod["metadata"]["name"]):
            assert text.count(said) == 1
        assert text.lower().count("failed") == (not status)


def test_a_pod_that_somebody_deleted_and_whose_grace_ran_out_is_no_failure_of_the_group() -> None:
    made = world()
    pod = made.rank_pods()[0]
    made.terminate(pod)
    # The kubelet's last word before the pod goes: killed while it still computed for somebody.
    pod["status"]["phase"] = "Failed"
    made.operate()
    made.run(40)
    assert pod not in made.rank_pods() and made.status["readyReplicas"] == 1
    assert list(made.sets()) == ["llm-g0-1"] and made.status["groupRestarts"] == 0


def test_a_failed_pod_is_deleted_where_the_policy_leaves_the_group() -> None:
    made = world(failurePolicy={"restartPolicy": "None"})
    fail(made)
    made.operate()
    made.run(40)
    assert made.group(0)["epoch"] == 1 and made.status["readyReplicas"] == 1


def test_an_eviction_moves_the_group_at_once_and_spends_nothing() -> None:
    made = world(failurePolicy={"maxGroupRestarts": 0, "backoffBaseSeconds": 600,
                                "backoffMaxSeconds": 600})  # fmt: skip
    for times in range(1, 4):
        made.evict(made.rank_pods()[0])
        made.until(lambda times=times: made.group(0).get("restarts") == times)  # type: ignore[misc]
        made.settle(60)
    assert made.group(0)["lastFailure"]["reason"] == "Evicted"


def test_a_pod_that_hangs_terminating_ends_its_group_but_is_not_forced() -> None:
    made = world()
    pod = made.rank_pods()[0]
    made.machines[pod["spec"]["nodeName"]].kubelet = False  # it beats, and the Lease is fresh
    made.machines[pod["spec"]["nodeName"]].lease_at = made.wall + 10_000
    made.terminate(pod)
    made.run(30)
    assert list(made.sets()) == ["llm-g0-1"]
    made.machines["n1"].cordoned = True
    made.run(40)
    assert made.group(0)["lastFailure"]["reason"] == "TerminationStuck"
    made.until(lambda: made.status["readyReplicas"] == 1)  # its pods that hang block nothing
    assert "llm-g0-1" in made.sets()


def test_late_events_of_an_old_epoch_count_for_nothing() -> None:
    made = world()
    made.evict(made.rank_pods()[0])
    made.until(lambda: "llm-g0-2" in made.sets() and made.group(0)["epoch"] == 2)
    for pod in made.rank_pods():
        if pod["metadata"]["labels"][names.EPOCH] == "1":
            pod["status"] |= {"phase": "Failed", "reason": "Late", "message": "late"}
    made.settle()
    assert made.group(0)["epoch"] == 2 and made.group(0)["restarts"] == 1
    assert made.group(0)["lastFailure"]["reason"] == "Evicted"


def test_a_refused_set_costs_no_second_restart_and_is_asked_for_with_the_same_manifest() -> None:
    made = world()
    made.evict(made.rank_pods()[0])
    key = Key("StatefulSet", "llm-g0-2")
    sent = []
    for later in (0, 7, 100):
        seen = made.observe()
        refusal = Refusal("QuotaExceeded", "exceeded quota", since=made.wall)
        seen = replace(seen, wall=made.wall + later, refused={key: refusal})
        actions = decide(seen, made.desired(seen), group_set).actions
        sent += [a.manifest for a in actions if isinstance(a, Apply) and Key.of(a.manifest) == key]
    assert len(sent) == 3 and sent[0] == sent[1] == sent[2]
    assert sent[0]["metadata"]["annotations"][names.RESTARTS] == "1"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback (most recent call last):\n  File \"x\"\ntorch.OutOfMemoryError: CUDA out\nbye",
         "torch.OutOfMemoryError: CUDA out"),
        ("loading\nlevel=ERROR failed to load\nleaving", "level=ERROR failed to load"),
        ("level=warning msg=\"Error -3: no such name\"\nrank 0 cannot listen\nbye",
         "rank 0 cannot listen"),
        ('{"level": "warning", "msg": "an error"}\nfatal: no', "fatal: no"),
        ("one\ntwo\n\n", "two"), ("", ""),
        ("ValueError: " + "x" * 5000, ("ValueError: " + "x" * 5000)[:1024]),
    ],
)  # fmt: skip
def test_the_first_error_line_of_a_message_is_kept(text: str, line: str) -> None:
    assert first_line(text) == line


def test_of_the_exits_of_one_failure_the_cause_counts_also_if_it_is_reported_late() -> None:
    made = world()
    first, second = made.rank_pods()
    made.crash(first, 137, "killed")
    first["status"]["containerStatuses"][0]["lastState"]["terminated"]["reason"] = "OOMKilled"
    held = first["status"].pop("containerStatuses")
    made.step()
    made.operate()
    assert made.group(0)["lastFailure"]["reason"] == "PeerLost"
    first["status"]["containerStatuses"] = held
    made.step()
    made.operate()
    failure = made.group(0)["lastFailure"]
    assert (failure["reason"], failure["rank"], failure["exitCode"]) == ("OOMKilled", 0, 137)
    assert failure["pod"] == first["metadata"]["name"] and failure["node"] == "n1"
    assert second["metadata"]["name"] != failure["pod"]


def test_the_memory_reads_back_what_it_wrote() -> None:
    failure = Failure(1.8e9, "OOMKilled", "no memory", rank=3, pod="p", node="n", exit_code=137)
    memory = Memory(4, 2, 1.8e9, failure, 1.8e9 + 5, True, 1.8e9 + 9, ("n1", "n2"), True)
    assert Memory.of(memory.annotations()) == memory
    assert Memory.of(Memory().annotations(memory.annotations())) == Memory()


def test_annotations_that_somebody_spoilt_count_as_missing() -> None:
    spoilt = {
        names.RESTARTS: "many", names.SPENT: "-1", names.LAST_RESTART: "soon",
        names.LAST_FAILURE: "{", names.SERVED: "", names.NOT_BEFORE: "0", names.FAILED: "yes",
    }  # fmt: skip
    assert Memory.of(spoilt) == Memory()


def test_a_readiness_gate_counts_as_the_pods_readiness() -> None:
    made = world()
    made.step()
    pod = made.rank_pods()[0]
    set_condition(pod, "ContainersReady", True, made.wall)
    set_condition(pod, "Ready", False, made.wall, "ReadinessGatesNotReady")
    made.operate()
    assert made.status["readyReplicas"] == 0


def test_h30_a_pod_that_is_being_deleted_serves_no_more_at_once() -> None:
    made = world()
    made.terminate(made.rank_pods()[1])  # its Ready condition still says True
    made.operate()
    assert made.status["readyReplicas"] == 0
    assert made.condition("Ready")["status"] == "False"
