"""How many pods a drain of nodes may take at once.

All budgets are numbers of pods that must be there. Percentages and `maxUnavailable` make the
controller look for the owner of each pod, and fail for all pods as long as one whose StatefulSet is
gone hangs ("found no controllers").
"""

from minisgl_operator import names
from minisgl_operator.desired import parts
from minisgl_operator.desired.revision import Revision
from minisgl_operator.observed import Manifest, Observed


def children(observed: Observed, revision: Revision | None) -> list[Manifest]:
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
        pods = revision.pods if revision else spec.parallelism.pods
        least = max(0, pods * _groups_that_have_served(observed) - 1)
        found.append(_budget(observed, names.ranks(obj), "rank", least))
    return found


def _groups_that_have_served(observed: Observed) -> int:
    """By index: one that is being re-created counts, one that never served does not."""
    served = set()
    for key, live in observed.live.items():
        place = names.parse_set(observed.obj, key.name) if key.kind == "StatefulSet" else None
        metadata = live["metadata"]
        notes = metadata.get("annotations") or {}
        if (
            place
            and notes.get(names.HAS_SERVED) == "true"
            and not metadata.get("deletionTimestamp")
        ):
            served.add(place[0])
    return len(served)


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
