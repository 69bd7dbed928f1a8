"""spec.*.podTemplate, laid over the pod that the operator writes.

Containers, init containers, volumes and env merge by name, volume mounts by mountPath; tolerations
and pull secrets are appended; all else replaces, as the CRD says. So does what should be a list and
is none: the CRD knows little of these fields, and the server's refusal says what is wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_operator.api import PodTemplate
from minisgl_operator.observed import Manifest


def lay_over(template: Manifest, user: PodTemplate) -> Manifest:
    """The operator's pod template with the user's over it. Our own labels stay."""
    metadata = dict(template["metadata"])
    if user.metadata.labels:
        metadata["labels"] = {**user.metadata.labels, **metadata["labels"]}
    if user.metadata.annotations:
        metadata["annotations"] = {**metadata.get("annotations", {}), **user.metadata.annotations}
    spec = dict(template["spec"])
    for key, value in user.spec.items():
        if not isinstance(value, list):
            spec[key] = value
        elif key in ("containers", "initContainers"):
            spec[key] = _by_key(spec.get(key, []), value, "name", merge=_container)
        elif key in ("volumes", "imagePullSecrets"):
            spec[key] = _by_key(spec.get(key, []), value, "name")
        elif key == "tolerations":
            spec[key] = [*spec.get(key, []), *value]
        else:
            spec[key] = value
    return {"metadata": metadata, "spec": spec}


def lay_over_init(pod: Manifest, name: str, user: PodTemplate) -> Manifest:
    """A pod spec whose init container `name` takes what the user says of a container so called,
    with the volumes that it may mount; the rest of the template is about another pod."""
    said = [one for one in user.spec.get("containers", []) if one["name"] == name]
    if not said or all(one["name"] != name for one in pod.get("initContainers", [])):
        return pod
    return {
        **pod,
        "initContainers": _by_key(pod["initContainers"], said, "name", merge=_container),
        "volumes": _by_key(pod.get("volumes", []), user.spec.get("volumes", []), "name"),
    }


def _container(ours: Manifest, theirs: Manifest) -> Manifest:
    merged = {**ours, **theirs}
    for key, by in (("env", "name"), ("volumeMounts", "mountPath")):
        if key in ours and isinstance(theirs.get(key), list):
            merged[key] = _by_key(ours[key], theirs[key], by)
    return merged


def _by_key(
    ours: Sequence[Manifest], theirs: Sequence[Manifest], key: str, merge: Any = None
) -> list[Manifest]:
    """Both lists; where an element of `theirs` has the key of one of `ours`, it replaces it or is
    merged into it. New ones come last."""
    result: dict[Any, Manifest] = {one[key]: one for one in ours}
    for index, one in enumerate(theirs):
        # One without its key is invalid; the server says so better than we could.
        name: Any = one.get(key) if isinstance(one, Mapping) else None
        name = name if isinstance(name, str) else ("invalid", index)
        result[name] = merge(result[name], one) if merge and name in result else one
    return list(result.values())
