"""What is done about children and pods other than the sets of groups: kept, staged, pruned."""

from collections.abc import Iterator

from minisgl_operator import names
from minisgl_operator.observed import (
    Action,
    Apply,
    Delete,
    DeletePod,
    Key,
    Manifest,
    Post,
)
from minisgl_operator.plan.groups import LET_GO, Survey
from minisgl_operator.plan.pods import Pod, controller

_BEFORE: dict[str, tuple[str, ...]] = {
    "gateway": (),
    "tokenizer": ("gateway",),
    "detokenizer": ("gateway",),
    "redis": ("gateway", "tokenizer", "detokenizer", "rank"),
}
"""Suspending: the roles whose pods must be gone before those of a role are taken away. Gateways
finish their open streams while all else still works; Redis goes last."""
_SERVICES = tuple(_BEFORE)


def applied(survey: Survey) -> Iterator[Action]:
    """The desired children; all of them, since who applies sends only what differs."""
    for manifest in survey.desired.children:
        if Key.of(manifest) in survey.observed.foreign:
            continue
        staged = survey.observed.obj.spec.suspend and manifest["kind"] == "Deployment"
        if not (staged and held_back(survey, _BEFORE.get(_role(manifest), ()))):
            yield Apply(manifest)


def held_back(survey: Survey, roles: tuple[str, ...]) -> bool:
    """Whether a pod of these roles is still there, other than those that cannot go."""
    wall = survey.observed.wall
    return any(
        pod.role in roles and pod.node not in survey.lost and not pod.stuck(wall)
        for pod in survey.pods
    )


def groups_drain(survey: Survey) -> bool:
    """Whether a suspended object's groups still work for streams that gateways finish."""
    return survey.observed.obj.spec.suspend and held_back(survey, ("gateway",))


def pruned(survey: Survey) -> Iterator[Action]:
    """Children that are ours and that nothing wants any more. Group sets are not meant here."""
    obj = survey.observed.obj
    wanted = {Key.of(manifest) for manifest in survey.desired.children}
    for key, manifest in survey.observed.live.items():
        metadata = manifest["metadata"]
        if key in wanted or key.kind == "Pod" or metadata.get("deletionTimestamp"):
            continue
        if key.kind == "StatefulSet" and names.parse_set(obj, key.name) is not None:
            continue
        owner = controller(manifest)
        labelled = names.OBJECT_UID in (metadata.get("labels") or {})
        if owner == obj.uid or (owner is None and labelled):
            yield Delete(key, metadata.get("uid", ""))


def pods(survey: Survey) -> Iterator[Action]:
    """Pods to delete, always gracefully."""
    held = {m["metadata"].get("uid") for m in survey.observed.live.values()}
    told: set[str] = set()
    for pod in survey.pods:
        if pod.deleting is not None:
            continue
        why = _why(survey, pod, held)
        if why:
            yield DeletePod(pod.name, pod.uid, why)
        if pod.node in survey.lost and pod.role in _SERVICES and pod.node not in told:
            told.add(pod.node)
            yield Post("Warning", "NodeLost", f"node {pod.node} is lost: {survey.lost[pod.node]}")


def _why(survey: Survey, pod: Pod, held: set[object]) -> str:
    if pod.role in _SERVICES:
        if pod.node in survey.lost:
            return f"node {pod.node} is lost: {survey.lost[pod.node]}"
        return "it has failed" if pod.phase == "Failed" else ""
    if survey.let_go(pod) is not None:
        return LET_GO
    if pod.index is None:
        return ""  # a Job counts its pods, failed ones too
    current = survey.current.get(pod.index)
    if current is not None and current.epoch == pod.epoch:
        # A Failed one is why its group is created anew; else the set's controller needs its place.
        policy = survey.observed.obj.spec.failure_policy.restart_policy
        left_alone = policy == "None" or current.memory.failed
        return "it has failed" if pod.phase == "Failed" and left_alone else ""
    if pod.owner is None or pod.owner not in held:
        return f"its group g{pod.index}-{pod.epoch} is gone"
    return "it has failed" if pod.phase == "Failed" else ""


def _role(manifest: Manifest) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(names.COMPONENT, ""))
