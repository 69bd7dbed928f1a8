"""The MiniSGLang object as types: what the CRD's schema admits, with its defaults filled in.

The API server has validated and defaulted what arrives here, so `parse` fails only for an object
that another version of the CRD admitted. A field's meaning is its description in the CRD
(helm/minisglang/templates/crd.yaml, or `kubectl explain minisglang.spec`); it is not told again
here. A revision is a hash of what is `changed`, the fields that differ from their defaults, so
that a field added later with a default rolls nobody.
"""

from functools import cache
from typing import Any, Literal

import msgspec

GROUP = "minisglang.io"
VERSION = "v1alpha1"
PLURAL = "minisglangs"
KIND = "MiniSGLang"
API_VERSION = f"{GROUP}/{VERSION}"

Quantity = str | int
"""A Kubernetes quantity, such as 16Gi."""


class _Struct(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    pass


class NameRef(_Struct, frozen=True):
    name: str


class TokenRef(_Struct, frozen=True):
    name: str
    key: str = "HF_TOKEN"


class KeysRef(_Struct, frozen=True):
    name: str
    key: str = "keys"


class CaRef(_Struct, frozen=True):
    name: str
    key: str = "ca.crt"


class SecretKey(_Struct, frozen=True):
    name: str
    key: str


class Resources(_Struct, frozen=True):
    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}
    claims: list[dict[str, Any]] = []


class TemplateMetadata(_Struct, frozen=True):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class PodTemplate(_Struct, frozen=True):
    metadata: TemplateMetadata = TemplateMetadata()
    spec: dict[str, Any] = {}
    """A part of a PodSpec, as written."""


class EmptyDirCache(_Struct, frozen=True):
    size_limit: Quantity | None = None


class ClaimCache(_Struct, frozen=True):
    claim_name: str
    sub_path: str = ""
    read_only: bool = False


class HostPathCache(_Struct, frozen=True):
    path: str


class Cache(_Struct, frozen=True):
    """Exactly one is set."""

    empty_dir: EmptyDirCache | None = None
    persistent_volume_claim: ClaimCache | None = None
    host_path: HostPathCache | None = None


class Download(_Struct, frozen=True):
    timeout_seconds: int = 14400
    resources: Resources = Resources()
    pod_template: PodTemplate = PodTemplate()


class Model(_Struct, frozen=True):
    uri: str
    revision: str | None = None
    sub_path: str | None = None
    served_name: str | None = None
    token_secret_ref: TokenRef | None = None
    cache: Cache | None = None
    download: Download = Download()


class Parallelism(_Struct, frozen=True):
    tensor: int = 1
    gpus_per_pod: int = 1

    @property
    def pods(self) -> int:
        """Pods of one group."""
        return self.tensor // self.gpus_per_pod


class Engine(_Struct, frozen=True):
    device: Literal["cuda", "cpu"] = "cuda"
    dtype: str | None = None
    memory_ratio: str | None = None
    max_running_requests: int | None = None
    max_seq_len: int | None = None
    max_prefill_tokens: int | None = None
    page_size: int | None = None
    attention_backend: str | None = None
    extra_args: list[str] = []


class PortRange(_Struct, frozen=True):
    start: int = 20000
    size: int = 256

    def __str__(self) -> str:
        """As `minisgl engine --port-range` takes it; both ends belong to it."""
        return f"{self.start}-{self.start + self.size - 1}"


class Rdma(_Struct, frozen=True):
    resource_name: str
    count: int = 1
    hca: str | None = None


class Network(_Struct, frozen=True):
    host_network: bool = True
    interface: str | None = None
    port_range: PortRange = PortRange()
    rdma: Rdma | None = None


class Storage(_Struct, frozen=True):
    size: Quantity
    storage_class_name: str | None = None


class ManagedRedis(_Struct, frozen=True):
    image: str | None = None
    max_memory: Quantity = "512Mi"
    storage: Storage | None = None
    tls_secret_name: str | None = None
    resources: Resources = Resources()
    pod_template: PodTemplate = PodTemplate()


class ExternalRedis(_Struct, frozen=True):
    address: str
    database: int = 0
    username: str | None = None
    password_secret_ref: SecretKey | None = None
    tls: bool = False
    ca_secret_ref: CaRef | None = None


class Redis(_Struct, frozen=True):
    """Exactly one is set."""

    managed: ManagedRedis | None = None
    external: ExternalRedis | None = None


class FailurePolicy(_Struct, frozen=True):
    restart_policy: Literal["RecreateGroup", "RecreateGroupAfterStart", "None"] = (
        "RecreateGroupAfterStart"
    )
    max_group_restarts: int | None = None
    backoff_base_seconds: int = 30
    backoff_max_seconds: int = 600
    startup_timeout_seconds: int = 1800
    heartbeat_timeout_seconds: int = 30


class RolloutStrategy(_Struct, frozen=True):
    type: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    max_unavailable: int = 1
    max_surge: int = 0


class Gateway(_Struct, frozen=True):
    replicas: int = 1
    api_keys_secret_ref: KeysRef | None = None
    max_queued_requests: int = 1024
    request_timeout_seconds: int = 3600
    max_attempts: int = 3
    termination_grace_period_seconds: int = 300
    resources: Resources = Resources()
    pod_template: PodTemplate = PodTemplate()


class TextWorker(_Struct, frozen=True):
    """The tokenizer, or the detokenizer."""

    replicas: int = 1
    resources: Resources = Resources()
    pod_template: PodTemplate = PodTemplate()


class Ranks(_Struct, frozen=True):
    resources: Resources = Resources()
    gpu_resource_name: str | None = None
    shared_memory: Literal["Auto", "HostPath", "EmptyDir"] = "Auto"
    shared_memory_size: Quantity = "8Gi"
    termination_grace_period_seconds: int = 120
    runtime_class_name: str | None = None
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    affinity: dict[str, Any] = {}
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    topology_key: str | None = None
    pod_template: PodTemplate = PodTemplate()


class Ingress(_Struct, frozen=True):
    host: str
    class_name: str | None = None
    path: str = "/"
    tls_secret_name: str | None = None
    annotations: dict[str, str] = {}


class ParentRef(_Struct, frozen=True):
    name: str
    namespace: str | None = None
    section_name: str | None = None


class HttpRoute(_Struct, frozen=True):
    parent_refs: list[ParentRef]
    hostnames: list[str] = []
    path: str = "/"
    annotations: dict[str, str] = {}


class Spec(_Struct, frozen=True):
    model: Model
    image: str | None = None
    image_pull_policy: str | None = None
    image_pull_secrets: list[NameRef] = []
    replicas: int = 1
    suspend: bool = False
    restarted_at: str | None = None
    parallelism: Parallelism = Parallelism()
    engine: Engine = Engine()
    network: Network = Network()
    redis: Redis = Redis(managed=ManagedRedis())
    failure_policy: FailurePolicy = FailurePolicy()
    rollout_strategy: RolloutStrategy = RolloutStrategy()
    gateway: Gateway = Gateway()
    tokenizer: TextWorker = TextWorker()
    detokenizer: TextWorker = TextWorker()
    ranks: Ranks = Ranks()
    ingress: Ingress | None = None
    http_route: HttpRoute | None = None


class Metadata(_Struct, frozen=True):
    name: str
    namespace: str
    uid: str
    generation: int = 1
    deletion_timestamp: str | None = None


class MiniSGLang(_Struct, frozen=True):
    metadata: Metadata
    spec: Spec
    status: dict[str, Any] = {}
    """As last written, by this operator or an earlier one."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def group_indices_wanted(self) -> int:
        """Groups wanted; none while the object is suspended."""
        return 0 if self.spec.suspend else self.spec.replicas


def parse(obj: dict[str, Any]) -> MiniSGLang:
    """The typed object. `msgspec.ValidationError`, which names the field, if it does not fit."""
    return msgspec.convert(obj, MiniSGLang)


def changed(part: msgspec.Struct) -> dict[str, Any]:
    """The fields of a part of the spec that differ from their defaults, as in the manifest.

    By value: what msgspec itself leaves out is what is identical to a default.
    """
    result = {}
    for name, shown, default in _defaults(type(part)):
        value = getattr(part, name)
        if value != default:
            result[shown] = _plain(value)
    return result


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, str, Any], ...]:
    """Each field's name, its name in a manifest, and its default, only to compare with."""
    found = []
    for field in msgspec.structs.fields(kind):
        made = field.default_factory
        default = field.default if made is msgspec.NODEFAULT else made()
        found.append((field.name, field.encode_name, default))
    return tuple(found)


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return changed(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value
