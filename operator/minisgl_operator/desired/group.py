"""The StatefulSet of one TP group in one of its lives.

A revision's template names no group: the labels of group and epoch are empty in it, wherever they
occur, and `filled` puts them in. So the template that a set was made of can be read back from it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_operator import names
from minisgl_operator.api import MiniSGLang
from minisgl_operator.desired import parts
from minisgl_operator.observed import Manifest

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_NODE_NAME = "metadata.name"


def labels(index: str, epoch: str) -> dict[str, str]:
    """Labels of one group in one of its lives; empty ones are to be filled in."""
    return {names.GROUP_INDEX: index, names.EPOCH: epoch}


def filled(blank: Manifest, index: int, epoch: int, avoided: Sequence[str]) -> Manifest:
    """A revision's template for one group in one of its lives, away from the avoided nodes."""
    result = _labelled(blank, labels(str(index), str(epoch)))
    affinity = result["spec"].get("affinity") or {}
    if avoided and _is_affinity(affinity):
        result["spec"]["affinity"] = _avoiding(affinity, avoided)
    return result


def blanked(template: Manifest) -> Manifest:
    """The inverse of `filled`."""
    result = _labelled(template, labels("", ""))
    affinity = _anywhere(result["spec"].pop("affinity", {}))
    return {**result, "spec": {**result["spec"], **({"affinity": affinity} if affinity else {})}}


def group_set(
    obj: MiniSGLang,
    revision: str,
    template: Manifest,
    index: int,
    epoch: int,
    replicas: int,
    annotations: Mapping[str, str],
) -> Manifest:
    """The StatefulSet around a template that is filled."""
    group = labels(str(index), str(epoch))
    child = parts.child(obj, "apps/v1", "StatefulSet", names.group_set(obj, index, epoch), "rank")
    child["metadata"]["labels"] |= {names.REVISION: revision, **group}
    child["metadata"]["annotations"] = dict(annotations)
    return {
        **child,
        "spec": {
            "replicas": replicas,
            "serviceName": names.ranks(obj),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": {**names.selector(obj, "rank"), **group}},
            "template": template,
        },
    }


def service(obj: MiniSGLang) -> Manifest:
    """The headless Service that StatefulSets want. No rank needs its names."""
    return {
        **parts.child(obj, "v1", "Service", names.ranks(obj), "rank"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(obj, "rank"),
        },
    }


def _labelled(value: Any, given: Mapping[str, str]) -> Any:
    """A copy in which these labels have these values wherever they are keys."""
    if isinstance(value, dict):  # a Mapping takes three times as long to ask for
        return {k: given[k] if k in given else _labelled(v, given) for k, v in value.items()}
    if isinstance(value, list):
        return [_labelled(one, given) for one in value]
    return value


def _is_affinity(given: Any) -> bool:
    """Whether its terms can be read; the server refuses what is written otherwise."""
    if not isinstance(given, dict) or not isinstance(given.get("nodeAffinity") or {}, dict):
        return False
    required = (given.get("nodeAffinity") or {}).get(_REQUIRED) or {}
    terms = (required.get("nodeSelectorTerms") or []) if isinstance(required, dict) else None
    return isinstance(terms, list) and all(
        isinstance(term, dict) and isinstance(term.get("matchFields", []), list) for term in terms
    )


def _avoiding(affinity: Manifest, avoided: Sequence[str]) -> Manifest:
    # A field's requirement takes exactly one value; terms are alternatives, so each gets all.
    fields = [
        {"key": _NODE_NAME, "operator": "NotIn", "values": [node]} for node in sorted(set(avoided))
    ]
    terms = _node_terms(affinity) or [{}]
    terms = [{**term, "matchFields": [*term.get("matchFields", []), *fields]} for term in terms]
    return _with_node_terms(affinity, terms)


def _anywhere(affinity: Manifest) -> Manifest:
    terms = []
    for term in _node_terms(affinity):
        fields = [
            one for one in term.get("matchFields", [])
            if (one.get("key"), one.get("operator")) != (_NODE_NAME, "NotIn")
        ]  # fmt: skip
        rest = {k: v for k, v in term.items() if k != "matchFields"}
        terms.append({**rest, **({"matchFields": fields} if fields else {})})
    return _with_node_terms(affinity, [term for term in terms if term])


def _node_terms(affinity: Manifest) -> list[Manifest]:
    required = (affinity.get("nodeAffinity") or {}).get(_REQUIRED) or {}
    return list(required.get("nodeSelectorTerms") or [])


def _with_node_terms(affinity: Manifest, terms: list[Manifest]) -> Manifest:
    nodes = {k: v for k, v in (affinity.get("nodeAffinity") or {}).items() if k != _REQUIRED}
    if terms:
        nodes[_REQUIRED] = {"nodeSelectorTerms": terms}
    rest = {k: v for k, v in affinity.items() if k != "nodeAffinity"}
    return {**rest, **({"nodeAffinity": nodes} if nodes else {})}
