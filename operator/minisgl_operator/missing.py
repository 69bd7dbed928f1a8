"""What the cluster lacks for the operator to begin: its own kind, or rights, said in one sentence.

At the start a refusal is a fault of the installation, which no wait mends; later it is one of many
failures of an API server, and is tried again.
"""

import re
from collections.abc import Sequence

from minisgl_operator import api
from minisgl_operator.kube import RESOURCES, ApiError

TRIES = 4
"""Refusals in a row before one is believed: rights and kinds that were made a moment ago are not
known to the whole of an API server yet."""
_RIGHT = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" '
    r'in API group "(?P<group>[^"]*)" '
    r'(?:at the cluster scope|in the namespace "(?P<namespace>[^"]+)")'
)


class Missing(Exception):
    """The operator cannot begin: one sentence for who installs it, exit code 3."""


def is_lack(error: ApiError) -> bool:
    """Whether an error tells of a missing right or kind."""
    return error.status in (403, 404)


def missing(refused: Sequence[tuple[str, ApiError]]) -> Missing:
    """The sentence for these kinds and what the server said of each."""
    unknown = sorted({kind for kind, error in refused if error.status == 404})
    forbidden = [error.message for kind, error in refused if error.status != 404]
    parts = [_unknown(kind) for kind in unknown]
    if forbidden:
        parts.append(_forbidden(forbidden))
    return Missing("; ".join(parts))


def _unknown(kind: str) -> str:
    resource = RESOURCES[kind]
    if kind == api.KIND:
        return (
            f"the CustomResourceDefinition {api.PLURAL}.{api.GROUP} is not installed: "
            "`helm upgrade --install` of the chart applies it"
        )
    return (
        f"the API server has no {resource.plural} of {resource.version}: "
        "the operator needs Kubernetes 1.29 or newer"
    )


def _forbidden(messages: Sequence[str]) -> str:
    rules: dict[str, dict[tuple[str, str], set[str]]] = {}
    """By role: verbs of (API group, resource)."""
    user, others = "the operator's account", []
    for message in messages:
        if (found := _RIGHT.search(message)) is None:
            others.append(message)
            continue
        user = found["user"]
        place = found["namespace"]
        role = f"a Role in namespace {place}" if place else "a ClusterRole"
        verbs = {"list", "watch"} if found["verb"] == "list" else {found["verb"]}
        rule = rules.setdefault(role, {}).setdefault((found["group"], found["resource"]), set())
        rule |= verbs
    said = [
        f"{role} with " + ", ".join(_rule(*what, verbs) for what, verbs in sorted(held.items()))
        for role, held in sorted(rules.items())
    ]
    if not said:
        return f"the API server refuses what the operator must read: {'; '.join(others)}"
    return (
        f"{user} lacks rights: bind it to {' and '.join(said)} "
        "(`helm upgrade` with rbac.create=true does so)"
    )


def _rule(group: str, resource: str, verbs: set[str]) -> str:
    return (
        f'{{apiGroups: ["{group}"], resources: [{resource}], verbs: [{", ".join(sorted(verbs))}]}}'
    )
