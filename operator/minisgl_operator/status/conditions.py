"""The conditions of an object. Their types and reasons are those that the CRD lists.

A condition that is True for the better has a reason of its own; the CRD lists those that name a
trouble. Types that do not apply to an object (a route that it has not) are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from minisgl_operator import names
from minisgl_operator.api import MiniSGLang
from minisgl_operator.observed import Key, Manifest
from minisgl_operator.plan.groups import Life, Survey
from minisgl_operator.status.causes import (
    Trouble,
    download_trouble,
    downloading,
    troubles,
    unheard_ranks,
    unready_beside,
    unscheduled,
)
from minisgl_operator.times import rfc3339, seconds

MESSAGE_CHARACTERS = 4096
"""Below what the CRD admits: a condition is one sentence, and an object must stay small."""
TYPES = (
    "Ready",
    "Progressing",
    "Degraded",
    "ModelCached",
    "RedisReady",
    "RanksReady",
    "TokenizersReady",
    "DetokenizersReady",
    "GatewayReady",
    "RouteReady",
    "FastTransport",
)
_SLACK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


def conditions(survey: Survey) -> list[Condition]:
    """All that apply, as of now."""
    found = troubles(survey)
    model = _model(survey, found)
    redis = _unasked(survey, _redis(survey, found))
    roles = [_role(survey, role, found) for role in ("tokenizer", "detokenizer", "gateway")]
    return [
        _ready(survey, model, redis, roles, found),
        _progressing(survey, found),
        _degraded(found),
        *([model] if model else []),
        redis,
        _ranks(survey),
        *roles,
        *_route(survey),
        *(_unasked(survey, one) for one in _transport(survey)),
    ]


def merged(obj: MiniSGLang, wall: float, found: list[Condition]) -> list[dict[str, Any]]:
    """As they are written: the time of the last change is kept where the status is what it was,
    and conditions of types that are not the operator's stay."""
    before = {c.get("type"): c for c in obj.status.get("conditions") or ()}
    written = []
    for condition in found:
        held = before.get(condition.type) or {}
        same = held.get("status") == condition.status and held.get("lastTransitionTime")
        written.append(
            {
                "type": condition.type,
                "status": condition.status,
                "observedGeneration": obj.metadata.generation,
                "lastTransitionTime": same or rfc3339(wall),
                "reason": condition.reason,
                "message": condition.message[:MESSAGE_CHARACTERS],
            }
        )
    return written + [held for kind, held in before.items() if kind not in TYPES]


def _unasked(survey: Survey, found: Condition) -> Condition:
    """What the bus would tell is what the status says already, until this operator, which has just
    started, has asked: else each of its starts would be an outage of every object."""
    observed = survey.observed
    managed = observed.obj.spec.redis.managed is not None
    if observed.bus.state != "starting" or (managed and not _some_ready(survey, "RedisReady")):
        return found
    for told in observed.obj.status.get("conditions") or ():
        if told.get("type") == found.type and not observed.obj.spec.suspend:
            return Condition(found.type, told["status"], told["reason"], told["message"])
    return found


def settled(survey: Survey) -> bool:
    """Whether all that is wanted is there: each group of the wanted revision serves, and nothing
    older is left but what cannot go."""
    wanted = survey.observed.obj.group_indices_wanted
    lives = survey.current.values()
    if len(lives) != wanted or not all(
        life.revision == survey.desired.revision and survey.answers(life) for life in lives
    ):
        return False
    return not any(survey.blocked(index) for index in survey.groups)


# --- the summary ----------------------------------------------------------------------------------


def _ready(
    survey: Survey,
    model: Condition | None,
    redis: Condition,
    roles: list[Condition],
    found: list[Trouble],
) -> Condition:
    obj, spec = survey.observed.obj, survey.observed.obj.spec

    def no(reason: str, message: str) -> Condition:
        return Condition("Ready", "False", reason, message)

    if spec.suspend:
        return no("Suspended", "spec.suspend is true: no pod runs")
    if spec.replicas == 0:
        return no("ScaledToZero", "spec.replicas is 0: the gateway answers 503 with Retry-After")
    serving = [i for i, life in survey.current.items() if survey.answers(life)]
    updated = [i for i in serving if survey.current[i].revision == survey.desired.revision]
    if not serving and model is not None and model.status == "False":
        return no("ModelDownloading", model.message)
    if redis.status == "False":
        return no("RedisUnavailable", redis.message)
    for role in reversed(roles):  # the gateway's own first
        if role.status == "False" and not _some_ready(survey, role.type):
            return no("GatewayUnavailable", role.message)
    if updated:
        return Condition(
            "Ready",
            "True",
            "Serving",
            f"{_share(len(serving), spec.replicas)} {obj.name}",
        )
    if serving:
        return no(
            "WaitingForRanks",
            f"{_count(len(serving), 'group')} of an older revision {_serve(len(serving))}, none of "
            f"revision {survey.desired.revision} yet{_because(found)}",
        )
    capacity = next((t for t in found if t.reason == "InsufficientCapacity"), None)
    if capacity is not None:
        return no("InsufficientCapacity", capacity.message)
    phases = {survey.phase(index) for index in survey.current}
    if phases & {"Restarting", "Failed"}:
        return no("GroupRestarting", f"no group serves{_because(found)}")
    return no("WaitingForRanks", f"no group serves yet{_because(found) or _waits(survey)}")


def _progressing(survey: Survey, found: list[Trouble]) -> Condition:
    spec = survey.observed.obj.spec
    wanted = survey.observed.obj.group_indices_wanted
    lives = survey.current.values()
    draining = [i for i in survey.groups if survey.blocked(i)]
    if spec.suspend and not survey.pods:
        return Condition("Progressing", "False", "Suspended", "spec.suspend is true: no pod runs")
    if settled(survey):
        text = f"{_share(wanted, wanted)} revision {survey.desired.revision}"
        return Condition("Progressing", "False", "RolloutComplete", text)
    serving = sum(survey.answers(life) for life in lives)
    stalled = [life for life in lives if _stalled(survey, life)]
    phases = {survey.phase(life.index) for life in lives}
    if stalled and not phases & {"Starting", "Restarting", "Draining"}:
        which = ", ".join(str(life.index) for life in stalled[:8])
        return Condition(
            "Progressing",
            "False",
            "ProgressDeadlineExceeded",
            f"{_share(serving, wanted)}, and nothing moves; stuck: {which}" + _because(found),
        )
    old = [life for life in lives if life.revision != survey.desired.revision]
    if len(lives) != wanted or (draining and len(survey.groups) > len(lives)):
        reason, text = "Scaling", f"from {len(lives)} to {_count(wanted, 'group')}"
        if len(lives) == wanted:
            gone = len(survey.groups) - wanted
            end = "ends" if gone == 1 else "end"
            text = f"{_count(gone, 'group')} that {_are(gone)} not wanted any more {end}"
    elif old:
        done = len(lives) - len(old)
        reason = "RollingOut"
        text = (
            f"{done} of {_count(wanted, 'group')} {_are(wanted)} of revision "
            f"{survey.desired.revision}"
        )
    else:
        reason, text = "Starting", _share(serving, wanted)
    return Condition("Progressing", "True", reason, text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _serve(number: int) -> str:
    return "serves" if number == 1 else "serve"


def _share(serving: int, wanted: int) -> str:
    return f"{serving} of {_count(wanted, 'group')} {_serve(wanted)}"


def _stalled(survey: Survey, life: Life) -> bool:
    """Whether a group has no way on by itself, or has had its time to find a place."""
    phase = survey.phase(life.index)
    if phase == "Failed":
        return True
    if phase != "Pending" or not life.started or life.set is None:
        return False
    born = seconds(life.set["metadata"].get("creationTimestamp"))
    limit = survey.observed.obj.spec.failure_policy.startup_timeout_seconds + _SLACK_SECONDS
    if any(downloading(pod) for pod in life.pods):
        return False  # that has its own time limit
    return born is not None and survey.observed.wall - born > limit


def _degraded(found: list[Trouble]) -> Condition:
    if not found:
        return Condition("Degraded", "False", "AsWanted", "nothing is known to be wrong")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Condition("Degraded", "True", found[0].reason, found[0].message + more)


def _because(found: list[Trouble], child: str = "") -> str:
    """What to mend first; of the troubles of one child and its pods alone, if its name is given."""
    return next((f": {one.message}" for one in found if child in one.message), "")


def _waits(survey: Survey) -> str:
    """What the first group that does not serve waits for."""
    for index, life in survey.current.items():
        if not life.started:
            return f": group {index} waits for its turn"
        for pod in life.pods:
            if said := unscheduled(survey, pod):
                return f": {said}"
        if len(life.pods) < life.size:
            return f": group {index} has {len(life.pods)} of {_count(life.size, 'pod')}"
        if all(pod.serves for pod in life.pods):
            return f": {unheard_ranks(index)}"
        if said := unready_beside(life):
            return f": {said}"
        return f": group {index} loads the model"
    if not survey.desired.model_ready:
        return ": the model is not there yet"
    return ""


# --- the parts ------------------------------------------------------------------------------------


def _model(survey: Survey, found: list[Trouble]) -> Condition | None:
    if not survey.observed.obj.spec.model.uri.startswith("hf://"):
        return None
    uri = survey.observed.obj.spec.model.uri
    pods = [pod for pod in survey.pods if pod.deleting is None]
    fetching = [pod for pod in pods if downloading(pod)]
    for pod in pods:
        trouble = download_trouble(pod)
        if trouble is not None and (pod.role != "model" or not survey.desired.model_ready):
            return Condition("ModelCached", "False", trouble.reason, f"{uri}: {trouble.message}")
    if survey.desired.model_ready and not fetching:
        return Condition("ModelCached", "True", "Cached", f"{uri} is where the ranks look for it")
    for key, job in survey.observed.live.items():
        if key.kind != "Job" or survey.desired.model_ready:
            continue
        for told in (job.get("status") or {}).get("conditions") or ():
            if told.get("type") == "Failed" and told.get("status") == "True":
                text = f"{uri}: Job {key.name}: {told.get('message', 'it failed')}"
                return Condition("ModelCached", "False", "DownloadFailed", text)
    child = fetching[0].name if fetching else f"{survey.observed.obj.name}-model-"
    if why := _because(found, child):
        return Condition("ModelCached", "False", "Downloading", f"{uri} is not being fetched{why}")
    where = f" in pod {child}" if fetching else ""
    return Condition("ModelCached", "False", "Downloading", f"{uri} is being fetched{where}")


def _redis(survey: Survey, found: list[Trouble]) -> Condition:
    bus = survey.observed.bus
    managed = survey.observed.obj.spec.redis.managed is not None
    what = f"Redis {names.redis(survey.observed.obj)}" if managed else "the external Redis"
    said = f": {bus.message}" if bus.message else ""
    if survey.observed.obj.spec.suspend and managed:
        return Condition("RedisReady", "Unknown", "NotObservable", f"{what} is suspended")
    if bus.state == "ok":
        return Condition("RedisReady", "True", "Answering", f"{what} answers")
    if bus.state == "not-observable":
        text = f"{what} cannot be reached from the operator; the workers may well{said}"
        return Condition("RedisReady", "Unknown", "NotObservable", text)
    reason, text = {
        "full": ("Full", f"{what} takes no writes"),
        "auth-failed": ("AuthFailed", f"{what} refuses the password"),
        "unreachable": ("Unreachable", f"{what} does not answer"),
    }.get(bus.state, ("Starting", f"{what} has not been heard yet"))
    if reason == "Unreachable" and managed and not _some_ready(survey, "RedisReady"):
        reason, text = "Starting", f"{what} has no ready pod yet"
        said = _because(found, names.redis(survey.observed.obj)) or said
    return Condition("RedisReady", "False", reason, text + said)


def _ranks(survey: Survey) -> Condition:
    wanted = survey.observed.obj.group_indices_wanted
    serving = sum(survey.answers(life) for life in survey.current.values())
    text = _share(serving, wanted)
    if serving >= wanted:
        return Condition("RanksReady", "True", "PodsReady", text)
    phases = ", ".join(
        f"{index}: {survey.phase(index)}"
        for index, life in list(survey.current.items())
        if not survey.answers(life)
    )
    return Condition(
        "RanksReady", "False", "PodsNotReady", f"{text}; {phases[:500]}" if phases else text
    )


_DEPLOYMENTS = {
    "GatewayReady": "gateway",
    "TokenizersReady": "tokenizer",
    "DetokenizersReady": "detokenizer",
    "RedisReady": "redis",
}


def _deployment(survey: Survey, role: str) -> tuple[str, int, int]:
    """Name, ready pods and wanted pods of a role. Pods of a lost node are not ready, nor are those
    that do not speak on the bus."""
    key = Key("Deployment", f"{survey.observed.obj.name}-{role}")
    live = survey.observed.live.get(key)
    wanted = ((live or {}).get("spec") or {}).get("replicas", 1)
    here = [pod for pod in survey.pods if pod.role == role and pod.node not in survey.lost]
    silent = role != "redis"
    ready = sum(pod.serves and not (silent and survey.unheard(pod)) for pod in here)
    return key.name, ready, wanted


def _some_ready(survey: Survey, kind: str) -> bool:
    return _deployment(survey, _DEPLOYMENTS[kind])[1] > 0


def _role(survey: Survey, role: str, found: list[Trouble]) -> Condition:
    kind = {value: key for key, value in _DEPLOYMENTS.items()}[role]
    name, ready, wanted = _deployment(survey, role)
    text = f"Deployment {name}: {ready} of {_count(wanted, 'pod')} {_are(wanted)} ready"
    if unheard := [pod.name for pod in survey.pods if pod.role == role and survey.unheard(pod)]:
        text += f" and heard of in Redis; not heard of: {', '.join(unheard[:4])}"
    if ready >= wanted and (ready > 0 or survey.observed.obj.spec.suspend):
        return Condition(kind, "True", "PodsReady", text)
    return Condition(kind, "False", "PodsNotReady", text + _because(found, name))


def _route(survey: Survey) -> Iterator[Condition]:
    obj = survey.observed.obj
    if obj.spec.ingress is not None:
        live = survey.observed.live.get(Key("Ingress", obj.name))
        told = ((live or {}).get("status") or {}).get("loadBalancer") or {}
        if told.get("ingress"):
            text = f"Ingress {obj.name} has an address"
            yield Condition("RouteReady", "True", "Admitted", text)
        else:
            text = f"Ingress {obj.name} has no address: no ingress controller has taken it up"
            yield Condition("RouteReady", "False", "NotAdmitted", text)
    elif obj.spec.http_route is not None:
        if not survey.observed.settings.gateway_api:
            text = "spec.httpRoute needs the Gateway API, whose CRDs this cluster has not"
            yield Condition("RouteReady", "False", "GatewayAPIMissing", text)
        else:
            yield _http_route(obj, survey.observed.live.get(Key("HTTPRoute", obj.name)))


def _http_route(obj: MiniSGLang, live: Manifest | None) -> Condition:
    parents = ((live or {}).get("status") or {}).get("parents") or []
    told = [c for parent in parents for c in parent.get("conditions") or ()]
    refused = next((c for c in told if c.get("status") == "False"), None)
    if told and refused is None:
        text = f"HTTPRoute {obj.name} is accepted by its Gateway"
        return Condition("RouteReady", "True", "Admitted", text)
    said = refused.get("message", "") if refused else "no Gateway has taken it up"
    return Condition("RouteReady", "False", "NotAdmitted", f"HTTPRoute {obj.name}: {said}")


def _transport(survey: Survey) -> Iterator[Condition]:
    """Of groups with ranks that could talk over NVLink."""
    spec = survey.observed.obj.spec
    if spec.engine.device != "cuda" or spec.parallelism.tensor == 1:
        return
    chosen: dict[int, str] = {}
    slow: list[int] = []
    for index, life in survey.current.items():
        rank0 = next((w for w in survey.ranks(life) if w.id.endswith("/0") and w.transport), None)
        if rank0 is None:
            continue
        chosen[index] = rank0.transport
        ways = rank0.transport.split(", ")  # such as "P2P/CUMEM", or "NET/IB/0 between nodes"
        if any("Socket" in way.split("/") for way in ways if " between " not in way):
            slow.append(index)
    if slow:
        yield Condition(
            "FastTransport",
            "False",
            "SocketWithinNode",
            f"ranks of one node talk over sockets in group {', '.join(map(str, slow[:8]))}: see "
            "ranks.sharedMemory",
        )
    elif chosen:
        text = f"NCCL chose {', '.join(sorted(set(chosen.values())))}"
        yield Condition("FastTransport", "True", "Measured", text)
    else:
        text = "no group has told yet what NCCL chose"
        yield Condition("FastTransport", "Unknown", "NotMeasured", text)
