"""Objects of every shape, and what the operator sees of them.

`python -m tests.unit.operator.cases` writes the golden manifests anew; read the difference.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from minisgl_operator import api, names
from minisgl_operator.desired import desired, group_set
from minisgl_operator.observed import Desired, Key, Manifest, Observed, Settings

GOLDEN = Path(__file__).with_name("golden")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
UID = "0f1e2d3c-4b5a-4697-8877-665544332211"
SETTINGS = Settings(
    image="ghcr.io/minisglang/minisglang-engine-{device}:1.0.0",
    redis_image="docker.io/library/redis:7.4",
    operator_namespace="minisglang-system",
    gateway_api=True,
)
HUB = {"uri": "hf://Qwen/Qwen3-8B", "revision": COMMIT}
CLAIM = {**HUB, "cache": {"persistentVolumeClaim": {"claimName": "models", "subPath": "hub"}}}

CASES: dict[str, dict[str, Any]] = {
    "minimal": {"model": HUB},
    "tp2-cpu": {
        "model": {"uri": "pvc://models/SmolLM2-135M-Instruct"},
        "parallelism": {"tensor": 2},
        "engine": {"device": "cpu", "dtype": "float32", "extraArgs": ["--num-pages=2048"]},
        "ingress": {"host": "llm.example.com", "path": "/smol", "tlsSecretName": "cert"},
    },
    "two-nodes": {
        "model": {**CLAIM, "servedName": "big", "tokenSecretRef": {"name": "hub"}},
        "replicas": 2,
        "image": "registry.example.com/minisglang:2",
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [{"name": "registry"}],
        "parallelism": {"tensor": 16, "gpusPerPod": 8},
        "network": {
            "interface": "eth0",
            "portRange": {"start": 30000, "size": 64},
            "rdma": {"resourceName": "rdma/ib", "count": 8, "hca": "mlx5"},
        },
        "gateway": {"replicas": 3, "apiKeysSecretRef": {"name": "keys"}},
        "tokenizer": {"replicas": 2},
        "detokenizer": {"replicas": 2},
        "ranks": {
            "resources": {"requests": {"cpu": 16}, "limits": {"memory": "512Gi"}},
            "topologyKey": "example.com/rack",
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
            "priorityClassName": "high",
            "nodeSelector": {"pool": "h200"},
        },
        "redis": {"managed": {"tlsSecretName": "redis-tls", "storage": {"size": "4Gi"}}},
        "httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]},
    },
    "external-redis": {
        "model": {"uri": "file:///models/qwen"},
        "redis": {
            "external": {
                "address": "[2001:db8::1]:6380",
                "database": 3,
                "username": "team a",
                "passwordSecretRef": {"name": "bus", "key": "pass"},
                "tls": True,
                "caSecretRef": {"name": "bus-ca"},
            }
        },
    },
    "no-host-network": {
        "model": {**HUB, "cache": {"emptyDir": {"sizeLimit": "40Gi"}}},
        "parallelism": {"tensor": 2},
        "network": {"hostNetwork": False},
        "ranks": {"sharedMemorySize": "4Gi"},
    },
    "host-path": {
        "model": {**HUB, "cache": {"hostPath": {"path": "/srv/models"}}},
        "parallelism": {"tensor": 4, "gpusPerPod": 4},
    },
    "image-volume": {"model": {"uri": "oci://registry.example.com/qwen:1", "subPath": "models"}},
    "filled-claim": {
        "model": {
            "uri": "hf://gpt2",
            "cache": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        }
    },
    "moving": {"model": {"uri": "hf://Qwen/Qwen3-8B"}},
    "suspended": {"model": HUB, "replicas": 4, "suspend": True},
    "no-groups": {"model": HUB, "replicas": 0},
    "pod-templates": {
        "model": HUB,
        "gateway": {
            "podTemplate": {
                "metadata": {"labels": {"team": "a"}, "annotations": {"scrape": "yes"}},
                "spec": {
                    "containers": [
                        {"name": "gateway", "env": [{"name": "TZ", "value": "UTC"}]},
                        {
                            "name": "proxy",
                            "image": "proxy:1",
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "capabilities": {"drop": ["ALL"]},
                            },
                        },
                    ],
                    "priorityClassName": "web",
                },
            }
        },
        "ranks": {
            "podTemplate": {
                "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}},
                "spec": {
                    "tolerations": [{"key": "spot", "operator": "Exists"}],
                    "volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "9Gi"}}],
                },
            }
        },
    },
}


def observe(
    spec: Mapping[str, Any],
    live: Iterable[Manifest] = (),
    settings: Settings = SETTINGS,
    password: str | None = "not-a-secret",
    **more: Any,
) -> Observed:
    """An object with this spec, and the children that live."""
    metadata = {"name": "qwen", "namespace": "models", "uid": UID}
    return Observed(
        obj=api.parse({"metadata": metadata, "spec": dict(spec)}),
        settings=settings,
        now=0.0,
        wall=1_800_000_000.0,
        live={Key.of(one): one for one in live},
        redis_password=password,
        **more,
    )


def want(spec: Mapping[str, Any], live: Iterable[Manifest] = (), **more: Any) -> Desired:
    """The desired children of an object."""
    return desired(observe(spec, live, **more))


def completed(job: Manifest) -> Manifest:
    """A Job that has succeeded."""
    return {**job, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}


def job_pod(job: Manifest, code: int, message: str) -> Manifest:
    """The pod of a Job, which has ended with this message."""
    labels = {"batch.kubernetes.io/job-name": job["metadata"]["name"], names.COMPONENT: "model"}
    ended = {"terminated": {"exitCode": code, "message": message}}
    return {
        "metadata": {"name": "pod", "labels": labels},
        "status": {"containerStatuses": [{"name": "download", "state": ended}]},
    }


def settled(spec: Mapping[str, Any], **more: Any) -> Observed:
    """The object with all of its children, after its Jobs have succeeded."""
    live: list[Manifest] = []
    pods: list[Manifest] = []
    for _ in range(3):
        children = want(spec, live, pods=tuple(pods), **more).children
        live = [completed(one) if one["kind"] == "Job" else one for one in children]
        pods = [job_pod(one, 0, COMMIT) for one in live if one["kind"] == "Job"]
    return observe(spec, live, **more)


def of(children: Iterable[Manifest], kind: str, name: str = "") -> Manifest:
    """The one child of a kind, with a name that ends so."""
    found = [m for m in children if m["kind"] == kind and m["metadata"]["name"].endswith(name)]
    assert len(found) == 1, [Key.of(m) for m in children]
    return found[0]


def child(spec: Mapping[str, Any], kind: str, name: str = "", **more: Any) -> Manifest:
    """That child of an object with all of its children."""
    return of(desired(settled(spec, **more)).children, kind, name)


def rank_set(spec: Mapping[str, Any], index: int = 0, epoch: int = 1, **more: Any) -> Manifest:
    """The set of one group."""
    avoided: list[str] = more.pop("avoided", [])
    observed = settled(spec, **more)
    found = desired(observed)
    size = found.sizes[found.revision]
    return group_set(observed, found.revision, index, epoch, size, avoided, {})


def pod(workload: Manifest) -> Any:
    """The pod spec of a Deployment, a StatefulSet or a Job."""
    return workload["spec"]["template"]["spec"]


def main_container(workload: Manifest) -> Any:
    """Its container, where there is one."""
    (container,) = pod(workload)["containers"]
    return container


def all_of(spec: Mapping[str, Any]) -> list[Manifest]:
    """All children of an object, and the set of one group where it has groups."""
    observed = settled(spec)
    found = desired(observed)
    sets = []
    if found.sizes and observed.obj.group_indices_wanted:
        sets = [rank_set(spec, epoch=7, avoided=["node-3"])]
    return [*found.children, *sets]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def golden(spec: Mapping[str, Any]) -> str:
    """All children as YAML, without what all of them have, and what a set shows as well."""
    manifests = []
    for one in all_of(spec):
        if one["kind"] == "ControllerRevision":
            one = {**one, "data": "the template of the StatefulSet, with empty labels"}
        manifests.append(_without_common(one))
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=100)


def _without_common(value: Any) -> Any:
    common = (
        "ownerReferences",
        "namespace",
        names.APPLIED,
        *names.common(observe(CASES["minimal"]).obj),
    )
    if isinstance(value, Mapping):
        kept = {k: _without_common(v) for k, v in value.items() if k not in common}
        return {k: v for k, v in kept.items() if v != {} or value[k] == {}}
    if isinstance(value, list):
        return [_without_common(one) for one in value]
    return value


GOLDEN_CASES = ("minimal", "tp2-cpu", "two-nodes")

if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in GOLDEN_CASES:
        (GOLDEN / f"{name}.yaml").write_text(golden(CASES[name]))
