"""Who may connect to which pod. Probes are the kubelet's, which no policy stops."""

from collections.abc import Sequence

from minisgl_operator import names
from minisgl_operator.api import MiniSGLang
from minisgl_operator.desired import parts
from minisgl_operator.desired.bus import PORT
from minisgl_operator.desired.services import GATEWAY_PORT
from minisgl_operator.observed import Manifest, Settings


def children(obj: MiniSGLang, settings: Settings) -> list[Manifest]:
    """One policy for each kind of pod."""
    own = {"podSelector": {"matchLabels": _pods(obj)}}
    found = [
        _policy(obj, names.gateway(obj), ["gateway"], [{"ports": _ports(GATEWAY_PORT)}]),
        # Those of hostNetwork are beyond every policy.
        _policy(obj, names.ranks(obj), ["rank"], [{"from": [own]}]),
        _policy(obj, names.closed(obj), ["tokenizer", "detokenizer", "model"], []),
    ]
    if obj.spec.redis.managed is not None:
        rule: Manifest = {"ports": _ports(PORT)}
        # Pods of hostNetwork match no podSelector. Where nobody says which addresses nodes have,
        # the password alone keeps strangers out.
        if settings.node_cidrs or not obj.spec.network.host_network:
            rule["from"] = [own, *_operator(settings), *_nodes(obj, settings)]
        found.append(_policy(obj, names.redis(obj), ["redis"], [rule]))
    return found


def _operator(settings: Settings) -> list[Manifest]:
    namespace = settings.operator_namespace
    labels = {"kubernetes.io/metadata.name": namespace}
    return [{"namespaceSelector": {"matchLabels": labels}}] if namespace else []


def _nodes(obj: MiniSGLang, settings: Settings) -> list[Manifest]:
    if not obj.spec.network.host_network:
        return []
    return [{"ipBlock": {"cidr": cidr}} for cidr in settings.node_cidrs]


def _policy(obj: MiniSGLang, name: str, roles: Sequence[str], ingress: list[Manifest]) -> Manifest:
    which = {"key": names.COMPONENT, "operator": "In", "values": list(roles)}
    return {
        **parts.child(obj, "networking.k8s.io/v1", "NetworkPolicy", name, roles[0]),
        "spec": parts.without_empty(
            {
                "podSelector": {"matchLabels": _pods(obj), "matchExpressions": [which]},
                "policyTypes": ["Ingress"],
                "ingress": ingress,
            }
        ),
    }


def _pods(obj: MiniSGLang) -> dict[str, str]:
    """All pods of the object."""
    labels = names.selector(obj, "")
    del labels[names.COMPONENT]
    return labels


def _ports(port: int) -> list[Manifest]:
    return [{"port": port, "protocol": "TCP"}]
