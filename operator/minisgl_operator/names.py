"""Names, labels and annotations of children: the only place that spells them.

Every child's name starts with the object's, which is at most 40 characters long. A set's name,
NAME-gINDEX-EPOCH, stays within 52, because pods of a StatefulSet with a longer name are refused
for the label that carries it.
"""

import re
from collections.abc import Mapping

from minisgl_operator.api import GROUP, MiniSGLang

MANAGER = "minisgl-operator"
"""Field manager of server-side apply, and value of `app.kubernetes.io/managed-by`."""

OBJECT_UID = f"{GROUP}/uid"
"""Label of every child and pod: the UID of its object. What carries it and is not desired goes."""
GROUP_INDEX = f"{GROUP}/group"
EPOCH = f"{GROUP}/epoch"
REVISION = f"{GROUP}/revision"
COMPONENT = "app.kubernetes.io/component"
POD_INDEX = "apps.kubernetes.io/pod-index"
"""Kubernetes' own label: a pod's number in its StatefulSet."""

# Annotations of a group's StatefulSet: the operator's memory. A lost status comes back from them.
RESTARTS = f"{GROUP}/restarts"
"""Re-creations of this group after a failure, as a decimal number."""
SPENT = f"{GROUP}/restarts-without-stability"
"""Of those, the ones that count against the budget and for the backoff."""
LAST_RESTART = f"{GROUP}/last-restart"
"""Time of the last one, RFC 3339."""
LAST_FAILURE = f"{GROUP}/last-failure"
"""What ended the group last: JSON, as in status.groups[].lastFailure."""
SERVED = f"{GROUP}/served"
"""Time since which this epoch has served without a break that the operator saw, RFC 3339."""
HAS_SERVED = f"{GROUP}/has-served"
"""`true` once a group of this index has served: what the disruption budget counts."""
NOT_BEFORE = f"{GROUP}/not-before"
"""A set that waits with no pod: the time of its start, RFC 3339 (backoff)."""
AVOIDED = f"{GROUP}/avoided-nodes"
"""Nodes that this epoch must not use, comma separated."""
FAILED = f"{GROUP}/failed"
"""`true`: the restart budget is spent, and the group is left as it is."""

# Annotations of a revision's ControllerRevision.
IMAGE = f"{GROUP}/image"
COMMIT = f"{GROUP}/commit"
"""Commit of an hf:// repository that this revision uses."""
PODS = f"{GROUP}/pods"
"""Pods of one group. Sets carry these three as well: a deleted ControllerRevision comes back from
a set that was made of it."""

APPLIED = f"{GROUP}/applied"
"""Annotation of every child: a digest of its manifest. A field that is no longer set is in no
comparison with the live object; that another manifest was applied shows here."""
ASKED_AGAIN = f"{GROUP}/asked-again"
"""Annotation of a child whose pods are refused: when its controller was last asked to try again. It
stays when they are no more."""
PASSWORD = f"{GROUP}/password"
"""Annotation of Redis's pod: a digest of its password, so that another one restarts it."""

ROLES = ("gateway", "tokenizer", "detokenizer", "redis", "rank", "model")
"""Values of the component label."""

_SET = re.compile(r"^(?P<object>.+)-g(?P<index>\d+)-(?P<epoch>\d+)$")


def pods_of(annotations: Mapping[str, str]) -> int | None:
    """What `PODS` says; None if it is missing, or somebody wrote into it what is no such number."""
    text = annotations.get(PODS) or ""
    return int(text) if re.fullmatch("[1-9][0-9]{0,3}", text) else None


def common(obj: MiniSGLang) -> dict[str, str]:
    """Labels of every child."""
    return {
        "app.kubernetes.io/name": "minisglang",
        "app.kubernetes.io/instance": obj.name,
        "app.kubernetes.io/managed-by": MANAGER,
        OBJECT_UID: obj.uid,
    }


def selector(obj: MiniSGLang, role: str) -> dict[str, str]:
    """Labels that pick the pods of one role of one object, and never change.

    Without the UID, so that the selector of a Deployment (immutable) fits a namesake that comes
    after a deletion with orphaned children.
    """
    return {
        "app.kubernetes.io/name": "minisglang",
        "app.kubernetes.io/instance": obj.name,
        COMPONENT: role,
    }


def role_labels(obj: MiniSGLang, role: str) -> dict[str, str]:
    """Labels of the children and pods of one role."""
    return {**common(obj), COMPONENT: role}


def gateway(obj: MiniSGLang) -> str:
    return f"{obj.name}-gateway"


def tokenizer(obj: MiniSGLang) -> str:
    return f"{obj.name}-tokenizer"


def detokenizer(obj: MiniSGLang) -> str:
    return f"{obj.name}-detokenizer"


def redis(obj: MiniSGLang) -> str:
    """Deployment, Service, Secret, NetworkPolicy and (if there is one) claim of Redis."""
    return f"{obj.name}-redis"


def ranks(obj: MiniSGLang) -> str:
    """The headless Service, the disruption budget and the NetworkPolicy of all rank pods."""
    return f"{obj.name}-ranks"


def closed(obj: MiniSGLang) -> str:
    """The NetworkPolicy of the pods that nobody connects to."""
    return f"{obj.name}-closed"


def model_job(obj: MiniSGLang, digest: str) -> str:
    return f"{obj.name}-model-{digest}"


def controller_revision(obj: MiniSGLang, digest: str) -> str:
    return f"{obj.name}-{digest}"


def group_set(obj: MiniSGLang, index: int, epoch: int) -> str:
    """The StatefulSet of one group in one of its lives."""
    return f"{obj.name}-{bus_group(index, epoch)}"


def bus_group(index: int, epoch: int) -> str:
    """The group's name on the bus. With the epoch: two lives of one group never share a key, so an
    old one that cannot go (its node is lost) disturbs the new one in nothing."""
    return f"g{index}-{epoch}"


def parse_set(obj: MiniSGLang, name: str) -> tuple[int, int] | None:
    """(index, epoch) of a group's set; None if `name` is not one of this object's."""
    match = _SET.match(name)
    if match is None or match["object"] != obj.name:
        return None
    return int(match["index"]), int(match["epoch"])


def service(obj: MiniSGLang) -> str:
    """The service's name on the bus, part of every key in Redis."""
    return f"{obj.namespace}.{obj.name}.{obj.uid[:8]}"
