"""What children have in common: metadata, pods, containers, probes.

Every pod satisfies the Pod Security level `restricted`, but for what hostNetwork and hostPath take
from rank pods. No pod gets a service account's token.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_operator import api, names
from minisgl_operator.api import MiniSGLang, Resources
from minisgl_operator.observed import Manifest

USER = 1000
"""User and group of every container; the images are built for it."""
SECRET_MODE = 0o440
CACHE = "/cache"
"""An emptyDir of every pod: the root file system is read-only."""
HEALTH = "/run/minisgl"
"""Where a worker writes the files that the probes read (`--health-dir`)."""
CLEAN_SECONDS = 1
"""Before the first probe: time to remove what an earlier life of the container left in HEALTH."""
AWAY_SECONDS = 10
"""How long a pod that is not a rank stays bound to a node that does not answer."""
_AWAY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")

SECURE = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Security context of a container."""
CACHE_ENV = {
    "HOME": CACHE,
    "XDG_CACHE_HOME": f"{CACHE}/xdg",
    "HF_HOME": f"{CACHE}/huggingface",
}
NO_GPU_ENV = {"NVIDIA_VISIBLE_DEVICES": "void"}
"""Images made for CUDA ask for all GPUs of the node, and for a driver: where NVIDIA's runtime is
the default, a pod that requests no GPU would see those of others."""
OFFLINE_ENV = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Only a download speaks to the hub."""


def child(obj: MiniSGLang, api_version: str, kind: str, name: str, role: str) -> Manifest:
    """A child's kind and metadata: labels, and the object as its controller."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": obj.namespace,
            "labels": names.role_labels(obj, role),
            "ownerReferences": [
                {
                    "apiVersion": api.API_VERSION,
                    "kind": api.KIND,
                    "name": obj.name,
                    "uid": obj.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
    }


def without_empty(fields: Mapping[str, Any]) -> Manifest:
    """The fields that say something: what is None or an empty structure is left out."""
    return {k: v for k, v in fields.items() if v is not None and v != {} and v != []}


def pod_template(obj: MiniSGLang, role: str, spec: Mapping[str, Any]) -> Manifest:
    """A pod template of a role with what all pods have; `spec` adds and replaces."""
    return {
        "metadata": {"labels": names.role_labels(obj, role)},
        "spec": without_empty(
            {
                "automountServiceAccountToken": False,
                # Else each Service of the namespace is in the environment of every container.
                "enableServiceLinks": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": USER,
                    "runAsGroup": USER,
                    "fsGroup": USER,
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "imagePullSecrets": [{"name": one.name} for one in obj.spec.image_pull_secrets],
                "tolerations": away(AWAY_SECONDS),
                **spec,
            }
        ),
    }


def away(seconds: int | None) -> list[Manifest]:
    """Tolerations of a node that does not answer; for ever if `seconds` is None."""
    limit = {} if seconds is None else {"tolerationSeconds": seconds}
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", **limit} for key in _AWAY_TAINTS
    ]


def container(
    obj: MiniSGLang, name: str, image: str, resources: Resources, fields: Mapping[str, Any]
) -> Manifest:
    """A container of one of our images, with what all have; `fields` adds and replaces."""
    return without_empty(
        {
            "name": name,
            "image": image,
            "imagePullPolicy": obj.spec.image_pull_policy,
            "securityContext": SECURE,
            # The last lines of the log are what the status shows of a container that failed.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": api.changed(resources),
            **fields,
        }
    )


def env(values: Mapping[str, str]) -> list[Manifest]:
    """Environment variables as a container lists them."""
    return [{"name": name, "value": value} for name, value in values.items()]


def field_env(name: str, path: str) -> Manifest:
    """An environment variable with a field of the pod, such as metadata.name."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


POD_NAME = field_env("POD_NAME", "metadata.name")


def flags(values: Mapping[str, object]) -> list[str]:
    """Command-line flags; those that are None are left out."""
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def scratch(health: bool) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts for what may be written: caches, /tmp, and the files of the probes."""
    places = {"cache": CACHE, "tmp": "/tmp"} | ({"health": HEALTH} if health else {})
    volumes: list[Manifest] = [{"name": name, "emptyDir": {}} for name in places]
    if health:  # in memory, so that a slow disk stops no heartbeat
        volumes[-1]["emptyDir"] = {"medium": "Memory", "sizeLimit": "1Mi"}
    return volumes, [{"name": name, "mountPath": path} for name, path in places.items()]


def command(args: Sequence[str], *, health: bool, find: str | None = None) -> Manifest:
    """`command` and `args` of a container that runs minisgl.

    `health`: first removes the files that an earlier life of the container left for the probes.
    `find`: shell code that puts the model's folder into $model, where it is not known beforehand.
    """
    if not health and find is None:
        return {"command": ["minisgl"], "args": list(args)}
    lines = [f"rm -f {HEALTH}/*"] if health else []
    if find is None:
        lines.append('exec minisgl "$@"')
    else:
        lines += [find, 'exec minisgl "$@" "--model=$model"']
    return {"command": ["sh", "-c", "\n".join(lines), "minisgl"], "args": list(args)}


_ALIVE = """\
read up rest < /proc/uptime
count=0
for file in {health}/live*; do
  [ -e "$file" ] || {{ echo "it has not begun to work yet"; exit 1; }}
  read turn < "$file" && [ $((${{up%%.*}} - turn)) -le {seconds} ] || exit 1
  count=$((count + 1))
done
[ $count -ge {workers} ]"""
_SERVES = """\
count=0
for file in {health}/ready*; do
  [ -e "$file" ] || {{ echo "it does not serve yet, or drains"; exit 1; }}
  count=$((count + 1))
done
[ $count -ge {workers} ] || exit 1
"""


def alive(seconds: int, workers: int = 1) -> Manifest:
    """A probe: the loop of each worker in the container turned within so many seconds."""
    return _shell(_ALIVE.format(health=HEALTH, seconds=seconds, workers=workers))


def serves(seconds: int, workers: int = 1) -> Manifest:
    """A probe: each worker in the container is alive and says that it serves."""
    script = _SERVES + _ALIVE
    return _shell(script.format(health=HEALTH, seconds=seconds, workers=workers))


def _shell(script: str) -> Manifest:
    return {"exec": {"command": ["sh", "-c", script]}}


def probe(how: Manifest, period: int, failures: int, delay: int = 0) -> Manifest:
    """A probe that runs each `period` seconds and fails after so many `failures` in a row."""
    return without_empty(
        {
            **how,
            "initialDelaySeconds": delay or None,
            "periodSeconds": period,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }
    )


def drain_seconds(grace: int) -> int:
    """What a worker gets to finish its work: the pod's grace without what precedes and follows."""
    return max(0, grace - 10)


def quoted(text: str) -> str:
    """`text` as one word of a shell."""
    return shlex.quote(text)
