"""Revisions: what rolls the groups, and what must not."""

from typing import Any

import pytest

from minisgl_operator import names
from minisgl_operator.desired import desired, group_set, ranks, revision
from minisgl_operator.observed import Key, Manifest, Settings
from tests.unit.operator.cases import (
    CLAIM,
    COMMIT,
    HUB,
    SETTINGS,
    child,
    main_container,
    observe,
    of,
    rank_set,
    settled,
    want,
)

OLD, NEW = SETTINGS, Settings(image="engine:2", redis_image="redis:8", gpu_resource_name="x/gpu")


def merged(spec: Any, change: Any) -> Any:
    if not isinstance(spec, dict) or not isinstance(change, dict):
        return change
    return {**spec, **{k: merged(spec.get(k), v) for k, v in change.items()}}


def digest(spec: dict[str, Any]) -> str:
    return revision.digest(observe(spec).obj)


@pytest.mark.parametrize(
    "change",
    [
        {"image": "other:1"},
        {"imagePullPolicy": "Always"},
        {"restartedAt": "2026-01-01"},
        {"model": {"uri": "hf://Qwen/Qwen3-0.6B"}},
        {"model": {"revision": "b" * 40}},
        {"parallelism": {"tensor": 2}},
        {"engine": {"pageSize": 16}},
        {"engine": {"extraArgs": ["--num-pages=5"]}},
        {"network": {"hostNetwork": False}},
        {"ranks": {"podTemplate": {"spec": {"hostname": "a"}}}},
        {"ranks": {"terminationGracePeriodSeconds": 60}},
        {"failurePolicy": {"heartbeatTimeoutSeconds": 10}},
        {"failurePolicy": {"startupTimeoutSeconds": 60}},
        {"redis": {"managed": {"tlsSecretName": "tls"}}},
    ],
    ids=str,
)
def test_what_shapes_rank_pods_makes_a_new_revision(change: Any) -> None:
    assert digest(merged({"model": HUB}, change)) != digest({"model": HUB})


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 7},
        {"suspend": True},
        {"model": {"servedName": "x"}},
        {"gateway": {"replicas": 3, "maxAttempts": 5}},
        {"tokenizer": {"replicas": 2}},
        {"ingress": {"host": "a.example.com"}},
        {"rolloutStrategy": {"maxSurge": 1}},
        {"failurePolicy": {"maxGroupRestarts": 3, "backoffBaseSeconds": 1}},
        {
            "redis": {
                "managed": {"image": "redis:8", "maxMemory": "1Gi", "storage": {"size": "1Gi"}}
            }
        },
    ],
    ids=str,
)
def test_what_does_not_shape_rank_pods_rolls_nobody(change: Any) -> None:
    assert digest(merged({"model": HUB}, change)) == digest({"model": HUB})


def test_a_default_that_is_written_out_is_no_other_revision() -> None:
    explicit = {
        "model": {**HUB, "download": {"timeoutSeconds": 14400}},
        "parallelism": {"tensor": 1, "gpusPerPod": 1},
        "engine": {"device": "cuda"},
        "network": {"hostNetwork": True, "portRange": {"start": 20000, "size": 256}},
        "ranks": {"sharedMemory": "Auto", "sharedMemorySize": "8Gi", "resources": {}},
        "redis": {"managed": {}},
    }
    assert digest(explicit) == digest({"model": HUB})


def test_the_token_and_limits_of_a_download_by_a_job_are_no_business_of_the_ranks() -> None:
    change = {"tokenSecretRef": {"name": "other"}, "download": {"timeoutSeconds": 60}}
    assert digest({"model": {**CLAIM, **change}}) == digest({"model": CLAIM})
    assert digest({"model": {**HUB, **change}}) != digest({"model": HUB})


def test_a_revision_is_kept_with_its_image_commit_and_template() -> None:
    made = child({"model": HUB}, "ControllerRevision")
    notes = made["metadata"]["annotations"]
    assert notes[names.IMAGE] == "ghcr.io/minisglang/minisglang-engine-cuda:1.0.0"
    assert notes[names.COMMIT] == COMMIT and notes[names.PODS] == "1"
    name = made["metadata"]["labels"][names.REVISION]
    assert made["metadata"]["name"] == f"qwen-{name}" and made["revision"] == 1
    labels = made["data"]["spec"]["template"]["metadata"]["labels"]
    assert labels[names.GROUP_INDEX] == labels[names.EPOCH] == ""


def test_the_default_image_is_that_of_the_device() -> None:
    made = child({"model": HUB, "engine": {"device": "cpu"}}, "ControllerRevision")
    assert made["metadata"]["annotations"][names.IMAGE].endswith("engine-cpu:1.0.0")


def test_h32_an_upgrade_of_the_operator_changes_nothing_that_a_rank_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = {"model": HUB, "parallelism": {"tensor": 2}}
    before = settled(spec, settings=OLD)
    name = desired(before).revision
    old_set = group_set(before, name, 0, 1, 2, [], {})

    def another(*_: Any) -> Manifest:
        return {"metadata": {"labels": {}}, "spec": {"containers": [{"name": "new"}]}}

    monkeypatch.setattr(ranks, "template", another)
    after = observe(spec, [*before.live.values(), old_set], settings=NEW)
    found = desired(after)
    assert found.revision == name
    assert of(found.children, "ControllerRevision") == of(
        before.live.values(), "ControllerRevision"
    )
    assert group_set(after, name, 0, 1, 2, [], {}) == old_set


def test_services_roll_to_a_new_operators_template_on_the_revisions_image() -> None:
    before = settled({"model": HUB}, settings=OLD)
    after = desired(observe({"model": HUB}, before.live.values(), settings=NEW)).children
    for role in ("gateway", "tokenizer", "detokenizer"):
        image = main_container(of(after, "Deployment", f"-{role}"))["image"]
        assert image == "ghcr.io/minisglang/minisglang-engine-cuda:1.0.0"
    assert main_container(of(after, "Deployment", "-redis"))["image"] == "redis:8"


def test_restarted_at_takes_the_newer_default_image() -> None:
    before = settled({"model": HUB}, settings=OLD)
    spec = {"model": HUB, "restartedAt": "now"}
    found = desired(observe(spec, before.live.values(), settings=NEW))
    made = of(found.children, "ControllerRevision")
    assert made["metadata"]["annotations"][names.IMAGE] == "engine:2"


def test_a_revision_that_groups_still_have_is_kept_and_the_new_one_counts_on() -> None:
    before = settled({"model": HUB})
    old = desired(before).revision
    old_set = group_set(before, old, 0, 1, 1, [], {})
    spec = {"model": HUB, "restartedAt": "now"}
    found = want(spec, [*before.live.values(), old_set])
    kept = {
        one["metadata"]["labels"][names.REVISION]: one["revision"]
        for one in found.children
        if one["kind"] == "ControllerRevision"
    }
    assert kept == {old: 1, found.revision: 2}
    assert found.sizes == {old: 1}, "no group is made of a template that is not live"


def test_a_revision_that_no_group_has_goes() -> None:
    before = settled({"model": HUB})
    found = want({"model": HUB, "restartedAt": "now"}, before.live.values())
    made = of(found.children, "ControllerRevision")
    assert made["metadata"]["labels"][names.REVISION] == found.revision


def test_a_deleted_controller_revision_comes_back_from_a_set_that_was_made_of_it() -> None:
    spec = {
        "model": HUB,
        "parallelism": {"tensor": 2},
        "ranks": {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "podAffinityTerm": {"topologyKey": "zone"}}
        ]}}},
    }  # fmt: skip
    before = settled(spec)
    made = rank_set(spec, 2, 5, avoided=["n1", "n2"])
    lost = [one for key, one in before.live.items() if key.kind != "ControllerRevision"]
    found = desired(observe(spec, [*lost, made], settings=NEW)).children
    assert of(found, "ControllerRevision") == of(before.live.values(), "ControllerRevision")


def test_a_set_carries_what_the_plan_remembers_and_what_a_revision_is_found_by() -> None:
    before = settled({"model": HUB})
    name = desired(before).revision
    made = group_set(before, name, 0, 2, 0, [], {names.RESTARTS: "3"})
    notes = made["metadata"]["annotations"]
    assert notes[names.RESTARTS] == "3" and notes[names.COMMIT] == COMMIT
    assert made["spec"]["replicas"] == 0


def test_a_group_of_a_revision_that_is_not_there_cannot_be_made() -> None:
    with pytest.raises(KeyError, match="qwen-0123456789"):
        group_set(settled({"model": HUB}), "0123456789", 0, 1, 1, [], {})


def test_what_a_statefulset_keeps_of_its_own_history_is_no_revision_of_the_object() -> None:
    before = settled({"model": HUB})
    name = desired(before).revision
    own = of(before.live.values(), "ControllerRevision")
    theirs = {**own, "metadata": {**own["metadata"], "name": "qwen-g0-1-5d8c"}, "revision": 9}
    found = desired(observe({"model": HUB}, [*before.live.values(), theirs]))
    assert list(found.sizes) == [name]
    assert Key.of(of(found.children, "ControllerRevision")) == Key.of(own)


def test_a_field_that_is_no_longer_set_shows_in_the_manifest_that_lacks_it() -> None:
    user = {"podTemplate": {"spec": {"priorityClassName": "high"}}}
    notes = [
        child({"model": HUB, **more}, "Deployment", "-gateway")["metadata"]["annotations"]
        for more in ({}, {"gateway": user}, {})
    ]
    assert notes[0] == notes[2] != notes[1]
