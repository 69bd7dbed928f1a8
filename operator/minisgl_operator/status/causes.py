"""Why something does not work: each trouble of an object, with the reason that conditions name and
a sentence that names the child and carries the words of who knows (scheduler, kubelet, server)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from minisgl_operator import names
from minisgl_operator.drift import reason_of
from minisgl_operator.observed import Key, Manifest, Refusal
from minisgl_operator.plan.failure import first_line
from minisgl_operator.plan.groups import Life, Survey
from minisgl_operator.plan.pods import DOWNLOAD, RANK, STUCK_SECONDS, Pod, keepers
from minisgl_operator.plan.refused import without_pods
from minisgl_operator.times import seconds

_PULL = (
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RegistryUnavailable",
)
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_BACK_OFF = "CrashLoopBackOff"
_MOUNT = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_ORDER = (
    "NameConflict",
    "InvalidPodTemplate",
    "PodSecurityForbidden",
    "QuotaExceeded",
    "Forbidden",
    "NodeLost",
    "RestartBudgetExhausted",
    "ImagePullFailed",
    "VolumeUnavailable",
    "InsufficientCapacity",
    "BackOff",
)
"""What to mend first."""
_MOMENTARY = re.compile("failed to sync .* cache|no relationship found between node|not registered")
"""Of mounts, in the second in which a kubelet learns of a pod; it tries them again at once."""
_DOWNLOAD_CODES = {3: "TokenRejected", 4: "NoSpace"}
"""Exit codes of `minisgl download`."""


@dataclass(frozen=True, slots=True)
class Trouble:
    reason: str
    message: str


def troubles(survey: Survey) -> list[Trouble]:
    """All of them, what to mend first in front; the same one of many pods is told once."""
    found = [*_names(survey), *_refusals(survey), *_kept(survey)]
    if not survey.observed.obj.spec.suspend:
        found += [*_nodes(survey), *_claims(survey), *_pods(survey), *_groups(survey)]
    seen: set[str] = set()
    first = []
    for trouble in sorted(found, key=lambda t: _ORDER.index(t.reason)):
        if trouble.message not in seen:
            seen.add(trouble.message)
            first.append(trouble)
    return first


def unscheduled(survey: Survey, pod: Pod) -> str:
    """What the scheduler says of a pod without a node; empty if it has one.

    A pod that is gated, or that nobody looks at, has no Event: its condition, or its silence,
    tells."""
    if pod.node or pod.deleting is not None:
        return ""
    condition = pod.condition("PodScheduled")
    event = survey.observed.warnings.get(Key("Pod", pod.name))
    said = condition.get("message") or (event.message if event else "")
    why = condition.get("reason") or "no scheduler has looked at it"
    scheduler = (pod.manifest.get("spec") or {}).get("schedulerName")
    if not condition and scheduler:
        why = f"scheduler {scheduler} has not looked at it"
    return f"pod {pod.name} has no node: {said or why}"


def unheard_ranks(index: int) -> str:
    """That a group is ready, and no more: see `Survey.unheard`."""
    return f"the pods of group {index} are ready, but its ranks are not heard in Redis"


def unready_beside(life: Life) -> str:
    """Which container beside the ranks keeps a pod from being ready; empty if none does."""
    for pod in life.pods:
        for status in pod.containers():
            runs = "running" in (status.get("state") or {})
            if status.get("name") != RANK and runs and not status.get("ready"):
                return f"container {status.get('name')} of pod {pod.name} is not ready"
    return ""


def download_trouble(pod: Pod) -> Trouble | None:
    """Why the download in a pod (of the Job, or before the ranks) fails, if it does."""
    statuses = [*pod.containers(init=True), *pod.containers()]
    for status in statuses:
        if status.get("name") != DOWNLOAD:
            continue
        state = status.get("state") or {}
        ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
        code = ended.get("exitCode")
        if not code or ("running" in state and status.get("ready")):
            continue
        reason = _DOWNLOAD_CODES.get(code, "DownloadFailed")
        said = first_line(str(ended.get("message") or "")) or f"it ended with code {code}"
        return Trouble(reason, f"pod {pod.name}: {said}")
    return None


def downloading(pod: Pod) -> bool:
    """Whether a pod fetches the model now."""
    statuses = [*pod.containers(init=True), *pod.containers()]
    return any(
        status.get("name") == DOWNLOAD and "terminated" not in (status.get("state") or {})
        for status in statuses
    )


def _names(survey: Survey) -> Iterator[Trouble]:
    for key in sorted(survey.observed.foreign):
        yield Trouble(
            "NameConflict",
            f"{key.kind} {key.name} exists and is not this object's: rename this object, or remove "
            "what holds the name",
        )


def _refusals(survey: Survey) -> Iterator[Trouble]:
    for key, refusal in sorted(survey.observed.refused.items()):
        reason = refusal.reason if refusal.reason in _ORDER else "Forbidden"
        said = refusal.message + _too_old(survey, refusal)
        what = "cannot be deleted" if refusal.deletion else "was refused"
        yield Trouble(reason, f"{key.kind} {key.name} {what}: {said}")
    for key, said in without_pods(survey):
        text = f"{key.kind} {key.name} gets no pod: {said}"
        yield Trouble(reason_of(403, said, "Pod"), text)


def _kept(survey: Survey) -> Iterator[Trouble]:
    """What was deleted and is still there, because who set a finalizer on it does not take it off.
    Pods of a lost node are told with their node."""
    wall = survey.observed.wall
    kept = [
        (f"{key.kind} {key.name}", keepers(live))
        for key, live in sorted(survey.observed.live.items(), key=lambda item: item[0])
        if wall > (seconds(live["metadata"].get("deletionTimestamp")) or wall) + STUCK_SECONDS
    ]
    kept += [
        (f"pod {pod.name}", pod.finalizers)
        for pod in survey.pods
        if pod.stuck(wall) and pod.node not in survey.lost
    ]
    for what, finalizers in kept:
        if finalizers:
            yield Trouble(
                "Forbidden",
                f"{what} was deleted and stays: nobody removes its finalizer "
                + ", ".join(finalizers[:4]),
            )


def _too_old(survey: Survey, refusal: Refusal) -> str:
    """An older server drops the image from a volume, and then misses its type: that tells nobody.
    One whose administrator has switched image volumes on refuses nothing."""
    of_image = survey.observed.obj.spec.model.uri.startswith("oci://")
    if survey.observed.settings.image_volumes or not of_image or "volumes" not in refusal.message:
        return ""
    return " (a model of oci:// needs Kubernetes 1.35, and this API server is older)"


def _nodes(survey: Survey) -> Iterator[Trouble]:
    for node, why in sorted(survey.lost.items()):
        stays = [pod.name for pod in survey.pods if pod.node == node and pod.deleting is not None]
        text = f"node {node} is lost: {why}"
        if stays:
            text += (
                f"; {', '.join(sorted(stays)[:4])} cannot be removed before it is back or deleted "
                "(nothing is deleted by force)"
            )
        yield Trouble("NodeLost", text)


def _claims(survey: Survey) -> Iterator[Trouble]:
    model = survey.observed.obj.spec.model
    claim = model.cache.persistent_volume_claim if model.cache else None
    name = claim.claim_name if claim else ""
    if model.uri.startswith("pvc://"):
        name = model.uri.removeprefix("pvc://").partition("/")[0]
    if not name:
        return
    held = survey.observed.claims.get(name)
    if held is None:
        yield Trouble("VolumeUnavailable", f"PersistentVolumeClaim {name} does not exist")
        return
    modes = (held.get("spec") or {}).get("accessModes") or []
    if not modes or set(modes) - {"ReadWriteOnce", "ReadWriteOncePod"}:
        return
    nodes = {pod.node for pod in survey.pods if pod.node and pod.deleting is None}
    nodes = {n for n in nodes if any(_mounts(p, name) for p in survey.pods if p.node == n)}
    waiting = [p.name for p in survey.pods if p.node and p.phase == "Pending" and _mounts(p, name)]
    if len(nodes) > 1 and waiting:
        yield Trouble(
            "VolumeUnavailable",
            f"PersistentVolumeClaim {name} is {modes[0]}, so only one node can mount it, but pods "
            f"are on {', '.join(sorted(nodes))}; {waiting[0]} waits. Use a ReadWriteMany or "
            "ReadOnlyMany claim, or keep the pods on one node",
        )


def _mounts(pod: Pod, claim: str) -> bool:
    volumes: list[Manifest] = (pod.manifest.get("spec") or {}).get("volumes") or []
    return any(
        (volume.get("persistentVolumeClaim") or {}).get("claimName") == claim for volume in volumes
    )


def _pods(survey: Survey) -> Iterator[Trouble]:
    default = ""
    if survey.observed.obj.spec.image is None:  # older revisions may have had one of their own
        name = names.controller_revision(survey.observed.obj, survey.desired.revision)
        newest = survey.observed.live.get(Key("ControllerRevision", name), {"metadata": {}})
        default = (newest["metadata"].get("annotations") or {}).get(names.IMAGE, "")
    for pod in survey.pods:
        if pod.deleting is not None:
            continue
        if said := unscheduled(survey, pod):
            if "volume" in said.lower():  # an unbound claim, or one of another zone
                yield Trouble("VolumeUnavailable", said)
            elif pod.condition("PodScheduled"):
                yield Trouble("InsufficientCapacity", said)
            continue
        yield from _containers(pod, default)
        event = survey.observed.warnings.get(Key("Pod", pod.name))
        mounts = event is not None and event.reason in _MOUNT and pod.phase == "Pending"
        if event and mounts and not _MOMENTARY.search(event.message):
            yield Trouble("VolumeUnavailable", f"pod {pod.name}: {event.message}")


def _containers(pod: Pod, default: str) -> Iterator[Trouble]:
    """`default`: the image that the newest revision has because the object names none."""
    for status in [*pod.containers(init=True), *pod.containers()]:
        waiting = (status.get("state") or {}).get("waiting") or {}
        reason, said = waiting.get("reason", ""), waiting.get("message") or ""
        where = f"pod {pod.name}, container {status.get('name')}: {reason}"
        text = f"{where}: {said}" if said else where
        if reason in _PULL:
            image = status.get("image", "")
            if image and image == default:
                image += " (the default when this revision was made; restartedAt takes today's)"
            yield Trouble("ImagePullFailed", f"image {image}: {text}" if image else text)
        elif reason in _CONFIG:
            yield Trouble("InvalidPodTemplate", text)
        elif ended := _failing(pod, status):
            line = first_line(str(ended.get("message") or ""))
            code, why = ended.get("exitCode"), ended.get("reason") or "Error"
            again = status.get("restartCount", 0) > 1 or reason == _BACK_OFF
            yield Trouble(
                "BackOff",
                f"pod {pod.name}, container {status.get('name')} "
                + ("ends again and again" if again else "has ended")
                + (f" with code {code}" if code is not None else "")
                + (f" ({why})" if why not in ("Error", "Completed") else "")
                + (f": {line}" if line else ""),
            )


def _failing(pod: Pod, status: Manifest) -> Manifest:
    """How a container has ended that does not work again yet; empty if it works, or never has
    failed. Of a rank its group tells more, but for a kubelet that holds it back."""
    state, last = status.get("state") or {}, (status.get("lastState") or {}).get("terminated") or {}
    if (state.get("waiting") or {}).get("reason") == _BACK_OFF:
        return last or {"reason": "Error"}
    if status.get("name") == RANK or status.get("started") or pod.phase == "Failed":
        return {}
    ended: Manifest = state.get("terminated") or last
    return ended if ended.get("exitCode") else {}


def _groups(survey: Survey) -> Iterator[Trouble]:
    for index, life in survey.current.items():
        failure = life.memory.last_failure
        said = f" ({failure.sentence()})" if failure else ""
        phase = survey.phase(index)
        if phase == "Failed":
            yield Trouble(
                "RestartBudgetExhausted",
                f"group {index} was created anew {life.memory.spent} times and is left as it "
                f"is{said}; a new spec.restartedAt starts it again",
            )
        elif phase == "Restarting":
            if failure is not None and failure.reason == "NodeLost":
                yield Trouble("NodeLost", f"group {index} starts again elsewhere{said}")
            elif any(survey.unheard(pod) for pod in life.pods):
                yield Trouble("BackOff", unheard_ranks(index))
            else:
                beside = unready_beside(life)
                said += f": {beside}" if beside and not failure else ""
                yield Trouble("BackOff", f"group {index} starts again{said}")
