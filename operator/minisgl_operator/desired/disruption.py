"""How many pods a drain of nodes may take at once.

All budgets are numbers of pods that must be there. Percentages and `maxUnavailable` make the
controller look for the owner of each pod, and fail for all pods as long as one whose StatefulSet is
gone hangs ("found no controllers").
"""

from minisgl_operator import names
from minisgl_operator.desired import parts
from minisgl_operator.observed import Manifest, Observed


def children(observed: Observed) -> list[Manifest]:
    """One for each role that has more than one of something, and for all ranks together."""
    obj = observed.obj
    spec = obj.spec
    found = []
    if not spec.suspend:
        for role, name, replicas in (
            ("gateway", names.gateway(obj), spec.gateway.replicas),
            ("tokenizer", names.tokenizer(obj), spec.tokenizer.replicas),
            ("detokenizer", names.detokenizer(obj), spec.detokenizer.replicas),
        ):
            if replicas >= 2:
                found.append(_budget(observed, name, role, replicas - 1))
    if obj.group_indices_wanted >= 2:
        # Readiness is the group's: after one eviction all its pods may go, and no others.
        least = max(0, sum(_pods_that_have_served(observed).values()) - 1)
        found.append(_budget(observed, names.ranks(obj), "rank", least))
    return found


def _pods_that_have_served(observed: Observed) -> dict[int, int]:
    """Pods of each group that once served, by index: one between two lives counts as well."""
    served: dict[int, int] = {}
    for key, live in observed.live.items():
        place = names.parse_set(observed.obj, key.name) if key.kind == "StatefulSet" else None
        metadata = live["metadata"]
        notes = metadata.get("annotations") or {}
        if not place or metadata.get("deletionTimestamp"):
            continue
        pods = names.pods_of(notes)
        if notes.get(names.HAS_SERVED) == "true" and pods is not None:
            served[place[0]] = pods
    return served


def _budget(observed: Observed, name: str, role: str, least: int) -> Manifest:
    obj = observed.obj
    return {
        **parts.child(obj, "policy/v1", "PodDisruptionBudget", name, role),
        "spec": {
            "minAvailable": least,
            "selector": {"matchLabels": names.selector(obj, role)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
