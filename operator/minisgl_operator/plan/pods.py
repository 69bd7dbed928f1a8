"""A pod of an object as the decisions see it: a few facts out of its manifest."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from minisgl_operator import names
from minisgl_operator.observed import Manifest
from minisgl_operator.times import seconds

STUCK_SECONDS = 30.0
"""A pod that is there so long after its deletion was due cannot go: its kubelet does not answer."""

RANK = "rank"
"""Name of the container in which the ranks of a pod run."""
DOWNLOAD = "download"


@dataclass(frozen=True, slots=True)
class Pod:
    """Times are Unix times."""

    manifest: Manifest
    name: str
    uid: str
    role: str
    index: int | None
    """Of its group; None for pods of other roles."""
    epoch: int
    ordinal: int
    """Its number in its set; rank 0 is in the pod of number 0."""
    node: str
    """Empty while it is unscheduled."""
    phase: str
    ready: bool
    ready_since: float | None
    """When its readiness last changed, to what it is now."""
    started: float | None
    """When its init containers were done, downloads included; None: not yet."""
    deleting: float | None
    """When it should be gone (deletionTimestamp); None: nobody deletes it."""

    @classmethod
    def of(cls, manifest: Manifest) -> "Pod":
        metadata = manifest["metadata"]
        labels = metadata.get("labels") or {}
        status = manifest.get("status") or {}
        conditions = {c.get("type"): c for c in status.get("conditions") or ()}
        ready = conditions.get("Ready", {})
        initialized = conditions.get("Initialized", {})
        index = _number(labels.get(names.GROUP_INDEX), -1)
        ordinal = _number(labels.get(names.POD_INDEX), -1)
        if ordinal < 0:  # a StatefulSet controller from before that label
            ordinal = _number(metadata["name"].rpartition("-")[2], 0)
        return cls(
            manifest=manifest,
            name=metadata["name"],
            uid=metadata.get("uid", ""),
            role=labels.get(names.COMPONENT, ""),
            index=index if index >= 0 else None,
            epoch=_number(labels.get(names.EPOCH), 0),
            ordinal=ordinal,
            node=(manifest.get("spec") or {}).get("nodeName") or "",
            phase=status.get("phase", "Pending"),
            ready=ready.get("status") == "True",
            ready_since=seconds(ready.get("lastTransitionTime")),
            started=seconds(initialized.get("lastTransitionTime"))
            if initialized.get("status") == "True" and status.get("phase") == "Running"
            else None,
            deleting=seconds(metadata.get("deletionTimestamp")),
        )

    @property
    def serves(self) -> bool:
        """A pod that is being deleted does not, whatever its readiness still says."""
        return self.ready and self.deleting is None

    @property
    def owner(self) -> str | None:
        """UID of its controller."""
        return controller(self.manifest)

    @property
    def killed(self) -> bool:
        """Whether somebody deleted it, and its ranks did not end well within its grace.

        Only then does a pod fail for which the kubelet has no reason; its StatefulSet makes it
        again."""
        reason = (self.manifest.get("status") or {}).get("reason")
        return self.phase == "Failed" and self.deleting is not None and not reason

    def stuck(self, wall: float) -> bool:
        """Whether it hangs Terminating."""
        return self.deleting is not None and wall > self.deleting + STUCK_SECONDS

    @property
    def finalizers(self) -> list[str]:
        """Those that keep it, if it is being deleted."""
        return keepers(self.manifest)

    def condition(self, kind: str) -> Manifest:
        """A condition of its status; empty if there is none."""
        status = self.manifest.get("status") or {}
        for condition in status.get("conditions") or ():
            if condition.get("type") == kind:
                return dict(condition)
        return {}

    def containers(self, *, init: bool = False) -> Iterator[Manifest]:
        """The status of each container."""
        status = self.manifest.get("status") or {}
        yield from status.get("initContainerStatuses" if init else "containerStatuses") or ()

    @property
    def disrupted(self) -> Manifest | None:
        """Why it is being evicted, if somebody evicts it (drain, preemption, taint)."""
        condition = self.condition("DisruptionTarget")
        if self.deleting is None or condition.get("status") != "True":
            return None
        return condition

    @property
    def exited(self) -> bool:
        """Whether a rank of it has ended, or will, since it was created."""
        return self.deleting is not None or any(
            status.get("restartCount", 0) > 0 or "terminated" in (status.get("state") or {})
            for status in self.containers()
            if status.get("name") == RANK
        )


def controller(manifest: Manifest) -> str | None:
    """UID of what controls a child or pod."""
    references: list[dict[str, Any]] = manifest["metadata"].get("ownerReferences") or []
    for reference in references:
        if reference.get("controller"):
            return str(reference.get("uid", ""))
    return None


def keepers(manifest: Manifest) -> list[str]:
    """The finalizers of a child or pod but those of Kubernetes' own garbage collector."""
    found = manifest["metadata"].get("finalizers") or []
    return sorted(str(one) for one in found if one not in ("foregroundDeletion", "orphan"))


def _number(text: object, otherwise: int) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else otherwise
