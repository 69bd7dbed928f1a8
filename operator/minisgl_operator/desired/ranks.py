"""The pods of TP groups: what a revision's template holds.

All that differs from pod to pod comes from labels, by the downward API, so that every pod of every
group of a revision has one and the same template, but for these labels.
"""

import math
from collections.abc import Mapping
from typing import Any

from minisgl_operator import names
from minisgl_operator.api import MiniSGLang
from minisgl_operator.desired import group, model, parts
from minisgl_operator.desired.bus import connection
from minisgl_operator.desired.overlay import lay_over, lay_over_init
from minisgl_operator.observed import Manifest, Settings

CONTAINER = "rank"
STARTUP_PERIOD = 2
STARTUP_MARGIN = 60
"""Seconds by which the start-up probe is later than the operator, which replaces the whole group:
a kubelet that was first would restart ranks one by one."""
_GROUP, _EPOCH, _POD_INDEX = "MINISGL_GROUP", "MINISGL_EPOCH", "MINISGL_POD_INDEX"


def template(
    obj: MiniSGLang, settings: Settings, revision: str, image: str, commit: str | None
) -> Manifest:
    """The pod template of a revision, with empty labels of group and epoch."""
    spec = obj.spec
    bus = connection(obj)
    source = model.files(obj, image, commit, weights=True)
    volumes, mounts = parts.scratch(health=True)
    shm_volume, shm_mount = _shared_memory(obj)
    gpu = spec.ranks.gpu_resource_name or settings.gpu_resource_name
    cuda = spec.engine.device == "cuda"
    container = parts.container(
        obj, CONTAINER, image, spec.ranks.resources,
        {
            **parts.command(
                ["engine", *_flags(obj, bus.flags, source.path, revision), *spec.engine.extra_args],
                health=True, find=source.find,
            ),
            "env": _env(obj),
            "volumeMounts": [*mounts, shm_mount, *bus.mounts, *source.mounts],
            **_probes(obj),
        },
    )  # fmt: skip
    if cuda:
        _limit(container, gpu, spec.parallelism.gpus_per_pod)
    if spec.network.rdma is not None:
        _limit(container, spec.network.rdma.resource_name, spec.network.rdma.count)
        capabilities = {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        container["securityContext"] = {**parts.SECURE, "capabilities": capabilities}
    gpu_taint = {"key": gpu, "operator": "Exists", "effect": "NoSchedule"}
    pod = parts.pod_template(
        obj, "rank",
        {
            "hostNetwork": spec.network.host_network or None,
            "dnsPolicy": "ClusterFirstWithHostNet" if spec.network.host_network else None,
            "terminationGracePeriodSeconds": spec.ranks.termination_grace_period_seconds,
            "initContainers": source.init,
            "containers": [container],
            "volumes": [*volumes, shm_volume, *bus.volumes, *source.volumes],
            # The operator decides what a lost node means, and sooner than the taint manager.
            "tolerations": [
                *parts.away(None), *([gpu_taint] if cuda else []), *spec.ranks.tolerations,
            ],
            "nodeSelector": spec.ranks.node_selector,
            "affinity": _affinity(obj),
            "schedulerName": spec.ranks.scheduler_name,
            "priorityClassName": spec.ranks.priority_class_name,
            "runtimeClassName": spec.ranks.runtime_class_name
            or (settings.runtime_class_name if cuda else None) or None,
        },
    )  # fmt: skip
    pod["metadata"]["labels"] |= {names.REVISION: revision, **group.labels("", "")}
    pod["spec"] = lay_over_init(pod["spec"], model.CONTAINER, spec.model.download.pod_template)
    return lay_over(pod, spec.ranks.pod_template)


def _flags(
    obj: MiniSGLang, bus: Mapping[str, object], path: str | None, revision: str
) -> list[str]:
    """Flags of `minisgl engine`: fields that are set, and what only the operator knows."""
    spec = obj.spec
    engine = spec.engine
    grace = spec.ranks.termination_grace_period_seconds
    return parts.flags(
        {
            **bus,
            "group": f"g$({_GROUP})-$({_EPOCH})",
            "pod-index": f"$({_POD_INDEX})",
            "pod": "$(POD_NAME)",
            "ranks-per-pod": spec.parallelism.gpus_per_pod,
            "tensor-parallel-size": spec.parallelism.tensor,
            "revision": revision,
            "model": path,
            "device": engine.device,
            "dtype": engine.dtype,
            "memory-ratio": engine.memory_ratio,
            "max-running-requests": engine.max_running_requests,
            "max-seq-len": engine.max_seq_len,
            "max-prefill-tokens": engine.max_prefill_tokens,
            "page-size": engine.page_size,
            "attention-backend": engine.attention_backend,
            "interface": spec.network.interface,
            "port-range": spec.network.port_range,
            "heartbeat-timeout-seconds": spec.failure_policy.heartbeat_timeout_seconds,
            "drain-seconds": parts.drain_seconds(grace),
            "health-dir": parts.HEALTH,
        }
    )


def _env(obj: MiniSGLang) -> list[Manifest]:
    rdma = obj.spec.network.rdma
    caches = {
        "TRITON_CACHE_DIR": f"{parts.CACHE}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{parts.CACHE}/inductor",
    }
    hca = {"NCCL_IB_HCA": rdma.hca} if rdma and rdma.hca else {}
    return [
        parts.POD_NAME,
        parts.field_env(_GROUP, f"metadata.labels['{names.GROUP_INDEX}']"),
        parts.field_env(_EPOCH, f"metadata.labels['{names.EPOCH}']"),
        parts.field_env(_POD_INDEX, f"metadata.labels['{names.POD_INDEX}']"),
        *parts.env({**parts.CACHE_ENV, **caches, **parts.OFFLINE_ENV, **hca}),
    ]


def _probes(obj: MiniSGLang) -> Manifest:
    """Liveness knows the own loop only: a model may load, and a peer may be away, for long."""
    policy, workers = obj.spec.failure_policy, obj.spec.parallelism.gpus_per_pod
    silence = policy.heartbeat_timeout_seconds
    attempts = math.ceil((policy.startup_timeout_seconds + STARTUP_MARGIN) / STARTUP_PERIOD)
    serves = parts.serves(silence, workers)
    return {
        "startupProbe": parts.probe(serves, STARTUP_PERIOD, attempts, parts.CLEAN_SECONDS),
        "readinessProbe": parts.probe(serves, 5, 2),
        # A rank ends itself after one silence. This is for one that cannot.
        "livenessProbe": parts.probe(parts.alive(2 * silence, workers), 10, 3),
    }


def _limit(container: Manifest, resource: str, amount: int) -> None:
    """Device plugins want requests and limits to be equal, which a limit alone is."""
    resources = container.get("resources", {})
    limits = {**resources.get("limits", {}), resource: amount}
    container["resources"] = {**resources, "limits": limits}


def _shared_memory(obj: MiniSGLang) -> tuple[Manifest, Manifest]:
    """The volume and mount at /dev/shm. NCCL uses NVLink between pods that share it."""
    spec = obj.spec
    mount: Manifest = {"name": "shm", "mountPath": "/dev/shm"}
    shared = spec.ranks.shared_memory == "HostPath" or (
        spec.ranks.shared_memory == "Auto"
        and spec.parallelism.pods > 1
        and spec.engine.device == "cuda"
        and spec.network.host_network
    )
    if not shared:
        limit = {"medium": "Memory", "sizeLimit": spec.ranks.shared_memory_size}
        return {"name": "shm", "emptyDir": limit}, mount
    # The kubelet makes this folder with the mode of /dev/shm: writable, and this group's alone.
    mount["subPathExpr"] = f"minisgl-{obj.uid[:8]}-g$({_GROUP})"
    return {"name": "shm", "hostPath": {"path": "/dev/shm", "type": "Directory"}}, mount


def _affinity(obj: MiniSGLang) -> Manifest:
    """The user's affinity, with the term that holds a group together."""
    ranks = obj.spec.ranks
    affinity: dict[str, Any] = dict(ranks.affinity)
    given = affinity.get("podAffinity") or {}
    if obj.spec.parallelism.pods == 1 or not isinstance(given, dict):
        return affinity  # the server refuses what is no object, and says so
    pods: dict[str, Any] = dict(given)
    labels = {names.OBJECT_UID: obj.uid, **group.labels("", "")}
    term: Manifest = {
        "labelSelector": {"matchLabels": labels},
        "topologyKey": ranks.topology_key or "kubernetes.io/hostname",
    }
    if ranks.topology_key:
        kind, entry = "requiredDuringSchedulingIgnoredDuringExecution", term
    else:
        kind = "preferredDuringSchedulingIgnoredDuringExecution"
        entry = {"weight": 100, "podAffinityTerm": term}
    held = pods.get(kind) or []
    pods[kind] = [*held, entry] if isinstance(held, list) else held
    return {**affinity, "podAffinity": pods}
