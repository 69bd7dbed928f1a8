"""A small model of a cluster for the operator's pure parts: what the API server holds, and the
StatefulSet controller, scheduler, kubelets and ranks that act on it, one step at a time.

It keeps what matters to decisions: pods of a dead node stay; until a node is NotReady the scheduler
still uses it; a foreground deletion keeps a set until its pods are gone; a group serves when all
its pods run, after a load time.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minisgl_operator import api, names
from minisgl_operator.observed import (
    Action,
    Apply,
    Bus,
    Delete,
    DeletePod,
    Desired,
    Key,
    Manifest,
    Meeting,
    Node,
    Observed,
    Post,
    Settings,
    Worker,
)
from minisgl_operator.plan import decide
from minisgl_operator.status import status
from minisgl_operator.times import rfc3339, seconds

LEASE_RENEWAL = 10.0
NOT_READY_AFTER = 50.0
LOAD_SECONDS = 4.0
DRAIN_SECONDS = 4.0
START = 1_800_000_000.0
SETTINGS = Settings(image="default:1", redis_image="redis:7")

ROLES = ("gateway", "tokenizer", "detokenizer", "redis")


def spec_of(**changes: Any) -> dict[str, Any]:
    """A spec as the API server defaults it, with quick failure limits."""
    spec: dict[str, Any] = {
        "model": {"uri": "pvc://models/m"},
        "image": "good:1",
        "replicas": 1,
        "engine": {"device": "cpu"},
        "failurePolicy": {
            "restartPolicy": "RecreateGroupAfterStart",
            "backoffBaseSeconds": 4,
            "backoffMaxSeconds": 16,
            "startupTimeoutSeconds": 60,
            "heartbeatTimeoutSeconds": 30,
        },
        "ranks": {"terminationGracePeriodSeconds": 10},
    }
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(spec.get(key), dict):
            spec[key] = {**spec[key], **value}
        else:
            spec[key] = value
    return spec


def object_of(
    spec: dict[str, Any], status: dict[str, Any] | None = None, generation: int = 1
) -> api.MiniSGLang:
    return api.parse(
        {
            "metadata": {
                "name": "llm",
                "namespace": "ns",
                "uid": "11112222-aaaa",
                "generation": generation,
            },
            "spec": spec,
            "status": status or {},
        }
    )


def revision_of(obj: api.MiniSGLang) -> str:
    spec = obj.spec
    shaping = [spec.image, spec.restarted_at, spec.parallelism.tensor, spec.model.uri]
    return hashlib.sha256(json.dumps(shaping).encode()).hexdigest()[:8]


def owned(obj: api.MiniSGLang) -> list[dict[str, Any]]:
    return [{"kind": api.KIND, "name": obj.name, "uid": obj.uid, "controller": True}]


def child(obj: api.MiniSGLang, kind: str, name: str, role: str, **rest: Any) -> Manifest:
    return {
        "kind": kind,
        "metadata": {
            "name": name,
            "labels": names.role_labels(obj, role),
            "ownerReferences": owned(obj),
        },
        **rest,
    }


def controller_revision(obj: api.MiniSGLang) -> Manifest:
    made = child(
        obj, "ControllerRevision", names.controller_revision(obj, revision_of(obj)), "rank"
    )
    made["metadata"]["annotations"] = {names.IMAGE: obj.spec.image or SETTINGS.image}
    made["data"] = {"pods": obj.spec.parallelism.pods}
    return made


def desired_of(observed: Observed, *, model_ready: bool = True) -> Desired:
    """A small stand-in for `desired`: it keeps the contract."""
    obj = observed.obj
    wanted = revision_of(obj)
    used = {
        m["metadata"]["labels"].get(names.REVISION)
        for key, m in observed.live.items()
        if key.kind == "StatefulSet"
    }
    sizes, revisions = {}, {names.controller_revision(obj, wanted): controller_revision(obj)}
    for key, manifest in observed.live.items():
        if key.kind == "ControllerRevision":
            digest = key.name.removeprefix(f"{obj.name}-")
            sizes[digest] = manifest["data"]["pods"]
            if digest in used and digest != wanted:
                revisions[key.name] = {
                    "kind": key.kind,
                    "metadata": {
                        k: manifest["metadata"][k] for k in ("name", "labels", "annotations")
                    },
                    "data": manifest["data"],
                }
    replicas = 0 if obj.spec.suspend else 1
    children = [
        *revisions.values(),
        child(obj, "Service", obj.name, "gateway"),
        *(
            child(obj, "Deployment", f"{obj.name}-{role}", role, spec={"replicas": replicas})
            for role in ROLES
        ),
    ]
    return Desired(tuple(children), wanted, sizes, model_ready)


def group_set(
    observed: Observed,
    revision: str,
    index: int,
    epoch: int,
    replicas: int,
    avoided: Sequence[str],
    annotations: Mapping[str, str],
) -> Manifest:
    obj = observed.obj
    made = child(obj, "StatefulSet", names.group_set(obj, index, epoch), "rank")
    template = observed.live[Key("ControllerRevision", names.controller_revision(obj, revision))]
    made["metadata"]["labels"] |= {
        names.GROUP_INDEX: str(index),
        names.EPOCH: str(epoch),
        names.REVISION: revision,
    }
    made["metadata"]["annotations"] = dict(annotations)
    made["spec"] = {
        "replicas": replicas,
        "avoided": list(avoided),
        "image": template["metadata"]["annotations"][names.IMAGE],
    }
    return made


def covers(live: Any, wanted: Any) -> bool:
    """Whether `live` has all that `wanted` sets."""
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(covers(live.get(k), v) for k, v in wanted.items())
    return bool(live == wanted)


@dataclass
class Machine:
    """A node. A dead kubelet over live ranks is `kubelet=False, power=True`."""

    places: int
    power: bool = True
    kubelet: bool = True
    lease_at: float = START
    lost_at: float | None = None
    not_ready: bool = False
    cordoned: bool = False


@dataclass
class World:
    spec: dict[str, Any]
    machines: dict[str, Machine] = field(
        default_factory=lambda: {name: Machine(8) for name in ("n1", "n2", "n3")}
    )
    wall: float = START
    generation: int = 1
    status: dict[str, Any] = field(default_factory=dict)
    live: dict[Key, Manifest] = field(default_factory=dict)
    pods: dict[str, Manifest] = field(default_factory=dict)
    silent_from: dict[str, float] = field(default_factory=dict)
    """By pod: since when its workers do not beat."""
    broken_images: set[str] = field(default_factory=set)
    """Ranks of these images end at their start."""
    missing_images: set[str] = field(default_factory=set)
    posts: list[Post] = field(default_factory=list)
    writes: int = 0
    reads_nodes: bool = True
    model_ready: bool = True
    operator_from: float = START
    """When the operator started: its clocks know nothing from before."""
    _last_heard: tuple[Worker, ...] = ()
    _serial: int = 0

    # --- the operator --------------------------------------------------------------------------

    @property
    def obj(self) -> api.MiniSGLang:
        return object_of(self.spec, self.status, self.generation)

    def change(self, **changes: Any) -> None:
        """A new spec."""
        self.spec = spec_of(**{**self.spec, **changes})
        self.generation += 1

    def observe(self) -> Observed:
        redis = [p for p in self.pods.values() if _role(p) == "redis" and self._beats(p)]
        return Observed(
            obj=self.obj,
            settings=SETTINGS,
            now=self.wall - START,
            wall=self.wall,
            live=dict(self.live),
            pods=tuple(self.pods.values()),
            nodes={
                name: Node(name, not m.not_ready, self._lease_age(m), m.cordoned)
                for name, m in self.machines.items()
            }
            if self.reads_nodes
            else None,
            bus=self._bus()
            if redis
            else Bus("unreachable", unread=self._unread(), workers=self._last_heard),
        )

    def _lease_age(self, machine: Machine) -> float:
        return self.wall - max(machine.lease_at, self.operator_from)

    def _unread(self) -> float:
        silent = [s for p, s in self.silent_from.items() if _role(self.pods.get(p, {})) == "redis"]
        return self.wall - max([*silent, self.operator_from])

    def _bus(self) -> Bus:
        workers, meetings = [], {}
        for pod in self.pods.values():
            if not running(pod):
                continue
            since = self.silent_from.get(pod["metadata"]["name"], self.wall)
            silent = self.wall - max(since, self.operator_from)
            labels = pod["metadata"]["labels"]
            rank = _role(pod) == "rank"
            group = f"g{labels.get(names.GROUP_INDEX)}-{labels.get(names.EPOCH)}"
            name = pod["metadata"]["name"]
            workers.append(
                Worker(
                    "rank" if rank else _role(pod),  # type: ignore[arg-type]
                    f"{group}/{labels.get(names.POD_INDEX)}" if rank else name,
                    name,
                    1,
                    silent,
                )
            )
            if rank:
                meetings[group] = Meeting("0123456789abcdef", ready(pod))
        self._last_heard = tuple(w for w in workers if w.role != "redis")
        return Bus("ok", workers=self._last_heard, meetings=meetings)

    def desired(self, observed: Observed) -> Desired:
        return desired_of(observed, model_ready=self.model_ready)

    def operate(self, most: int | None = None) -> list[Action]:
        """One look of the operator, which dies after `most` actions; what changed anything."""
        observed = self.observe()
        desired = self.desired(observed)
        plan = decide(observed, desired, group_set)
        done: list[Action] = []
        for action in plan.actions[:most]:
            if self.act(action):
                done.append(action)
        if most is None:
            observed = self.observe()
            self.status = status(observed, self.desired(observed))
        return done

    def act(self, action: Action) -> bool:
        if isinstance(action, Post):
            self.posts.append(action)
            return True
        if isinstance(action, DeletePod):
            pod = self.pods.get(action.name)
            if pod and pod["metadata"]["uid"] == action.uid:
                self.terminate(pod)
                self.writes += 1
                return True
            return False
        if isinstance(action, Delete):
            live = self.live.get(action.key)
            if live and live["metadata"]["uid"] == action.uid:
                self.writes += 1
                self.remove(action.key, foreground=action.foreground)
                return True
            return False
        return self.apply(action)

    def apply(self, action: Apply) -> bool:
        key = Key.of(action.manifest)
        held = self.live.get(key)
        wanted = json.loads(json.dumps(action.manifest))
        if held is not None and covers(held, wanted):
            return False
        self.writes += 1
        if held is None:
            self._serial += 1
            wanted["metadata"] |= {
                "uid": f"u{self._serial}",
                "creationTimestamp": rfc3339(self.wall),
            }
            self.live[key] = wanted
        else:
            if key.kind == "StatefulSet":  # another template is another epoch
                labels = held["metadata"]["labels"]
                assert wanted["metadata"]["labels"][names.REVISION] == labels[names.REVISION]
            metadata = {**held["metadata"], **wanted["metadata"]}
            self.live[key] = {**held, **wanted, "metadata": metadata}
        return True

    # --- what people and accidents do ----------------------------------------------------------

    def remove(self, key: Key, *, foreground: bool = False) -> None:
        """Delete a child; in the background it is gone at once, and its pods are collected."""
        if key.kind == "StatefulSet" and foreground:
            self.live[key]["metadata"].setdefault("deletionTimestamp", rfc3339(self.wall))
        else:
            del self.live[key]

    def terminate(self, pod: Manifest) -> None:
        pod["metadata"].setdefault("deletionTimestamp", rfc3339(self.wall + DRAIN_SECONDS))

    def evict(self, pod: Manifest) -> None:
        self.terminate(pod)
        set_condition(
            pod, "DisruptionTarget", True, self.wall, "EvictionByEvictionAPI", "Eviction API"
        )

    def crash(self, pod: Manifest, code: int = 1, message: str = "RuntimeError: boom") -> None:
        """A rank ends; so do its peers, and all containers start again in place."""
        for other in self.members(pod):
            mine = other is pod
            ended = {
                "exitCode": code if mine else 3,
                "reason": "Error",
                "finishedAt": rfc3339(self.wall + (0 if mine else 1)),
                "message": message if mine else "peer is gone",
            }
            state = other["status"].setdefault("containerStatuses", [{"name": "rank"}])[0]
            state["restartCount"] = state.get("restartCount", 0) + 1
            state["lastState"] = {"terminated": ended}
            other["loaded"] = self.wall + LOAD_SECONDS
            set_condition(other, "Ready", False, self.wall)

    def members(self, pod: Manifest) -> list[Manifest]:
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        here = [
            p for p in self.pods.values() if p["metadata"]["ownerReferences"][0]["uid"] == owner
        ]
        return [p for p in here if running(p) and self._beats(p)]

    def power_off(self, name: str) -> None:
        machine = self.machines[name]
        machine.power = machine.kubelet = False
        machine.lost_at = self.wall
        for pod in self.on(name):
            self.silent_from.setdefault(pod["metadata"]["name"], self.wall)

    def kubelet_off(self, name: str) -> None:
        self.machines[name].kubelet = False
        self.machines[name].lost_at = self.wall

    def power_on(self, name: str) -> None:
        machine = self.machines[name]
        was_off = not machine.power
        machine.power = machine.kubelet = True
        machine.lost_at = None
        machine.not_ready = False
        machine.lease_at = self.wall
        for pod in self.on(name):
            self.silent_from.pop(pod["metadata"]["name"], None)
            if was_off and running(pod):
                pod["loaded"] = self.wall + LOAD_SECONDS
                set_condition(pod, "Ready", False, self.wall)

    def on(self, node: str) -> list[Manifest]:
        return [p for p in self.pods.values() if p["spec"].get("nodeName") == node]

    def rank_pods(self) -> list[Manifest]:
        return [p for p in self.pods.values() if _role(p) == "rank"]

    def _beats(self, pod: Manifest) -> bool:
        node = pod["spec"].get("nodeName")
        return bool(node) and self.machines[node].power and running(pod)

    # --- the cluster ---------------------------------------------------------------------------

    def step(self, dt: float = 1.0) -> None:
        """The cluster's own controllers, once each."""
        self.wall += dt
        for machine in self.machines.values():
            if machine.kubelet and self.wall - machine.lease_at >= LEASE_RENEWAL:
                machine.lease_at = self.wall
            if machine.lost_at is not None and self.wall - machine.lost_at > NOT_READY_AFTER:
                machine.not_ready = True
        self._collect()
        self._controllers()
        self._schedule()
        self._kubelets()

    def run(self, seconds: float, dt: float = 1.0) -> None:
        """Cluster and operator for so long."""
        for _ in range(int(seconds / dt)):
            self.step(dt)
            self.operate()

    def until(self, holds: Callable[[], bool], seconds: float = 600) -> None:
        """Cluster and operator until something holds."""
        for _ in range(int(seconds)):
            if holds():
                return
            self.step()
            self.operate()
        raise AssertionError(f"not within {seconds} s: {self.status}")

    def settled(self) -> bool:
        """Whether all groups serve the newest revision, says the status."""
        return (
            self.status.get("readyReplicas") == self.obj.spec.replicas == len(self.sets())
            and self.status["currentRevision"] == self.status["updateRevision"]
            and self.status["observedGeneration"] == self.generation
        )

    def settle(self, seconds: float = 600) -> "World":
        self.until(self.settled, seconds)
        return self

    def sets(self) -> dict[str, Manifest]:
        """The groups' sets by name, those that go included."""
        return {k.name: m for k, m in sorted(self.live.items()) if k.kind == "StatefulSet"}

    def group(self, index: int) -> dict[str, Any]:
        """A group as the status shows it; empty if it does not."""
        return next((g for g in self.status.get("groups", ()) if g["index"] == index), {})

    def condition(self, kind: str) -> dict[str, Any]:
        return next((c for c in self.status["conditions"] if c["type"] == kind), {})

    def events(self, reason: str) -> list[str]:
        return [post.message for post in self.posts if post.reason == reason]

    def _collect(self) -> None:
        """The garbage collector."""
        uids = {m["metadata"]["uid"]: m for m in self.live.values()}
        for pod in self.pods.values():
            owner = uids.get(pod["metadata"]["ownerReferences"][0]["uid"])
            if owner is None or owner["metadata"].get("deletionTimestamp"):
                self.terminate(pod)
        held = {p["metadata"]["ownerReferences"][0]["uid"] for p in self.pods.values()}
        for key, manifest in list(self.live.items()):
            gone = manifest["metadata"].get("deletionTimestamp")
            if gone and manifest["metadata"]["uid"] not in held:
                del self.live[key]

    def _controllers(self) -> None:
        for key, manifest in self.live.items():
            if key.kind not in ("StatefulSet", "Deployment"):
                continue
            if manifest["metadata"].get("deletionTimestamp"):
                continue
            uid, wanted = manifest["metadata"]["uid"], manifest["spec"]["replicas"]
            mine = [
                p
                for p in self.pods.values()
                if p["metadata"]["ownerReferences"][0]["uid"] == uid
                and (key.kind == "StatefulSet" or "deletionTimestamp" not in p["metadata"])
            ]
            if key.kind == "StatefulSet":
                there = {p["metadata"]["labels"][names.POD_INDEX]: p for p in mine}
                for ordinal in range(wanted):
                    if str(ordinal) not in there:
                        self._create(manifest, f"{key.name}-{ordinal}", ordinal)
                for ordinal, pod in there.items():
                    if int(ordinal) >= wanted:
                        self.terminate(pod)
            else:
                for _ in range(wanted - len(mine)):
                    self._serial += 1
                    self._create(manifest, f"{key.name}-{self._serial}", 0)
                for pod in mine[wanted:]:
                    self.terminate(pod)

    def _create(self, owner: Manifest, name: str, ordinal: int) -> None:
        self._serial += 1
        labels = dict(owner["metadata"]["labels"]) | {names.POD_INDEX: str(ordinal)}
        self.pods[name] = {
            "metadata": {
                "name": name,
                "uid": f"p{self._serial}",
                "labels": labels,
                "creationTimestamp": rfc3339(self.wall),
                "ownerReferences": [{"uid": owner["metadata"]["uid"], "controller": True}],
            },
            "spec": {
                "avoided": owner["spec"].get("avoided", []),
                "image": owner["spec"].get("image"),
            },
            "status": {"phase": "Pending"},
        }
        self.silent_from.pop(name, None)

    def _schedule(self) -> None:
        for pod in self.pods.values():
            if pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
                continue
            for name, machine in self.machines.items():
                used = sum(_role(p) == "rank" for p in self.on(name))
                fits = _role(pod) != "rank" or used < machine.places
                if fits and not (
                    machine.not_ready or machine.cordoned or name in pod["spec"]["avoided"]
                ):
                    pod["spec"]["nodeName"] = name
                    break
            else:
                set_condition(
                    pod, "PodScheduled", False, self.wall, "Unschedulable", "0/3 nodes: no place"
                )

    def _kubelets(self) -> None:
        for name, pod in list(self.pods.items()):
            node = pod["spec"].get("nodeName")
            gone = seconds(pod["metadata"].get("deletionTimestamp"))
            if not node:
                if gone is not None:
                    del self.pods[name]
                continue
            machine = self.machines[node]
            if machine.not_ready:
                set_condition(pod, "Ready", False, self.wall)
            if not machine.kubelet:
                continue
            if gone is not None:
                ended = self.wall >= gone or not running(pod)
                if ended and not pod["metadata"].get("finalizers"):
                    del self.pods[name]
                continue
            if (
                pod["status"]["phase"] == "Pending"
                and pod["spec"]["image"] not in self.missing_images
            ):
                pod["status"]["phase"] = "Running"
                set_condition(pod, "Initialized", True, self.wall)
                set_condition(pod, "Ready", False, self.wall)
                pod["loaded"] = self.wall + LOAD_SECONDS
        for pod in self.pods.values():
            if running(pod) and self.machines[pod["spec"]["nodeName"]].kubelet:
                if pod["spec"]["image"] in self.broken_images:
                    self._crash_loop(pod)
                set_condition(pod, "Ready", self._serves(pod), self.wall)

    def _crash_loop(self, pod: Manifest) -> None:
        """It ends at its start, and the kubelet waits ten seconds before the next try."""
        if self.wall >= pod["loaded"]:
            self.crash(pod, 1, "RuntimeError: this image is broken")
            pod["loaded"] = self.wall + 10

    def _serves(self, pod: Manifest) -> bool:
        if pod["spec"]["image"] in self.broken_images or self.wall < pod.get("loaded", 0):
            return False
        if _role(pod) != "rank":
            return True
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        manifest = next((m for m in self.live.values() if m["metadata"]["uid"] == owner), None)
        wanted = manifest["spec"]["replicas"] if manifest else 0
        here = [p for p in self.members(pod) if "deletionTimestamp" not in p["metadata"]]
        return len(here) >= wanted and all(self.wall >= p.get("loaded", 0) for p in here)


def _role(pod: Manifest) -> str:
    return str(pod.get("metadata", {}).get("labels", {}).get(names.COMPONENT, ""))


def running(pod: Manifest) -> bool:
    return bool(pod["status"]["phase"] == "Running")


def ready(pod: Manifest) -> bool:
    return any(
        c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())
    )


def set_condition(
    pod: Manifest, kind: str, value: bool, wall: float, reason: str = "", message: str = ""
) -> None:
    """Set a condition of a pod; its time moves only when its status changes."""
    held = pod["status"].setdefault("conditions", [])
    text = "True" if value else "False"
    for condition in held:
        if condition["type"] == kind:
            if condition["status"] != text:
                condition |= {"status": text, "lastTransitionTime": rfc3339(wall)}
            condition |= {"reason": reason, "message": message}
            return
    held.append(
        {
            "type": kind,
            "status": text,
            "lastTransitionTime": rfc3339(wall),
            "reason": reason,
            "message": message,
        }
    )


def at(observed: Observed, **changes: Any) -> Observed:
    """The same sight with other clocks, nodes or bus."""
    return replace(observed, **changes)
