"""Where a model's files come from."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from minisgl_operator import names
from minisgl_operator.desired import desired
from minisgl_operator.observed import Manifest
from tests.unit.operator.cases import (
    CASES,
    CLAIM,
    COMMIT,
    HUB,
    child,
    completed,
    job_pod,
    main_container,
    observe,
    of,
    pod,
    rank_set,
    settled,
    want,
)

FOLDER = "Qwen--Qwen3-8B"


def model_of(container: Any) -> str:
    (word,) = [word for word in container["args"] if word.startswith("--model=")]
    return str(word).removeprefix("--model=")


def model_volume(workload: Manifest) -> Any:
    (volume,) = [v for v in pod(workload)["volumes"] if v["name"] == "model"]
    return {k: v for k, v in volume.items() if k != "name"}


def model_mounts(container: Any) -> list[Any]:
    return [m for m in container["volumeMounts"] if m["name"] == "model"]


@pytest.mark.parametrize("role", ["gateway", "tokenizer", "detokenizer"])
def test_h41_of_a_shared_claim_all_pods_read_and_one_job_writes(role: str) -> None:
    spec = {"model": CLAIM}
    path = f"/models/hub/{FOLDER}/{COMMIT}"
    for workload in (child(spec, "Deployment", f"-{role}"), rank_set(spec)):
        container = main_container(workload)
        assert model_of(container) == path
        assert all(mount["readOnly"] for mount in model_mounts(container))
        assert "initContainers" not in pod(workload)
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]
    job = child(spec, "Job")
    writer = main_container(job)
    assert model_mounts(writer) == [{"name": "model", "mountPath": "/models"}]
    assert writer["args"][1:6] == [
        "minisgl", "download", "hf://Qwen/Qwen3-8B", "/models/hub", f"--revision={COMMIT}",
    ]  # fmt: skip
    assert not any(v["name"] == "HF_HUB_OFFLINE" for v in writer["env"])


def test_the_job_tries_until_it_succeeds_with_a_limit_for_each_attempt() -> None:
    job = child({"model": {**CLAIM, "download": {"timeoutSeconds": 60}}}, "Job")
    assert pod(job)["restartPolicy"] == "OnFailure" and job["spec"]["backoffLimit"] > 10**9
    container = main_container(job)
    assert container["command"] == ["timeout"] and container["args"][0] == "60"
    assert "--result-file=/dev/termination-log" in container["args"]


def test_services_and_groups_wait_for_the_job() -> None:
    found = want({"model": CLAIM})
    job = of(found.children, "Job")
    assert not found.model_ready
    assert not any(
        one["metadata"]["name"] == "qwen-gateway" and one["kind"] == "Deployment"
        for one in found.children
    )
    after = want({"model": CLAIM}, [*found.children[:-1], completed(job)])
    assert after.model_ready and of(after.children, "Deployment", "-gateway")


def test_another_token_or_image_makes_another_job_and_the_same_spec_the_same() -> None:
    def name(model: Any) -> Any:
        return child({"model": model}, "Job")["metadata"]["name"]

    assert name(CLAIM) == name(dict(CLAIM))
    assert name({**CLAIM, "tokenSecretRef": {"name": "new"}}) != name(CLAIM)


@pytest.mark.parametrize("case", ["minimal", "host-path", "two-nodes"])
def test_only_the_download_sees_the_token(case: str) -> None:
    model = {**CASES[case]["model"], "tokenSecretRef": {"name": "hub"}}
    spec = {**CASES[case], "model": model}
    workloads = [one for one in settled(spec).live.values() if one["kind"] in ("Deployment", "Job")]
    seen = 0
    for workload in [*workloads, rank_set(spec)]:
        containers = [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]
        for container in containers:
            mounted = any(m["name"] == "hub-token" for m in container["volumeMounts"])
            assert mounted == (container["name"] == "download")
            seen += mounted
    assert seen


def test_without_a_claim_every_pod_fetches_for_itself_and_services_fetch_no_weights() -> None:
    ranks, gateway = rank_set({"model": HUB}), child({"model": HUB}, "Deployment", "-gateway")
    for workload, suffix in ((ranks, ""), (gateway, "-tokenizer")):
        assert model_volume(workload) == {"emptyDir": {}}
        (init,) = pod(workload)["initContainers"]
        assert init["name"] == "download" and model_mounts(init)[0].get("readOnly") is None
        assert ("--only-tokenizer" in init["args"]) == bool(suffix)
        assert f"--revision={COMMIT}" in init["args"]
        container = main_container(workload)
        assert model_of(container) == f"/models/{FOLDER}/{COMMIT}{suffix}"
        assert model_mounts(container)[0]["readOnly"] is True
    assert "Job" not in [key.kind for key in settled({"model": HUB}).live]


def test_an_empty_dir_has_its_limit_and_a_folder_of_the_node_is_for_ranks_alone() -> None:
    spec = {"model": CASES["no-host-network"]["model"]}
    assert model_volume(rank_set(spec)) == {"emptyDir": {"sizeLimit": "40Gi"}}
    spec = CASES["host-path"]
    assert model_volume(rank_set(spec)) == {
        "hostPath": {"path": "/srv/models", "type": "Directory"}
    }
    assert model_volume(child(spec, "Deployment", "-gateway")) == {"emptyDir": {}}


@pytest.mark.parametrize(
    ("model", "path", "volume"),
    [
        (
            {"uri": "pvc://claim/a//b/"}, "/models/a/b",
            {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}},
        ),
        (
            {"uri": "pvc://claim"}, "/models",
            {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}},
        ),
        ({"uri": "oci://r.io/m:1"}, "/models", {"image": {"reference": "r.io/m:1"}}),
        (
            {"uri": "oci://r.io/m:1", "subPath": "models"}, "/models/models",
            {"image": {"reference": "r.io/m:1"}},
        ),
    ],
)  # fmt: skip
def test_a_claim_or_an_image_is_mounted_read_only_in_all_pods(
    model: Any, path: str, volume: Any
) -> None:
    spec = {"model": model}
    for workload in (rank_set(spec), child(spec, "Deployment", "-tokenizer")):
        container = main_container(workload)
        assert model_of(container) == path and model_volume(workload) == volume
        assert model_mounts(container) == [
            {"name": "model", "mountPath": "/models", "readOnly": True}
        ]
        assert "initContainers" not in pod(workload)


def test_a_path_in_the_containers_needs_no_volume() -> None:
    made = rank_set({"model": {"uri": "file:///models/qwen"}})
    assert model_of(main_container(made)) == "/models/qwen"
    assert not any(v["name"] == "model" for v in pod(made)["volumes"])


# --- a revision that moves ----------------------------------------------------------------------


def test_a_short_job_asks_for_the_commit_before_anything_runs() -> None:
    found = want(CASES["moving"])
    job = of(found.children, "Job")
    assert "--only-commit" in main_container(job)["args"]
    assert not any(one["kind"] == "ControllerRevision" for one in found.children)
    assert found.sizes == {} and not found.model_ready


@pytest.mark.parametrize(("code", "message"), [(1, COMMIT), (0, "main"), (0, "")])
def test_anything_but_a_commit_from_a_job_that_succeeded_is_no_answer(
    code: int, message: str
) -> None:
    job = of(want(CASES["moving"]).children, "Job")
    found = want(CASES["moving"], [job], pods=(job_pod(job, code, message),))
    assert of(found.children, "Job") == job


def test_its_answer_is_kept_with_the_revision_and_the_job_goes() -> None:
    first = want(CASES["moving"])
    job = of(first.children, "Job")
    found = want(CASES["moving"], [job], pods=(job_pod(job, 0, COMMIT + "\n"),))
    made = of(found.children, "ControllerRevision")
    assert made["metadata"]["annotations"][names.COMMIT] == COMMIT
    assert "Job" not in [one["kind"] for one in found.children]
    # The Job and its pod are gone, and the branch has moved: the revision stays what it was.
    later = want(CASES["moving"], found.children)
    assert later.children == found.children and later.model_ready


def test_restarted_at_asks_again() -> None:
    job = of(want(CASES["moving"]).children, "Job")
    found = want(CASES["moving"], [job], pods=(job_pod(job, 0, COMMIT),))
    again = want({**CASES["moving"], "restartedAt": "now"}, found.children)
    assert of(again.children, "Job")["metadata"]["name"] != job["metadata"]["name"]


def test_a_job_that_is_done_but_whose_answer_is_lost_is_done_again() -> None:
    job = of(want(CASES["moving"]).children, "Job")
    lost = want(CASES["moving"], [completed(job)])
    assert "Job" not in [one["kind"] for one in lost.children], "pruned, and then made anew"
    assert of(want(CASES["moving"]).children, "Job") == job


def test_a_moving_revision_of_a_claim_is_resolved_and_then_downloaded() -> None:
    model = {**CLAIM, "revision": "v1"}
    first = of(want({"model": model}).children, "Job")
    assert "--revision=v1" in main_container(first)["args"]
    found = desired(
        observe({"model": model}, [completed(first)], pods=(job_pod(first, 0, COMMIT),))
    )
    second = of(found.children, "Job")
    assert f"--revision={COMMIT}" in main_container(second)["args"]


# --- a claim that is filled ---------------------------------------------------------------------


def test_for_a_claim_that_is_filled_no_job_runs() -> None:
    found = want(CASES["filled-claim"])
    assert "Job" not in [one["kind"] for one in found.children] and found.model_ready
    pinned = {
        "uri": "hf://gpt2",
        "revision": COMMIT,
        "cache": CASES["filled-claim"]["model"]["cache"],
    }
    assert model_of(main_container(rank_set({"model": pinned}))) == f"/models/gpt2/{COMMIT}"


def looked_for(tmp_path: Path, files: list[str]) -> subprocess.CompletedProcess[str]:
    """What the gateway's container does with a claim that holds these files."""
    claim = tmp_path / "claim"
    claim.mkdir()
    for name in files:
        (claim / name).parent.mkdir(parents=True, exist_ok=True)
        (claim / name).touch()
    program = tmp_path / "minisgl"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    container = main_container(child(CASES["filled-claim"], "Deployment", "-gateway"))
    shell, flag, script, name = container["command"]
    return subprocess.run(
        [shell, flag, script.replace("/models", str(claim)), name, "gateway"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=20,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            ["gpt2/a/.minisgl-complete", "gpt2/b/x", "gpt2/c-tokenizer/.minisgl-complete"],
            "gpt2/a",
        ),
        (["config.json"], ""),
    ],
)  # fmt: skip
def test_pods_find_the_one_model_that_the_claim_holds(
    tmp_path: Path, files: list[str], found: str
) -> None:
    done = looked_for(tmp_path, files)
    assert done.stdout.strip() == f"gateway --model={tmp_path}/claim/{found}".rstrip("/")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "the claim holds neither"),
        (["gpt2/a/.minisgl-complete", "gpt2/b/.minisgl-complete"], "pin spec.model.revision"),
    ],
)
def test_a_claim_with_no_model_or_with_two_is_an_error_that_says_what_to_do(
    tmp_path: Path, files: list[str], said: str
) -> None:
    done = looked_for(tmp_path, files)
    assert done.returncode == 2 and said in done.stderr and done.stdout == ""
