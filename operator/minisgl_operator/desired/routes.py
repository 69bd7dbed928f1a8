"""The way from outside: an Ingress or an HTTPRoute, both made for streams."""

from minisgl_operator.api import HttpRoute, Ingress, MiniSGLang
from minisgl_operator.desired import parts
from minisgl_operator.observed import Manifest, Settings

_NGINX = "nginx.ingress.kubernetes.io"
BODY_SIZE = "16m"
"""What the gateway takes by default; nginx alone would refuse more than 1 MB."""


def children(obj: MiniSGLang, settings: Settings) -> list[Manifest]:
    """At most one. An HTTPRoute needs a cluster that knows it."""
    if obj.spec.ingress is not None:
        return [_ingress(obj, obj.spec.ingress)]
    if obj.spec.http_route is not None and settings.gateway_api:
        return [_http_route(obj, obj.spec.http_route)]
    return []


def _ingress(obj: MiniSGLang, spec: Ingress) -> Manifest:
    seconds = str(obj.spec.gateway.request_timeout_seconds)
    child = parts.child(obj, "networking.k8s.io/v1", "Ingress", obj.name, "gateway")
    child["metadata"]["annotations"] = {
        f"{_NGINX}/proxy-buffering": "off",
        f"{_NGINX}/proxy-read-timeout": seconds,
        f"{_NGINX}/proxy-send-timeout": seconds,
        f"{_NGINX}/proxy-body-size": BODY_SIZE,
        **spec.annotations,
    }
    backend = {"service": {"name": obj.name, "port": {"name": "http"}}}
    path = {"path": spec.path, "pathType": "Prefix", "backend": backend}
    tls = [{"hosts": [spec.host], "secretName": spec.tls_secret_name}]
    return {
        **child,
        "spec": parts.without_empty(
            {
                "ingressClassName": spec.class_name,
                "tls": tls if spec.tls_secret_name else None,
                "rules": [{"host": spec.host, "http": {"paths": [path]}}],
            }
        ),
    }


def _http_route(obj: MiniSGLang, spec: HttpRoute) -> Manifest:
    child = parts.child(
        obj, "gateway.networking.k8s.io/v1", "HTTPRoute", obj.name, "gateway"
    )  # fmt: skip
    if spec.annotations:
        child["metadata"]["annotations"] = dict(spec.annotations)
    parents = [
        parts.without_empty(
            {
                "group": "gateway.networking.k8s.io",
                "kind": "Gateway",
                "name": parent.name,
                "namespace": parent.namespace,
                "sectionName": parent.section_name,
            }
        )
        for parent in spec.parent_refs
    ]
    backend = {"group": "", "kind": "Service", "name": obj.name, "port": 80, "weight": 1}
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": spec.path}}],
        "backendRefs": [backend],
        "timeouts": {"request": f"{obj.spec.gateway.request_timeout_seconds}s"},
    }
    return {
        **child,
        "spec": parts.without_empty(
            {"parentRefs": parents, "hostnames": spec.hostnames, "rules": [rule]}
        ),
    }
