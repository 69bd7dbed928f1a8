"""The status of an object: what is there, told as data. Nothing else writes a status."""

from collections import Counter
from typing import Any

from minisgl_operator import names
from minisgl_operator.api import MiniSGLang
from minisgl_operator.desired import served_name
from minisgl_operator.observed import Desired, Key, Manifest, Observed
from minisgl_operator.plan.failure import present
from minisgl_operator.plan.groups import Survey
from minisgl_operator.status.conditions import conditions, merged, settled
from minisgl_operator.times import rfc3339

LISTED = 64
"""Groups in the list; all are counted in groupPhases."""
_ATTENTION = ("Failed", "Restarting", "Pending", "Starting", "Draining", "Ready")


def status(observed: Observed, desired: Desired) -> dict[str, Any]:
    """The whole status, equal to the last one if nothing has changed."""
    obj = observed.obj
    survey = Survey(observed, desired)
    phases = {index: survey.phase(index) for index in survey.groups}
    serving = [i for i, phase in phases.items() if phase == "Ready"]
    revision = observed.live.get(
        Key("ControllerRevision", names.controller_revision(obj, desired.revision))
    )
    kept = (revision or {}).get("metadata", {}).get("annotations") or {}
    current = survey.current.values()
    found = {
        "observedGeneration": obj.metadata.generation,
        "replicas": len(survey.current),
        "readyReplicas": len(serving),
        "updatedReplicas": sum(life.revision == desired.revision for life in current),
        "groupRestarts": sum(life.memory.restarts for life in current),
        "selector": _selector(obj),
        "url": url(obj),
        "servedModel": served_name(obj),
        "modelRevision": kept.get(names.COMMIT),
        "image": kept.get(names.IMAGE) or obj.spec.image,
        "currentRevision": _reached(survey),
        "updateRevision": desired.revision,
        "components": _components(observed),
        "groupPhases": dict(sorted(Counter(phases.values()).items())),
        "groups": _groups(survey, phases),
        "conditions": merged(obj, observed.wall, conditions(survey)),
    }
    return {key: value for key, value in found.items() if value not in (None, "")}


def url(obj: MiniSGLang) -> str:
    """Where clients send requests: the ingress or route, else the Service."""
    spec = obj.spec
    if spec.ingress is not None:
        scheme = "https" if spec.ingress.tls_secret_name else "http"
        return f"{scheme}://{spec.ingress.host}{spec.ingress.path.rstrip('/')}"
    if spec.http_route is not None:
        hosts = [host for host in spec.http_route.hostnames if not host.startswith("*")]
        if hosts:
            return f"http://{hosts[0]}{spec.http_route.path.rstrip('/')}"
    return f"http://{obj.name}.{obj.namespace}.svc"


def _selector(obj: MiniSGLang) -> str:
    """The pod of rank 0 of each group: an HPA then averages over groups."""
    labels = {**names.selector(obj, "rank"), names.POD_INDEX: "0"}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _reached(survey: Survey) -> str:
    """The revision of the last finished rollout: after a loss of the status, what groups say."""
    wanted = survey.desired.revision
    before = str(survey.observed.obj.status.get("currentRevision") or "")
    if settled(survey):
        return wanted
    if before:
        return before
    old = Counter(x.revision for x in survey.current.values() if x.revision != wanted)
    return old.most_common(1)[0][0] if old else ""


def _components(observed: Observed) -> dict[str, dict[str, int]]:
    found = {}
    for role in ("gateway", "tokenizer", "detokenizer", "redis"):
        live = observed.live.get(Key("Deployment", f"{observed.obj.name}-{role}"))
        if live is None:
            continue
        told: Manifest = live.get("status") or {}
        keys = ("replicas", "readyReplicas", "updatedReplicas")
        found[role] = {key: int(told.get(key) or 0) for key in keys}
    return found


def _groups(survey: Survey, phases: dict[int, Any]) -> list[dict[str, Any]]:
    """Those that need attention first, then by index."""
    order = sorted(phases, key=lambda index: (_ATTENTION.index(phases[index]), index))
    found = [_group(survey, index, phases[index]) for index in order[:LISTED]]
    return [*_absent(survey), *found][:LISTED]


def _absent(survey: Survey) -> list[dict[str, Any]]:
    """Groups whose set somebody deleted, and that cannot be created yet (their model is on its
    way): only the status remembers them."""
    obj = survey.observed.obj
    missing = max(0, obj.group_indices_wanted - len(survey.current))
    told = [g for g in obj.status.get("groups") or () if g["index"] not in survey.groups]
    kept = ("index", "epoch", "revision", "ranks", "restarts", "lastRestartTime", "lastFailure")
    return [
        {**{key: g[key] for key in kept if key in g}, "phase": "Pending", "readyRanks": 0}
        for g in sorted(told, key=lambda g: int(g["index"]))[:missing]
    ]


def _group(survey: Survey, index: int, phase: str) -> dict[str, Any]:
    observed = survey.observed
    group = survey.groups[index]
    life = group.current or group.lives[-1]
    memory = present(survey, life) if group.current else group.memory
    per_pod = observed.obj.spec.parallelism.gpus_per_pod
    ranks = survey.ranks(life)
    limit = observed.obj.spec.failure_policy.heartbeat_timeout_seconds
    if observed.bus.state in ("ok", "full"):
        here = {pod.name for pod in life.pods}
        beating = sum(w.silent < limit and w.pod in here for w in ranks)
    else:
        beating = per_pod * sum(pod.serves for pod in life.pods)
    meeting = observed.bus.meetings.get(names.bus_group(index, life.epoch))
    rank0 = next((w for w in ranks if w.id.endswith("/0")), None)
    found = {
        "index": index,
        "epoch": life.epoch if group.current else group.next_epoch - 1,
        "revision": life.revision,
        "incarnation": meeting.incarnation[:16] if meeting else None,
        "phase": phase,
        "readyRanks": beating,
        "ranks": life.size * per_pod,
        "restarts": memory.restarts,
        "lastRestartTime": None if memory.last_restart is None else rfc3339(memory.last_restart),
        "lastFailure": memory.last_failure.as_status() if memory.last_failure else None,
        "nodes": sorted({pod.node for pod in life.pods if pod.node})[:64] or None,
        "transport": (rank0.transport[:64] or None) if rank0 else None,
    }
    if observed.bus.state == "starting":  # nobody has asked yet: what was told holds
        for told in observed.obj.status.get("groups") or ():
            if _same(told, found):
                found |= {key: told.get(key) for key in ("incarnation", "transport")}
    return {key: value for key, value in found.items() if value is not None}


def _same(told: Manifest, found: Manifest) -> bool:
    """Whether both speak of one life of one group."""
    return all(told.get(key) == found[key] for key in ("index", "epoch"))
