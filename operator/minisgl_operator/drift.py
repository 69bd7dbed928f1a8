"""Whether a live object still has what we set in it, and why a child was refused: pure functions.

The server fills defaults in, writes quantities another way and drops what is empty. What it and
others added is none of our business; only a field that we set and that reads differently is drift.
Manifests are dicts and lists of JSON's types: a `Mapping` takes ten times as long to ask for.
"""

import re
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from minisgl_operator.observed import Manifest

_MERGE_KEYS = ("name", "mountPath", "containerPort", "port", "ip", "uid", "topologyKey")
"""Server-side apply merges lists of objects by one of these: others may add elements."""
_QUANTITY = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$")
_OURS = ("metadata", "spec", "data", "stringData", "type", "revision")


def differs(manifest: Manifest, live: Manifest) -> str:
    """The path of the first field of `manifest` that `live` holds otherwise; "" if none does."""
    for part in _OURS:
        if part in manifest:
            path = _differs(manifest[part], live.get(part), part)
            if path:
                return path
    return ""


def _differs(wanted: Any, held: Any, path: str) -> str:
    if isinstance(wanted, dict):
        if not isinstance(held, dict):
            return "" if _empty(wanted) and not held else path
        for key, value in wanted.items():
            found = _differs(value, held.get(key), f"{path}.{key}")
            if found:
                return found
        return ""
    if isinstance(wanted, list):
        return _list_differs(wanted, held, path)
    if wanted == held and isinstance(wanted, bool) == isinstance(held, bool):
        return ""
    if _empty(wanted) and held is None:
        return ""
    return "" if _same_quantity(wanted, held) else path


def _list_differs(wanted: list[Any], held: Any, path: str) -> str:
    if not isinstance(held, list):
        return "" if not wanted and not held else path
    key = _merge_key(wanted)
    if key is None:
        if len(wanted) != len(held):
            return path
        pairs = list(zip(wanted, held, strict=True))
    else:
        by_key = {_identity(one, key): one for one in held if isinstance(one, dict)}
        pairs = [(one, by_key.get(_identity(one, key))) for one in wanted]
    for index, (mine, theirs) in enumerate(pairs):
        found = _differs(mine, theirs, f"{path}[{index}]")
        if found:
            return found
    return ""


def _merge_key(items: list[Any]) -> str | None:
    if not items or not all(isinstance(one, dict) for one in items):
        return None
    for key in _MERGE_KEYS:
        if all(key in one for one in items):
            identities = [_identity(one, key) for one in items]
            return key if len(set(identities)) == len(identities) else None
    return None


def _identity(one: dict[str, Any], key: str) -> tuple[str, str]:
    """Ports merge by number and protocol, all else by one key."""
    return str(one.get(key)), str(one.get("protocol", "TCP")) if "ort" in key else ""


def _empty(value: Any) -> bool:
    """What the server drops: nothing, empty text, zero, false, or a structure of such."""
    if isinstance(value, dict):
        return all(_empty(one) for one in value.values())
    return not value


def _same_quantity(wanted: Any, held: Any) -> bool:
    """Whether both are quantities, and equal: 1024Mi is 1Gi."""
    pair = (str(wanted), str(held))
    if isinstance(wanted, bool) or isinstance(held, bool) or held is None:
        return False
    if not all(_QUANTITY.match(one) for one in pair):
        return False
    return _amount(pair[0]) == _amount(pair[1])


def _amount(quantity: str) -> Decimal:
    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]


def reason_of(status: int, message: str, kind: str) -> str:
    """The reason of condition Degraded for a child that the server refused.

    Server-side apply answers 500 "field not declared in schema" for an unknown field.
    """
    text = message.lower()
    if "exceeded quota" in text or "exceeds quota" in text:
        return "QuotaExceeded"
    if "violates podsecurity" in text:
        return "PodSecurityForbidden"
    templated = kind in ("Deployment", "StatefulSet", "Job", "ControllerRevision")
    if status in (400, 422) or "not declared in schema" in text or "failed to create typed" in text:
        return "InvalidPodTemplate" if templated else "Forbidden"
    return "Forbidden"
