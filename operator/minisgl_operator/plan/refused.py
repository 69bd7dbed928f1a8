"""Children whose pods are refused, and how their controllers are asked to try again.

A controller of Kubernetes waits twice as long after each refusal of a pod (a quota, an admission
webhook, a class that is missing), up to 16 minutes, and nothing tells it that the cause is gone.
A change of its StatefulSet or ReplicaSet does: it looks at once, and an annotation is change enough
(a Deployment hands its own down). A Job's controller waits a minute at most, and is left alone.
"""

from collections.abc import Iterable, Iterator
from zlib import crc32

from minisgl_operator import names
from minisgl_operator.observed import Action, Apply, Key
from minisgl_operator.plan.groups import Survey
from minisgl_operator.times import rfc3339

ASK_SECONDS = 30
"""As often as the operator itself tries again what is refused of it."""


def without_pods(survey: Survey) -> Iterator[tuple[Key, str]]:
    """Each child that could not create a pod and has not all that it wants yet, with the server's
    words."""
    for key, warning in sorted(survey.observed.warnings.items()):
        if warning.reason == "FailedCreate" and not _has_its_pods(survey, key):
            yield key, warning.message
    for key, live in sorted(survey.observed.live.items(), key=lambda item: item[0]):
        # The Event is about a ReplicaSet, which is not ours.
        for told in (live.get("status") or {}).get("conditions") or ():
            failed = told.get("type") == "ReplicaFailure" and told.get("status") == "True"
            if key.kind == "Deployment" and failed:
                yield key, told.get("message", "")


def asked_again(survey: Survey, actions: Iterable[Action]) -> tuple[list[Action], float | None]:
    """The same actions, in which children without their pods are annotated anew each
    `ASK_SECONDS`; and the Unix time of the next such change, if there is one."""
    lacking = {key for key, _ in without_pods(survey) if key.kind != "Job"}
    # Not all objects of a namespace in the same second.
    phase = crc32(survey.observed.obj.uid.encode()) % ASK_SECONDS
    last = (survey.observed.wall - phase) // ASK_SECONDS * ASK_SECONDS + phase
    found: list[Action] = []
    for action in actions:
        if isinstance(action, Apply) and Key.of(action.manifest) in lacking:
            metadata = action.manifest["metadata"]
            notes = {**metadata.get("annotations", {}), names.ASKED_AGAIN: rfc3339(last)}
            metadata = {**metadata, "annotations": notes}
            action = Apply({**action.manifest, "metadata": metadata})
        found.append(action)
    return found, last + ASK_SECONDS if lacking else None


def _has_its_pods(survey: Survey, key: Key) -> bool:
    """Whether a child that could not create a pod once has all it wants by now."""
    live = survey.observed.live.get(key)
    if live is None or live["metadata"].get("deletionTimestamp"):
        return True
    place = names.parse_set(survey.observed.obj, key.name)
    if key.kind == "StatefulSet" and place is not None:
        life = survey.current.get(place[0])
        return life is None or life.epoch != place[1] or len(life.pods) >= life.size
    told = live.get("status") or {}
    if key.kind == "Job":
        return bool(told.get("active") or told.get("succeeded"))
    return bool(told.get("replicas", 0) >= (live.get("spec") or {}).get("replicas", 1))
