"""What a cluster has beside its nodes: DNS, an ingress controller, volumes. All are plain dicts.

DNS and ingress run on every node, so that the loss of one takes away neither: each node asks its
own DNS server, and the ingress answers at the address of every node.
"""

from pathlib import Path
from typing import Any

from tests.cluster.network import address
from tests.cluster.node import MODELS, VOLUMES

COREDNS_IMAGE, TRAEFIK_IMAGE = "localhost/coredns:1.14.7", "localhost/traefik:3.6.12"
GATEWAY = "traefik"
"""Namespace and name of the Gateway, and the name of the IngressClass, the default one."""
VOLUME_COUNT = 12
_DNS_IP = "10.96.0.10"
_COREFILE = """\
.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        ttl 5
    }
    cache 5
    reload
}
"""

Manifest = dict[str, Any]


def image_files(tools: Path) -> dict[str, tuple[str, dict[str, Path]]]:
    """For each image of this module the Dockerfile and the files that it copies."""
    found = {}
    for name, program in ((COREDNS_IMAGE, "coredns"), (TRAEFIK_IMAGE, "traefik")):
        text = f'FROM scratch\nCOPY {program} /{program}\nENTRYPOINT ["/{program}"]\n'
        found[name] = (text, {program: tools / program})
    return found


def dns() -> list[Manifest]:
    """CoreDNS on each node, and the Service that all pods ask."""
    rules = [
        _rule([""], ["endpoints", "services", "pods", "namespaces"], ["list", "watch"]),
        _rule(["discovery.k8s.io"], ["endpointslices"], ["list", "watch"]),
    ]
    container = {
        "name": "coredns",
        "image": COREDNS_IMAGE,
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [
            {"name": "dns", "containerPort": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "containerPort": 53, "protocol": "TCP"},
        ],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "dnsPolicy": "Default",
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    service = {
        "clusterIP": _DNS_IP,
        "selector": {"app": "coredns"},
        # Each node asks its own server: one that is lost would swallow every other question.
        "internalTrafficPolicy": "Local",
        "ports": [
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        ],
    }
    where = "kube-system"
    return [
        *_account("coredns", where, rules),
        _object("v1", "ConfigMap", "coredns", where, data={"Corefile": _COREFILE}),
        _daemon("coredns", where, pod),
        _object("v1", "Service", "kube-dns", where, spec=service),
    ]


def ingress(nodes: int) -> list[Manifest]:
    """Traefik on each node's port 80, for Ingresses and, with one Gateway, for HTTPRoutes."""
    gateway_kinds = ["gatewayclasses", "gateways", "httproutes", "grpcroutes"]
    gateway_kinds += ["referencegrants", "backendtlspolicies"]
    read = ["get", "list", "watch"]
    rules = [
        _rule([""], ["services", "secrets", "nodes", "configmaps", "namespaces", "pods"], read),
        _rule(["discovery.k8s.io"], ["endpointslices"], read),
        _rule(["networking.k8s.io"], ["ingresses", "ingressclasses"], read),
        _rule(["networking.k8s.io"], ["ingresses/status"], ["update"]),
        _rule(["gateway.networking.k8s.io"], gateway_kinds, read),
        _rule(
            ["gateway.networking.k8s.io"], [f"{kind}/status" for kind in gateway_kinds], ["update"]
        ),
    ]
    container = {
        "name": "traefik",
        "image": TRAEFIK_IMAGE,
        "args": [
            "--entrypoints.web.address=:80",
            "--entrypoints.traefik.address=:9000",
            "--ping=true",
            "--global.checknewversion=false",
            "--global.sendanonymoususage=false",
            "--providers.kubernetesingress=true",
            f"--providers.kubernetesingress.ingressendpoint.ip={address(1)}",
            "--providers.kubernetesgateway=true",
            f"--providers.kubernetesgateway.statusaddress.ip={address(1)}",
        ],
        "readinessProbe": {"httpGet": {"path": "/ping", "port": 9000}, "periodSeconds": 1},
    }
    pod = {
        "serviceAccountName": "traefik",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "containers": [container],
    }
    ingress_class = _object(
        "networking.k8s.io/v1",
        "IngressClass",
        GATEWAY,
        spec={"controller": "traefik.io/ingress-controller"},
    )
    ingress_class["metadata"]["annotations"] = {
        "ingressclass.kubernetes.io/is-default-class": "true"
    }
    listener = {
        "name": "http",
        "protocol": "HTTP",
        "port": 80,
        "allowedRoutes": {"namespaces": {"from": "All"}},
    }
    api = "gateway.networking.k8s.io/v1"
    where = GATEWAY
    return [
        _object("v1", "Namespace", where),
        *_account("traefik", where, rules),
        ingress_class,
        _object(
            api, "GatewayClass", GATEWAY, spec={"controllerName": "traefik.io/gateway-controller"}
        ),
        _object(
            api,
            "Gateway",
            GATEWAY,
            where,
            spec={"gatewayClassName": GATEWAY, "listeners": [listener]},
        ),
        _daemon("traefik", where, pod),
    ]


def model_claim(namespace: str) -> list[Manifest]:
    """The claim `models` of a namespace: the models of this machine, read-only, on each node."""
    volume = f"models-{namespace}"
    size = "10Gi"
    return [
        _object(
            "v1",
            "PersistentVolume",
            volume,
            spec={
                "capacity": {"storage": size},
                "accessModes": ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce"],
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": namespace, "name": "models"},
                "hostPath": {"path": MODELS, "type": "Directory"},
            },
        ),
        _object(
            "v1",
            "PersistentVolumeClaim",
            "models",
            namespace,
            spec={
                "storageClassName": "",
                "volumeName": volume,
                "accessModes": ["ReadOnlyMany"],
                "resources": {"requests": {"storage": size}},
            },
        ),
    ]


def volumes() -> list[Manifest]:
    """The default StorageClass and empty volumes of it, which every node sees, for any claim."""
    storage = _object(
        "storage.k8s.io/v1", "StorageClass", "standard", provisioner="kubernetes.io/no-provisioner"
    )
    storage["metadata"]["annotations"] = {"storageclass.kubernetes.io/is-default-class": "true"}
    found = [storage]
    for number in range(VOLUME_COUNT):
        spec = {
            "capacity": {"storage": "100Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "storageClassName": "standard",
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"{VOLUMES}/{number}", "type": "Directory"},
        }
        found.append(_object("v1", "PersistentVolume", f"standard-{number}", spec=spec))
    return found


def _object(api: str, kind: str, name: str, namespace: str = "", **fields: Any) -> Manifest:
    metadata: Manifest = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def _rule(groups: list[str], resources: list[str], verbs: list[str]) -> Manifest:
    return {"apiGroups": groups, "resources": resources, "verbs": verbs}


def _account(name: str, namespace: str, rules: list[Manifest]) -> list[Manifest]:
    api = "rbac.authorization.k8s.io/v1"
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    return [
        _object("v1", "ServiceAccount", name, namespace),
        _object(api, "ClusterRole", name, rules=rules),
        _object(api, "ClusterRoleBinding", name, roleRef=role, subjects=[subject]),
    ]


def _daemon(name: str, namespace: str, pod: Manifest) -> Manifest:
    labels = {"app": name}
    spec = {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return _object("apps/v1", "DaemonSet", name, namespace, spec=spec)
