"""When a group must be created anew, what ended it, and how long it waits before.

Containers restart in place first, and the ranks form again by themselves; the operator re-creates a
group only where that does not help. Evictions and lost nodes are not the group's fault: they count
as restarts, but neither wait nor spend the budget.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from minisgl_operator.observed import Manifest
from minisgl_operator.plan.groups import LET_GO, Life, Survey
from minisgl_operator.plan.memory import MESSAGE_CHARACTERS, Failure, Memory
from minisgl_operator.plan.pods import RANK, Pod
from minisgl_operator.times import seconds

BURST_SECONDS = 60.0
"""Exits within so long of each other have one cause: the first of them."""
STABLE_SECONDS = 600.0

_CODES = {3: "PeerLost", 4: "StepStalled", 5: "Replaced", 6: "PeerRestarted"}
"""Exit codes of a rank that say why it ended itself (docs/reliability.md)."""
_CONSEQUENCES = ("PeerLost", "Replaced", "PeerRestarted")
"""Ends of a rank that another one caused."""
_EVICTIONS = {"PreemptionByScheduler": "Preempted", "DeletionByTaintManager": "NodeTainted"}
_ERROR_LINE = re.compile(r"^(?!\s)[\w.]*(Error|Exception|Interrupt|Exit)\b.*", re.MULTILINE)
_CALM_LINE = re.compile(r"""^.*\blevel"?[=:]\s*"?(debug|info|warning)\b.*$""", re.I | re.MULTILINE)
_ERROR_WORD = re.compile(r"^.*\b(error|fatal|failed|cannot|out of memory)\b.*", re.I | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a group's present life is over."""

    failure: Failure
    event: str
    """A sentence for the Event."""
    counts: bool
    """Whether it waits and spends the budget: not for a node lost or a pod evicted."""


def first_line(text: str) -> str:
    """The line of a termination message that says most: the exception's own, not the stack above
    it, and not what was logged after it, nor a warning on the way there."""
    found = _ERROR_LINE.search(text) or _ERROR_WORD.search(_CALM_LINE.sub("", text))
    if found:
        return found[0].strip()[:MESSAGE_CHARACTERS]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MESSAGE_CHARACTERS] if lines else ""


def crash(survey: Survey, life: Life) -> Failure | None:
    """The last failure of a group, with what its pods tell now: the first exit of the last burst.

    Peers of a rank that died end themselves; their exits are taken only for want of another, and
    give way to the cause when it is reported late."""
    kept = life.memory.last_failure
    born = seconds((life.set or {}).get("metadata", {}).get("creationTimestamp"))
    earlier = kept is not None and born is not None and kept.time <= born
    exits = sorted(_exits(survey, life.pods), key=lambda failure: (failure.time, failure.rank))
    for found in exits:
        if kept is None or earlier or found.time > kept.time + BURST_SECONDS:
            kept, earlier = found, False
        elif (
            kept.reason in _CONSEQUENCES
            and found.reason not in _CONSEQUENCES
            and found.time > kept.time - BURST_SECONDS
        ):
            kept = found
    return kept


def ending(survey: Survey, life: Life, decided: float) -> Ending | None:
    """Whether a current life must be replaced; None: not, or the policy forbids it.

    `decided`: the Unix time that is written down where the cause has none of its own."""
    policy = survey.observed.obj.spec.failure_policy
    if policy.restart_policy == "None" or not life.started:
        return None
    wall = float(int(decided))
    for pod in life.pods:
        if pod.node in survey.lost:
            why = f"node {pod.node} is lost: {survey.lost[pod.node]}"
            failure = _of_pod(survey, pod, wall, "NodeLost", why)
            return Ending(failure, f"group {life.index}: {why}", counts=False)
    for pod in survey.pods:
        if pod.deleting is None and survey.let_go(pod) == life.set:
            failure = _of_pod(survey, pod, wall, "LabelsChanged", LET_GO)
            # The set's controller could not make it again for as long as it is there, and then
            # might not try for many minutes.
            return Ending(failure, f"group {life.index}: pod {pod.name}: {LET_GO}", counts=False)
    for pod in life.pods:
        evicted = pod.disrupted
        if pod.phase == "Failed" and not pod.killed:
            status: Manifest = pod.manifest.get("status") or {}
            reason = re.sub(r"\W", "", status.get("reason") or "") or "PodFailed"
            why = first_line(status.get("message") or "")
            failure = _of_pod(survey, pod, wall, reason, why)
            return Ending(failure, f"group {life.index}: {failure.sentence()}", counts=True)
        if evicted is not None:
            reason = _EVICTIONS.get(str(evicted.get("reason")), "Evicted")
            why = str(evicted.get("message") or "the pod was evicted")[:MESSAGE_CHARACTERS]
            failure = _of_pod(survey, pod, wall, reason, why)
            return Ending(failure, f"group {life.index}: pod {pod.name}: {why}", counts=False)
        if pod.stuck(survey.observed.wall):
            by = f"nobody removes its finalizer {', '.join(pod.finalizers[:4])}"
            if not pod.finalizers:
                by = "its node does not remove it"
            why = f"the pod hangs Terminating: {by}"
            failure = _of_pod(survey, pod, wall, "TerminationStuck", why)
            return Ending(failure, f"group {life.index}: pod {pod.name}: {why}", counts=False)
    if policy.restart_policy == "RecreateGroup":
        for pod in life.pods:
            if pod.exited:
                why = f"a rank of pod {pod.name} has ended"
                newest = _newest(survey, life)
                found = newest or _of_pod(survey, pod, wall, "RankExited", why)
                return Ending(found, f"group {life.index}: {_with(why, newest)}", counts=True)
    deadline = start_deadline(survey, life)
    if deadline is not None and survey.observed.wall >= deadline:
        limit = policy.startup_timeout_seconds
        why = f"it did not serve within {limit} s of its start"
        newest = _newest(survey, life)
        found = newest or Failure(wall, "StartupTimeout", why)
        return Ending(found, f"group {life.index}: {_with(why, newest)}", counts=True)
    return None


def _with(why: str, exit_: Failure | None) -> str:
    return f"{why}; {exit_.sentence()}" if exit_ else why


def start_deadline(survey: Survey, life: Life) -> float | None:
    """Until when (Unix time) a life must serve, again if it did; None while it serves, and while
    one of its pods is Pending or downloads: that can last."""
    since = survey.silent_since(life)
    if since is None or not life.started or survey.serves(life):
        return None
    return since + survey.observed.obj.spec.failure_policy.startup_timeout_seconds


def stable_seconds(survey: Survey) -> float:
    """How long a group must serve before what it spent is forgotten."""
    return max(STABLE_SECONDS, 2.0 * survey.observed.obj.spec.failure_policy.backoff_max_seconds)


def backoff(survey: Survey, spent: int) -> float:
    """Seconds before the next re-creation, after `spent` ones without a stable time between."""
    policy = survey.observed.obj.spec.failure_policy
    if spent == 0:
        return 0.0
    doubled = policy.backoff_base_seconds * 2 ** min(spent - 1, 30)
    return float(min(policy.backoff_max_seconds, doubled))


def exhausted(survey: Survey, spent: int) -> bool:
    """Whether one more re-creation would exceed the budget."""
    most = survey.observed.obj.spec.failure_policy.max_group_restarts
    return most is not None and spent >= most


def present(survey: Survey, life: Life) -> Memory:
    """The memory of a current life, brought up to now."""
    memory = life.memory
    failure = crash(survey, life)
    wall = float(int(survey.observed.wall))
    if not survey.serves(life):
        failed = memory.failed and exhausted(survey, memory.spent)
        spent = 0 if _stable(survey, memory) else memory.spent
        return replace(memory, last_failure=failure, served=None, failed=failed, spent=spent)
    served = memory.served if memory.served is not None else wall
    memory = replace(memory, last_failure=failure, served=served, has_served=True, failed=False)
    return replace(memory, spent=0) if _stable(survey, memory) else memory


def after(survey: Survey, life: Life, end: Ending, wall: float) -> Memory:
    """The memory of the life that follows one that failed. `wall`: when that was decided."""
    memory = present(survey, life)
    spent = memory.spent
    wait = backoff(survey, spent) if end.counts else 0.0
    return Memory(
        restarts=memory.restarts + 1,
        spent=spent + 1 if end.counts else spent,
        last_restart=float(int(wall)),
        last_failure=end.failure,
        has_served=memory.has_served,
        not_before=float(int(wall + wait)),
    )


def replaced(memory: Memory) -> Memory:
    """The memory of a life that follows one of its own accord: another revision."""
    return Memory(
        restarts=memory.restarts,
        last_restart=memory.last_restart,
        last_failure=memory.last_failure,
        has_served=memory.has_served,
    )


def _stable(survey: Survey, memory: Memory) -> bool:
    served = memory.served
    return served is not None and survey.observed.wall - served >= stable_seconds(survey)


def _exits(survey: Survey, pods: Iterable[Pod]) -> Iterable[Failure]:
    """Each end of a rank's container that the pods still tell of, except those with code 0."""
    for pod in pods:
        for status in pod.containers():
            if status.get("name") != RANK:
                continue
            for state in (status.get("lastState") or {}, status.get("state") or {}):
                ended = state.get("terminated") or {}
                time = seconds(ended.get("finishedAt"))
                if time is None or not ended.get("exitCode"):
                    continue
                reason = str(ended.get("reason") or "Error")
                if reason == "Error":
                    reason = _CODES.get(ended["exitCode"], reason)
                message = first_line(str(ended.get("message") or ""))
                found = _of_pod(survey, pod, float(int(time)), reason, message)
                yield replace(found, exit_code=ended["exitCode"])


def _newest(survey: Survey, life: Life) -> Failure | None:
    """The exit that this life tells of, rather than one remembered from a life before."""
    fresh = replace(life, memory=Memory())
    return crash(survey, fresh)


def _of_pod(survey: Survey, pod: Pod, time: float, reason: str, message: str) -> Failure:
    ranks = survey.observed.obj.spec.parallelism.gpus_per_pod
    return Failure(
        time=time,
        reason=reason[:64],
        message=message[:MESSAGE_CHARACTERS],
        rank=pod.ordinal * ranks,
        pod=pod.name,
        node=pod.node,
    )
