"""Rank pods and the sets of groups."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from minisgl.cli.flags import Parser, from_args
from minisgl.cli.services import add_engine
from minisgl.config import EngineConfig
from minisgl_operator import names
from minisgl_operator.desired import group
from minisgl_operator.desired.parts import HEALTH
from tests.unit.operator.cases import CASES, HUB, SETTINGS, main_container, pod, rank_set

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*/minisglang.yaml"))
TP2 = {"model": HUB, "parallelism": {"tensor": 2}}
CPU = {"model": HUB, "engine": {"device": "cpu"}}


def args(spec: dict[str, Any], **more: Any) -> dict[str, str]:
    words = main_container(rank_set(spec, **more))["args"]
    assert words[0] == "engine"
    return dict(word.removeprefix("--").partition("=")[::2] for word in words[1:])


def engine_settings(spec: dict[str, Any]) -> EngineConfig:
    """What the engine makes of the command line of a rank's container."""
    parser = Parser(prog="minisgl")
    add_engine(parser)
    words = main_container(rank_set(spec))["args"]
    words = [word.replace("$(MINISGL_POD_INDEX)", "0") for word in words[1:]]
    found: EngineConfig = from_args(EngineConfig, parser.parse_args(words))
    return found


def shared_memory(spec: dict[str, Any]) -> tuple[Any, Any]:
    """The volume and the mount at /dev/shm."""
    made = rank_set(spec)
    (mount,) = [m for m in main_container(made)["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in pod(made)["volumes"] if v["name"] == mount["name"]]
    return volume, mount


def test_a_group_is_one_parallel_set_whose_pods_are_replaced_by_nobody_but_the_operator() -> None:
    made = rank_set({"model": HUB, "parallelism": {"tensor": 8, "gpusPerPod": 4}}, 3, 7)
    assert made["metadata"]["name"] == "qwen-g3-7"
    spec = made["spec"]
    assert spec["replicas"] == 2 and spec["podManagementPolicy"] == "Parallel"
    assert spec["updateStrategy"] == {"type": "OnDelete"} and spec["serviceName"] == "qwen-ranks"
    labels = spec["template"]["metadata"]["labels"]
    assert (labels[names.GROUP_INDEX], labels[names.EPOCH]) == ("3", "7")


def test_all_pods_of_all_groups_of_a_revision_have_one_template_but_for_two_labels() -> None:
    first, second = (
        rank_set(TP2, index, epoch)["spec"]["template"] for index, epoch in [(0, 1), (9, 4)]
    )
    assert first != second and group.blanked(first) == group.blanked(second)


def test_a_rank_learns_its_group_and_number_from_labels_of_its_pod() -> None:
    made = main_container(rank_set({"model": HUB, "parallelism": {"tensor": 4, "gpusPerPod": 2}}))
    fields = {
        v["name"]: v["valueFrom"]["fieldRef"]["fieldPath"] for v in made["env"] if "valueFrom" in v
    }
    assert fields["MINISGL_GROUP"] == "metadata.labels['minisglang.io/group']"
    assert fields["MINISGL_EPOCH"] == "metadata.labels['minisglang.io/epoch']"
    assert fields["MINISGL_POD_INDEX"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    given = args({"model": HUB, "parallelism": {"tensor": 4, "gpusPerPod": 2}})
    assert given["group"] == "g$(MINISGL_GROUP)-$(MINISGL_EPOCH)"
    assert given["pod-index"] == "$(MINISGL_POD_INDEX)" and given["ranks-per-pod"] == "2"
    assert given["tensor-parallel-size"] == "4" and given["service"] == "models.qwen.0f1e2d3c"


def test_engine_fields_that_are_unset_are_left_to_the_engine() -> None:
    assert not {"dtype", "max-seq-len", "memory-ratio", "page-size", "interface"} & args(TP2).keys()
    engine = {"dtype": "float16", "maxSeqLen": 4096, "memoryRatio": "0.85", "pageSize": 16}
    given = args({"model": HUB, "engine": engine})
    assert (given["dtype"], given["max-seq-len"]) == ("float16", "4096")
    assert (given["memory-ratio"], given["page-size"]) == ("0.85", "16")


def test_what_tunes_an_engine_for_a_gpu_reaches_the_command_line() -> None:
    engine = {
        "attentionBackend": "fa,fi", "pageSize": 64, "memoryRatio": "0.92", "dtype": "bfloat16",
        "maxRunningRequests": 512, "maxPrefillTokens": 16384,
        "extraArgs": ["--cuda-graph-max-bs=64", "--disable-pynccl", "--schedule=mixed"],
    }  # fmt: skip
    settings = engine_settings({"model": HUB, "engine": engine})
    assert settings == replace(
        settings,
        device="cuda", attention_backend="fa,fi", page_size=64, memory_ratio=0.92,
        dtype="bfloat16", max_running_requests=512, max_prefill_tokens=16384,
        cuda_graph_max_bs=64, pynccl=False, schedule="mixed",
    )  # fmt: skip


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.parent.name for file in EXAMPLES])
def test_the_ranks_of_every_example_have_a_command_that_the_engine_takes(file: Path) -> None:
    for one in yaml.safe_load_all(file.read_text()):
        if one["kind"] == "MiniSGLang":
            settings = engine_settings(one["spec"])
            assert settings.device == one["spec"].get("engine", {}).get("device", "cuda")


def test_further_flags_come_last() -> None:
    made = rank_set(
        {"model": HUB, "engine": {"extraArgs": ["--num-pages=9", "--cache-type=naive"]}}
    )
    assert main_container(made)["args"][-2:] == ["--num-pages=9", "--cache-type=naive"]


def test_h01_h02_every_group_takes_its_ports_from_the_declared_range_and_reserves_none() -> None:
    assert args(TP2)["port-range"] == "20000-20255"
    network = {"portRange": {"start": 30000, "size": 64}}
    assert args({"model": HUB, "network": network})["port-range"] == "30000-30063"
    assert "ports" not in main_container(rank_set(TP2))


def test_h05_an_interface_that_is_named_overrides_the_route() -> None:
    assert args({"model": HUB, "network": {"interface": "ens3"}})["interface"] == "ens3"


def test_h08_h09_no_rank_is_told_a_name_or_an_address_of_another() -> None:
    words = " ".join(main_container(rank_set(TP2))["args"])
    assert "qwen-ranks" not in words and "qwen-g0" not in words


def test_h28_ranks_are_told_the_revision_that_they_may_meet() -> None:
    made = rank_set(TP2)
    assert args(TP2)["revision"] == made["metadata"]["labels"][names.REVISION]
    assert args({**TP2, "restartedAt": "now"})["revision"] != args(TP2)["revision"]


def test_h03_dev_shm_of_the_rank_container_is_memory_with_a_bound() -> None:
    volume, _ = shared_memory(CPU)
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_h04_the_size_of_shared_memory_is_a_field_of_the_ranks_and_reaches_no_other_pod() -> None:
    spec = {**CPU, "ranks": {"sharedMemorySize": "3Gi"}}
    volume, _ = shared_memory(spec)
    assert volume["emptyDir"]["sizeLimit"] == "3Gi"
    (container,) = pod(rank_set(spec))["containers"]
    assert container["name"] == "rank"


def test_gpus_of_one_group_in_several_pods_share_a_folder_of_the_nodes_dev_shm() -> None:
    volume, mount = shared_memory(TP2)
    assert volume["hostPath"] == {"path": "/dev/shm", "type": "Directory"}
    assert mount["subPathExpr"] == "minisgl-0f1e2d3c-g$(MINISGL_GROUP)"


@pytest.mark.parametrize(
    "spec",
    [
        {"model": HUB},
        {**TP2, "engine": {"device": "cpu"}},
        {**TP2, "network": {"hostNetwork": False}},
        {**TP2, "ranks": {"sharedMemory": "EmptyDir"}},
        {"model": HUB, "parallelism": {"tensor": 8, "gpusPerPod": 8}},
    ],
)
def test_nobody_else_shares_memory_with_other_pods(spec: dict[str, Any]) -> None:
    volume, mount = shared_memory(spec)
    assert "emptyDir" in volume and "subPathExpr" not in mount


def test_shared_memory_on_the_host_may_be_asked_for() -> None:
    volume, _ = shared_memory({**CPU, "ranks": {"sharedMemory": "HostPath"}})
    assert "hostPath" in volume


def test_h07_on_the_nodes_network_the_names_of_the_cluster_resolve() -> None:
    shape = pod(rank_set(TP2))
    assert shape["hostNetwork"] is True and shape["dnsPolicy"] == "ClusterFirstWithHostNet"
    shape = pod(rank_set({**TP2, "network": {"hostNetwork": False}}))
    assert "hostNetwork" not in shape and "dnsPolicy" not in shape


def test_h11_there_is_no_runtime_class_unless_one_is_named() -> None:
    assert "runtimeClassName" not in pod(rank_set(TP2))
    own = {**TP2, "ranks": {"runtimeClassName": "mine"}}
    assert pod(rank_set(own))["runtimeClassName"] == "mine"
    by_default = SETTINGS.__class__(image="i", redis_image="r", runtime_class_name="nvidia")
    assert pod(rank_set(TP2, settings=by_default))["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in pod(rank_set(CPU, settings=by_default))


def test_each_pod_gets_its_gpus_and_tolerates_their_taint() -> None:
    made = rank_set({"model": HUB, "parallelism": {"tensor": 4, "gpusPerPod": 2}})
    assert main_container(made)["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert taint in pod(made)["tolerations"]


def test_a_slice_of_a_gpu_is_asked_for_by_its_name_beside_other_resources() -> None:
    ranks = {
        "gpuResourceName": "nvidia.com/mig-3g.40gb",
        "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "64Gi"}},
    }
    made = main_container(rank_set({"model": HUB, "ranks": ranks}))
    assert made["resources"] == {
        "requests": {"cpu": "4"}, "limits": {"memory": "64Gi", "nvidia.com/mig-3g.40gb": 1},
    }  # fmt: skip


def test_without_a_gpu_none_is_asked_for() -> None:
    made = rank_set(CPU)
    assert "resources" not in main_container(made)
    assert not any(t["key"] == "nvidia.com/gpu" for t in pod(made)["tolerations"])


def test_rdma_adds_its_resource_and_the_right_to_lock_memory() -> None:
    network = {"rdma": {"resourceName": "rdma/ib", "count": 2, "hca": "mlx5_0"}}
    made = main_container(rank_set({"model": HUB, "network": network}))
    assert made["resources"]["limits"] == {"nvidia.com/gpu": 1, "rdma/ib": 2}
    assert made["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {"name": "NCCL_IB_HCA", "value": "mlx5_0"} in made["env"]


def test_ranks_stay_on_a_node_that_does_not_answer_until_the_operator_decides() -> None:
    taints = [t for t in pod(rank_set(TP2))["tolerations"] if t["key"].startswith("node.")]
    assert [t["key"].rpartition("/")[2] for t in taints] == ["not-ready", "unreachable"]
    assert not any("tolerationSeconds" in t for t in taints)


def test_pods_of_one_group_and_life_prefer_one_node() -> None:
    affinity = pod(rank_set(TP2, 1, 5))["affinity"]["podAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert labels[names.GROUP_INDEX] == "1" and labels[names.EPOCH] == "5"
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert "affinity" not in pod(rank_set({"model": HUB}))


def test_with_a_topology_key_they_must_share_its_value_beside_the_users_own_terms() -> None:
    own = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    ranks = {"topologyKey": "rack", "affinity": {"podAffinity": {required: [own]}}}
    affinity = pod(rank_set({**TP2, "ranks": ranks}))["affinity"]
    first, second = affinity["podAffinity"][required]
    assert first == own and second["topologyKey"] == "rack"


def test_avoided_nodes_are_out_of_every_alternative_that_the_user_gives() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = [
        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": [kind]}]} for kind in "ab"
    ]
    ranks = {"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": terms}}}}
    made = rank_set({**TP2, "ranks": ranks}, avoided=["n2", "n1"])
    found = pod(made)["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    out = [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in ("n1", "n2")]
    assert found == [{**term, "matchFields": out} for term in terms]
    without = rank_set({**TP2, "ranks": ranks})["spec"]["template"]
    assert group.blanked(made["spec"]["template"]) == group.blanked(without)


def test_what_decides_where_ranks_run_passes_through() -> None:
    shape = pod(rank_set(CASES["two-nodes"]))
    assert shape["schedulerName"] == "volcano" and shape["priorityClassName"] == "high"
    assert shape["nodeSelector"] == {"pool": "h200"}
    own = {"key": "spot", "operator": "Exists"}
    assert own in pod(rank_set({"model": HUB, "ranks": {"tolerations": [own]}}))["tolerations"]


def test_h31_the_grace_of_the_ranks_passes_through_and_the_drain_fits_into_it() -> None:
    spec = {"model": HUB, "ranks": {"terminationGracePeriodSeconds": 77}}
    assert pod(rank_set(spec))["terminationGracePeriodSeconds"] == 77
    assert args(spec)["drain-seconds"] == "67"
    spec = {"model": HUB, "ranks": {"terminationGracePeriodSeconds": 3}}
    assert args(spec)["drain-seconds"] == "0"


def test_h39_a_model_may_load_for_as_long_as_the_start_up_limit_says() -> None:
    made = main_container(
        rank_set({"model": HUB, "failurePolicy": {"startupTimeoutSeconds": 7000}})
    )
    probe = made["startupProbe"]
    assert 7000 < probe["periodSeconds"] * probe["failureThreshold"] <= 7100
    assert "ready" in str(probe) and "ready" not in str(made["livenessProbe"])


@pytest.mark.parametrize(
    ("files", "alive", "serves"),
    [
        ({"live": 1, "ready": 0}, True, True),
        ({"live": 40, "ready": 0}, True, False),
        ({"live": 70, "ready": 0}, False, False),
        ({"live": 1}, True, False),
        ({}, False, False),
        ({"ready": 0}, False, False),
    ],
)
def test_probes_see_a_loop_that_stands_still_and_a_group_that_does_not_serve(
    tmp_path: Path, files: dict[str, int], alive: bool, serves: bool
) -> None:
    made = main_container(rank_set(CPU))  # heartbeatTimeoutSeconds: 30
    assert results(made, tmp_path, files) == (alive, serves, serves)


@pytest.mark.parametrize(
    ("files", "serves"),
    [
        ({"live.2": 1, "live.3": 1, "ready.2": 0, "ready.3": 0}, True),
        ({"live.2": 1, "live.3": 1, "ready.2": 0}, False),
        ({"live.2": 1, "ready.2": 0, "ready.3": 0}, False),
        ({"live.2": 1, "live.3": 99, "ready.2": 0, "ready.3": 0}, False),
    ],
)
def test_a_pod_of_several_ranks_serves_when_all_of_them_do(
    tmp_path: Path, files: dict[str, int], serves: bool
) -> None:
    made = rank_set({**CPU, "parallelism": {"tensor": 4, "gpusPerPod": 2}})
    assert results(main_container(made), tmp_path, files)[1] == serves


def test_a_container_that_starts_again_believes_nothing_of_its_earlier_life(tmp_path: Path) -> None:
    made = main_container(rank_set(CPU))
    (tmp_path / "ready").touch()
    (tmp_path / "minisgl").write_text(
        f'#!/bin/sh\necho "$@"; ls {tmp_path}/ready {tmp_path}/live\n'
    )
    (tmp_path / "minisgl").chmod(0o755)
    folder = tmp_path / "health"
    folder.mkdir()
    for name in ("ready", "live"):
        (folder / name).write_text("1\n")
    shell, flag, script, name = made["command"]
    done = subprocess.run(
        [shell, flag, script.replace(HEALTH, str(folder)), name, "engine", "--x=a b"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == "engine --x=a b"
    assert list(folder.iterdir()) == []


def results(container: Any, folder: Path, files: dict[str, int]) -> tuple[bool, bool, bool]:
    """Whether the liveness, readiness and start-up probes succeed; {file: its age in seconds}."""
    uptime = int(float(Path("/proc/uptime").read_text().split()[0]))
    for name, age in files.items():
        (folder / name).write_text(f"{uptime - age}\n")
    found = []
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        command = [w.replace(HEALTH, str(folder)) for w in container[probe]["exec"]["command"]]
        done = subprocess.run(command, capture_output=True, timeout=20)
        found.append(done.returncode == 0)
    return found[0], found[1], found[2]
