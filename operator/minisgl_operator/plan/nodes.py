"""Which nodes are lost: long before Kubernetes says so, and never on one witness alone.

Two witnesses count: the workers on the node, by their beats on the bus, and the node itself, by
its readiness and its Lease. A dead kubelet over live ranks is no loss, nor are ranks that hang
under a live kubelet. Incarnations make it harmless to be wrong: a group that was given up and lives
on disturbs nobody.
"""

from collections.abc import Iterable, Mapping

from minisgl_operator.observed import Bus, Node, Observed, Worker
from minisgl_operator.plan.pods import Pod
from minisgl_operator.times import seconds

SILENT_SECONDS = 10.0
"""Silence of every worker on a node."""
LEASE_SECONDS = 20.0
"""A Lease that stood still so long: two renewals are missing."""
LEASE_ALONE_SECONDS = 40.0
"""The same where the bus tells nothing: what Kubernetes' own default was for years."""


def lost_nodes(observed: Observed, pods: Iterable[Pod]) -> dict[str, str]:
    """The lost ones among the nodes of this object's pods, each with the reason as a sentence."""
    there: dict[str, list[Pod]] = {}
    for pod in pods:
        if pod.node:
            there.setdefault(pod.node, []).append(pod)
    workers: dict[str, list[Worker]] = {}
    for worker in observed.bus.workers:
        workers.setdefault(worker.pod, []).append(worker)

    if observed.nodes is None:
        heartbeat = observed.obj.spec.failure_policy.heartbeat_timeout_seconds
        return {
            node: f"every worker on it is silent for {heartbeat} s while its pods say Ready"
            for node, held in there.items()
            if _silent_though_ready(observed, held, workers, heartbeat)
        }
    if _control_plane_ill(observed.nodes):
        return {}
    lost = {}
    for name, held in there.items():
        node = observed.nodes.get(name)
        why = _away(node)
        if why and _unheard(observed, node, held, workers):
            lost[name] = why
    return lost


def returned(observed: Observed, name: str, lost: Mapping[str, str], leftover: set[str]) -> bool:
    """Whether a node that was lost can be used again. `leftover`: nodes with pods of old epochs."""
    if name in lost:
        return False
    if observed.nodes is None:  # a kubelet that works removes what was deleted
        return name not in leftover
    node = observed.nodes.get(name)
    return node is not None and not _away(node) and not node.unschedulable


def redis_pod_silent(bus: Bus, held: Iterable[Pod], limit: float) -> bool:
    """Whether a managed Redis is among these pods and has not answered for so long."""
    return (
        bus.state in ("unreachable", "starting")
        and bus.unread >= limit
        and any(pod.role == "redis" for pod in held)
    )


def _control_plane_ill(nodes: Mapping[str, Node]) -> bool:
    ages = [node.lease_age for node in nodes.values() if node.lease_age is not None]
    return 2 * sum(age >= LEASE_SECONDS for age in ages) > len(ages)


def _away(node: Node | None) -> str:
    """What the API server says of a node that may be lost; empty if all is well."""
    if node is None:
        return "it is no longer in the cluster and nothing on it answers"
    if not node.ready:
        return "it is NotReady and nothing on it answers"
    if node.lease_age is not None and node.lease_age >= LEASE_SECONDS:
        return f"its Lease stands still for {LEASE_SECONDS:.0f} s and nothing on it answers"
    return ""


def _unheard(
    observed: Observed,
    node: Node | None,
    held: list[Pod],
    workers: Mapping[str, list[Worker]],
) -> bool:
    bus = observed.bus
    if redis_pod_silent(bus, held, SILENT_SECONDS):
        return True
    heard = [worker for pod in held for worker in workers.get(pod.name, ())]
    if bus.state == "ok" and heard:
        return all(worker.silent >= SILENT_SECONDS for worker in heard)
    # Nobody there has ever spoken, or nobody can be heard: the Lease alone counts. A bus that
    # could be read a moment ago may come back and show that the ranks live.
    if bus.state not in ("ok", "full") and bus.unread < LEASE_ALONE_SECONDS:
        return False
    if node is None:  # gone; unless it has just joined, and its pods are known before it
        return all(_age(observed, pod) >= LEASE_ALONE_SECONDS for pod in held)
    # This operator and this Redis may both be new, their predecessors on the lost node: then
    # Kubernetes has said NotReady after a silence of its own, and workers that live had time to
    # speak to the new Redis.
    known = not node.ready and bus.state == "ok" and bus.readable >= SILENT_SECONDS
    limit = LEASE_SECONDS if known else LEASE_ALONE_SECONDS
    return node.lease_age is not None and node.lease_age >= limit


def _age(observed: Observed, pod: Pod) -> float:
    return observed.wall - (seconds(pod.manifest["metadata"].get("creationTimestamp")) or 0.0)


def _silent_though_ready(
    observed: Observed,
    held: list[Pod],
    workers: Mapping[str, list[Worker]],
    heartbeat: float,
) -> bool:
    """Without a word on nodes: a probe that still succeeds over a worker that does not beat means
    that nobody probes."""
    bus = observed.bus
    if not any(
        pod.ready and observed.wall - (pod.ready_since or observed.wall) >= heartbeat
        for pod in held
    ):
        return False
    # `workers`: this operator could read that Redis once, so no NetworkPolicy is between.
    if bus.workers and redis_pod_silent(bus, held, heartbeat):
        return True
    heard = [worker for pod in held for worker in workers.get(pod.name, ())]
    return (
        bus.state in ("ok", "full")
        and bool(heard)
        and all(worker.silent >= heartbeat for worker in heard)
    )
