"""What the operator sees of one object, and what it may do: the data between its parts.

`kube` and `bus` fill an `Observed`; `desired`, `plan` and `status` read nothing else. All times
are seconds: `now` on the operator's own monotonic clock (for silences and waits), `wall` as Unix
time (for what is written down and must outlive a restart).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from minisgl_operator.api import MiniSGLang

Manifest = dict[str, Any]


class Key(NamedTuple):
    """One child of an object, in the object's namespace."""

    kind: str
    name: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "Key":
        return cls(manifest["kind"], manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's own configuration, from the chart's values."""

    image: str
    """Default image of every role; `{device}` in it becomes the object's engine.device."""
    redis_image: str
    gpu_resource_name: str = "nvidia.com/gpu"
    runtime_class_name: str = ""
    operator_namespace: str = ""
    node_cidrs: tuple[str, ...] = ()
    """Addresses of nodes, for NetworkPolicies: hostNetwork pods match no podSelector."""
    can_read_nodes: bool = True
    """Whether nodes and their Leases may be read (cluster scope)."""
    gateway_api: bool = False
    """Whether the cluster has HTTPRoute."""
    image_volumes: bool = True
    """Whether the API server knows image volumes (1.35)."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the API server shows it, and how long its Lease has stood still here."""

    name: str
    ready: bool
    lease_age: float | None = None
    """Seconds on the operator's clock since the Lease last changed; None: not observed."""
    unschedulable: bool = False


@dataclass(frozen=True, slots=True)
class Worker:
    """One `state:*` of the bus."""

    role: Literal["gateway", "tokenizer", "detokenizer", "rank"]
    id: str
    """Of a rank GROUP/RANK, such as g0-3/1."""
    pod: str
    boot: int
    silent: float
    """Seconds for which (boot, beat) stood still while the operator could read the bus."""
    draining: bool = False
    running: int = 0
    waiting: int = 0
    transport: str = ""
    """Of rank 0: what tensors travel by, as `GroupLoad.transport` says it."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """`rdzv:GROUP` of the bus."""

    incarnation: str
    """16 hex digits."""
    formed: bool


@dataclass(frozen=True, slots=True)
class Bus:
    """What the bus shows. Silences are kept over a time in which it could not be read."""

    state: Literal["ok", "unreachable", "auth-failed", "full", "not-observable", "starting"]
    message: str = ""
    unread: float = 0.0
    """Seconds since the bus could be read last."""
    readable: float = 0.0
    """Seconds for which it has been read, and taken writes, without a pause."""
    workers: tuple[Worker, ...] = ()
    meetings: Mapping[str, Meeting] = field(default_factory=dict)
    """By group, such as g0-3."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A child that the API server did not take, or (`deletion`) a child or pod that it keeps."""

    reason: str
    """One of the reasons of condition Degraded."""
    message: str
    """The server's sentence."""
    since: float
    """`wall` of the first refusal in a row."""
    deletion: bool = False


@dataclass(frozen=True, slots=True)
class Warning:
    """The latest Warning Event about a child or pod, such as FailedCreate or FailedScheduling."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything about one object, at one moment."""

    obj: MiniSGLang
    settings: Settings
    now: float
    wall: float
    live: Mapping[Key, Manifest] = field(default_factory=dict)
    """Children that are ours (owner UID, or our label without another controller)."""
    foreign: frozenset[Key] = frozenset()
    """Names of ours that somebody else's objects hold."""
    pods: tuple[Manifest, ...] = ()
    """Pods with our UID label."""
    refused: Mapping[Key, Refusal] = field(default_factory=dict)
    warnings: Mapping[Key, Warning] = field(default_factory=dict)
    """By the child or pod (kind Pod) concerned."""
    nodes: Mapping[str, Node] | None = None
    """None: nodes may not be read."""
    bus: Bus = Bus("starting")
    redis_password: str | None = None
    """Of a managed Redis: from its Secret, or from memory if that is gone."""
    claims: Mapping[str, Manifest] = field(default_factory=dict)
    """PersistentVolumeClaims that the spec names, by name; a missing one is not in it."""


# --- what is wanted -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Desired:
    """What follows from the spec alone; all children but the sets of groups."""

    children: tuple[Manifest, ...]
    """In the order of their creation. What lives and is neither here nor a group's set, goes. The
    Deployments of a suspended object have 0 replicas here; the plan lets the groups drain first."""
    revision: str
    """The hash that new groups get."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Pods of one group, by revision, for each whose template is live: no other can be built."""
    model_ready: bool = True
    """Whether pods of `revision` would find the model, or fetch it for themselves."""


class GroupSet(Protocol):
    """Builds the StatefulSet of one group in one of its lives, for a revision in `sizes`."""

    def __call__(
        self,
        observed: Observed,
        revision: str,
        index: int,
        epoch: int,
        replicas: int,
        avoided: Sequence[str],
        annotations: Mapping[str, str],
        /,
    ) -> Manifest:
        """`replicas`: 0, or the size; `avoided`: nodes that its pods must not use; `annotations`:
        all that the plan remembers of the group, taken over as they are."""
        ...


# --- what may be done ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a child. Sent only if a field that it sets differs in the live one."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a child, if it still has this UID."""

    key: Key
    uid: str
    foreground: bool = False
    """Stay visible until the dependents are gone."""


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod, gracefully, if it still has this UID."""

    name: str
    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class Post:
    """An Event about the object."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action = Apply | Delete | DeletePod | Post


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, in this order, and when to look again even if nothing changes."""

    actions: tuple[Action, ...] = ()
    wake: float | None = None
    """Seconds from now; None: at the next resync."""
