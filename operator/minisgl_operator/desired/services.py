"""The gateway, the tokenizer and the detokenizer: Deployments that roll without a failed request.

A new pod is ready before an old one leaves, and an old gateway goes on taking requests for some
seconds, because proxies send to it until they have heard that it leaves.
"""

from collections.abc import Sequence

from minisgl_operator import names
from minisgl_operator.api import MiniSGLang, PodTemplate, Resources
from minisgl_operator.desired import model, parts
from minisgl_operator.desired.bus import connection, secret_volume
from minisgl_operator.desired.overlay import lay_over, lay_over_init
from minisgl_operator.desired.revision import Revision
from minisgl_operator.observed import Key, Manifest, Observed

GATEWAY_PORT = 8000
LEAVE_SECONDS = 5
"""How long a gateway that is to end still takes new requests."""
TOKENIZER_GRACE = 30
START_SECONDS = 300
"""For reading a tokenizer from a slow disk."""
_KEYS = "/etc/minisgl/keys"


def gateway(observed: Observed, revision: Revision | None) -> Manifest | None:
    """The gateways' Deployment; None before there is anything that it could run."""
    obj = observed.obj
    spec = obj.spec.gateway
    template = None if revision is None else _gateway_template(obj, revision)
    return _deployment(observed, "gateway", names.gateway(obj), spec.replicas, template)


def tokenizer(observed: Observed, revision: Revision | None) -> Manifest | None:
    """The tokenizers' Deployment; None as for `gateway`."""
    obj = observed.obj
    spec = obj.spec.tokenizer
    template = None
    if revision is not None:
        template = _worker_template(
            obj, revision, "tokenizer", TOKENIZER_GRACE, spec.resources, spec.pod_template
        )
    return _deployment(observed, "tokenizer", names.tokenizer(obj), spec.replicas, template)


def detokenizer(observed: Observed, revision: Revision | None) -> Manifest | None:
    """The detokenizers' Deployment; None as for `gateway`."""
    obj = observed.obj
    spec = obj.spec.detokenizer
    template = None
    if revision is not None:
        # It stays until the ranks have finished what they hold.
        grace = obj.spec.ranks.termination_grace_period_seconds + 10
        template = _worker_template(
            obj, revision, "detokenizer", grace, spec.resources, spec.pod_template
        )
    return _deployment(observed, "detokenizer", names.detokenizer(obj), spec.replicas, template)


def service(obj: MiniSGLang) -> Manifest:
    """The endpoint inside the cluster."""
    return {
        **parts.child(obj, "v1", "Service", obj.name, "gateway"),
        "spec": {
            "selector": names.selector(obj, "gateway"),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def root_path(obj: MiniSGLang) -> str | None:
    """The prefix that the ingress or route leaves on every path."""
    route = obj.spec.ingress or obj.spec.http_route
    return route.path if route and route.path != "/" else None


def _gateway_template(obj: MiniSGLang, revision: Revision) -> Manifest:
    spec = obj.spec.gateway
    grace = spec.termination_grace_period_seconds
    keys = spec.api_keys_secret_ref
    health = {"httpGet": {"path": "/health", "port": "http"}}
    arguments = parts.flags(
        {
            "host": "0.0.0.0",
            "port": GATEWAY_PORT,
            "served-model-name": model.served_name(obj),
            "root-path": root_path(obj),
            "api-keys-file": f"{_KEYS}/keys" if keys else None,
            # The field is for all gateways together.
            "max-queued-requests": -(-spec.max_queued_requests // max(1, spec.replicas)),
            "request-timeout-seconds": spec.request_timeout_seconds,
            "max-attempts": spec.max_attempts,
        }
    )
    volumes, mounts = [], []
    if keys:
        volumes.append(secret_volume("api-keys", keys.name, {keys.key: "keys"}))
        mounts.append({"name": "api-keys", "mountPath": _KEYS, "readOnly": True})
    leave = min(LEAVE_SECONDS, grace // 2)
    return _template(
        obj, revision, "gateway", grace, arguments, spec.resources, spec.pod_template,
        container={
            "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
            "startupProbe": parts.probe(health, 1, START_SECONDS),
            # Not /ready: without a group it is still the gateway that answers, and says when to
            # try again.
            "readinessProbe": parts.probe(health, 2, 2),
            "livenessProbe": parts.probe(health, 10, 6),
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(leave)]}}},
        },
        volumes=volumes, mounts=mounts, health=False,
    )  # fmt: skip


def _worker_template(
    obj: MiniSGLang,
    revision: Revision,
    role: str,
    grace: int,
    resources: Resources,
    user: PodTemplate,
) -> Manifest:
    silence = obj.spec.failure_policy.heartbeat_timeout_seconds
    alive = parts.alive(2 * silence)
    return _template(
        obj, revision, role, grace, parts.flags({"health-dir": parts.HEALTH}), resources, user,
        container={
            "startupProbe": parts.probe(alive, 2, START_SECONDS // 2, parts.CLEAN_SECONDS),
            "readinessProbe": parts.probe(parts.serves(silence), 5, 2),
            "livenessProbe": parts.probe(alive, 10, 3),
        },
        volumes=[], mounts=[], health=True,
    )  # fmt: skip


def _template(
    obj: MiniSGLang,
    revision: Revision,
    role: str,
    grace: int,
    arguments: Sequence[str],
    resources: Resources,
    user: PodTemplate,
    *,
    container: Manifest,
    volumes: list[Manifest],
    mounts: list[Manifest],
    health: bool,
) -> Manifest:
    """A pod of one of the three roles; its container is called as the role."""
    bus = connection(obj)
    source = model.files(obj, revision.image, revision.commit, weights=False)
    scratch, scratch_mounts = parts.scratch(health)
    shared = parts.flags(
        {
            **bus.flags,
            "id": "$(POD_NAME)",
            "pod": "$(POD_NAME)",
            "model": source.path,
            "heartbeat-timeout-seconds": obj.spec.failure_policy.heartbeat_timeout_seconds,
            "drain-seconds": parts.drain_seconds(grace),
        }
    )
    environment = {**parts.CACHE_ENV, **parts.OFFLINE_ENV, **parts.NO_GPU_ENV}
    main = parts.container(
        obj, role, revision.image, resources,
        {
            **parts.command([role, *shared, *arguments], health=health, find=source.find),
            "env": [parts.POD_NAME, *parts.env(environment)],
            "volumeMounts": [*scratch_mounts, *bus.mounts, *source.mounts, *mounts],
            **container,
        },
    )  # fmt: skip
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector(obj, role)},
        "matchLabelKeys": ["pod-template-hash"],
    }
    template = parts.pod_template(
        obj, role,
        {
            "terminationGracePeriodSeconds": grace,
            "initContainers": source.init,
            "containers": [main],
            "volumes": [*scratch, *bus.volumes, *source.volumes, *volumes],
            "topologySpreadConstraints": [spread],
        },
    )  # fmt: skip
    download = obj.spec.model.download.pod_template
    template["spec"] = lay_over_init(template["spec"], model.CONTAINER, download)
    return lay_over(template, user)


def _deployment(
    observed: Observed, role: str, name: str, replicas: int, template: Manifest | None
) -> Manifest | None:
    """Without a template the live Deployment is kept as it is: what it runs is better than none."""
    obj = observed.obj
    child = parts.child(obj, "apps/v1", "Deployment", name, role)
    if template is None:
        live = observed.live.get(Key("Deployment", name))
        if live is None:
            return None
        template = live["spec"]["template"]
        signature = (live["metadata"].get("annotations") or {}).get(names.APPLIED, "")
        child["metadata"]["annotations"] = {names.APPLIED: signature}
    return {
        **child,
        "spec": {
            "replicas": 0 if obj.spec.suspend else replicas,
            "revisionHistoryLimit": 2,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "selector": {"matchLabels": names.selector(obj, role)},
            "template": template,
        },
    }
