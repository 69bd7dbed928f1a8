"""The managed Redis: one pod with an append-only file, a password, and nothing that lasts.

A Deployment, because a StatefulSet's pod stays Terminating on a lost node. Its user may touch the
keys of this object only, and may not administer it.
"""

import base64
import hashlib
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from minisgl_operator import names
from minisgl_operator.api import ManagedRedis, MiniSGLang, Quantity
from minisgl_operator.desired import parts
from minisgl_operator.desired.bus import PASSWORD_KEY, PORT, secret_volume
from minisgl_operator.desired.overlay import lay_over
from minisgl_operator.observed import Key, Manifest, Observed

CONTAINER = "redis"
GRACE_MARGIN = 30
"""Seconds by which Redis outlives the last of those that drain."""
RULES = "+@all -@admin -@dangerous +info"
"""What its user may do with the keys of the object. By kind, not by name: workers of an older image
may need what those of this version do not. INFO is for the operator."""
_PASSWORD = "/etc/minisgl/redis"
_TLS = "/etc/minisgl/tls"
_RUN = "/run/redis"
_DATA = "/data"

_START = """\
set -eu
umask 077
hash() {{ sha256sum | cut -d' ' -f1; }}
password=$(tr -d '\\n' < {password}/password | hash)
echo "user default reset on #$password ~minisgl:{{{service}}}:* {rules}" > {run}/acl
server=$(command -v redis-server || command -v valkey-server)
# A start that came to nothing: with a broken file no other would. What is in it lives for seconds.
check=$(command -v redis-check-aof || command -v valkey-check-aof || true)
file={data}/appendonlydir/appendonly.aof.manifest
if [ -e {run}/starts ] && [ -e "$file" ] && [ "$check" ] && ! "$check" "$file" >&2; then
  echo "minisgl: the append-only file is broken: Redis starts without it" >&2
  rm -rf {data}/appendonlydir
fi
: > {run}/starts
{reload}exec "$server" "$@" --aclfile {run}/acl"""
_RELOAD = """\
head -c 32 /dev/urandom | hash > {run}/local
echo "user local reset on #$(tr -d '\\n' < {run}/local | hash) +config|set" >> {run}/acl
cli=$(command -v redis-cli || command -v valkey-cli)
# Redis reads a renewed certificate when it is told to.
(
  served=$(cat {tls}/tls.crt | hash)
  while sleep 30; do
    found=$(cat {tls}/tls.crt | hash)
    [ "$found" = "$served" ] && continue
    answer=$(REDISCLI_AUTH=$(cat {run}/local) "$cli" --tls --cacert {tls}/ca.crt \
--no-auth-warning --user local CONFIG SET tls-cert-file {tls}/tls.crt \
tls-key-file {tls}/tls.key tls-ca-cert-file {tls}/ca.crt) || continue
    [ "$answer" = OK ] && served=$found
  done
) &
"""
_ASK = """\
cli=$(command -v redis-cli || command -v valkey-cli)
ask() {{ REDISCLI_AUTH=$(cat {password}/password) "$cli" {tls}--no-auth-warning "$@" 2>/dev/null; }}
"""
_LEAVE = """\
sleep 3
while [ "$(ask EVAL "$1" 0 "$2" "$3")" = 1 ]; do sleep 1; done"""
_DRAINING = """\
local cursor, draining = '0', 0
repeat
  local page = redis.call('SCAN', cursor, 'MATCH', ARGV[1], 'COUNT', 1000)
  cursor = page[1]
  for _, key in ipairs(page[2]) do
    local ok, state = pcall(cmsgpack.unpack, redis.pcall('GET', key))
    if ok and type(state) == 'table' then
      if state.draining then
        draining = 1
      elseif state.role == 'rank' and redis.call('TTL', key) >= tonumber(ARGV[2]) then
        return 0
      end
    end
  end
until cursor == '0'
return draining"""
"""1 when the object ends: somebody drains, and no rank that lives does not.

A Redis that ends alone must not wait for a gateway that does too, as on a node that is drained:
whoever is connected would stay with it, and whoever comes would find the new one.
"""
STALE_SECONDS = 4
"""A state that was not written for so long says nothing any more."""


def children(observed: Observed) -> list[Manifest]:
    """All of a managed Redis; nothing for an external one."""
    managed = observed.obj.spec.redis.managed
    if managed is None:
        return []
    found = [_secret(observed), _claim(observed.obj, managed), _service(observed.obj)]
    return [*(one for one in found if one), _deployment(observed, managed)]


def _secret(observed: Observed) -> Manifest | None:
    """Made once; what is in it then is not changed by the operator.

    Not `immutable`: a kubelet never looks again at such a Secret, so pods that run would not get
    another password, also when the Secret is made anew.
    """
    obj = observed.obj
    data: Manifest | None
    if observed.redis_password is not None:
        data = {PASSWORD_KEY: base64.b64encode(observed.redis_password.encode()).decode()}
    else:
        data = observed.live.get(Key("Secret", names.redis(obj)), {}).get("data")
    if not data:
        return None
    return {
        **parts.child(obj, "v1", "Secret", names.redis(obj), "redis"),
        "type": "Opaque",
        "data": data,
    }


def _claim(obj: MiniSGLang, managed: ManagedRedis) -> Manifest | None:
    storage = managed.storage
    if storage is None:
        return None
    return {
        **parts.child(obj, "v1", "PersistentVolumeClaim", names.redis(obj), "redis"),
        "spec": parts.without_empty(
            {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": storage.size}},
                "storageClassName": storage.storage_class_name,
            }
        ),
    }


def _service(obj: MiniSGLang) -> Manifest:
    return {
        **parts.child(obj, "v1", "Service", names.redis(obj), "redis"),
        "spec": {
            "selector": names.selector(obj, "redis"),
            "ports": [{"name": "redis", "port": PORT, "targetPort": "redis"}],
        },
    }


def _deployment(observed: Observed, managed: ManagedRedis) -> Manifest:
    obj = observed.obj
    template = _template(obj, managed, managed.image or observed.settings.redis_image)
    template["metadata"]["annotations"] = {names.PASSWORD: _password_digest(observed)}
    name = names.redis(obj)
    return {
        **parts.child(obj, "apps/v1", "Deployment", name, "redis"),
        "spec": {
            "replicas": 0 if obj.spec.suspend else 1,
            "revisionHistoryLimit": 2,
            # Two at a time would be two buses.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": names.selector(obj, "redis")},
            "template": lay_over(template, managed.pod_template),
        },
    }


def _password_digest(observed: Observed) -> str:
    """Redis reads its password when it starts."""
    if observed.redis_password is not None:
        return hashlib.sha256(observed.redis_password.encode()).hexdigest()[:10]
    live = observed.live.get(Key("Deployment", names.redis(observed.obj)), {})
    template = (live.get("spec") or {}).get("template") or {}
    notes: dict[str, Any] = (template.get("metadata") or {}).get("annotations") or {}
    return str(notes.get(names.PASSWORD, ""))


def _template(obj: MiniSGLang, managed: ManagedRedis, image: str) -> Manifest:
    tls = managed.tls_secret_name is not None
    # Nothing else remembers: with less, Redis would go while streams still end.
    grace = GRACE_MARGIN + max(
        obj.spec.gateway.termination_grace_period_seconds,
        obj.spec.ranks.termination_grace_period_seconds,
    )
    mounts = [
        {"name": "data", "mountPath": _DATA},
        {"name": "run", "mountPath": _RUN},
        {"name": "redis-password", "mountPath": _PASSWORD, "readOnly": True},
    ]
    data: Manifest = {"name": "data", "emptyDir": {}}
    if managed.storage is not None:
        data = {"name": "data", "persistentVolumeClaim": {"claimName": names.redis(obj)}}
    volumes = [
        data,
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        secret_volume("redis-password", names.redis(obj), {PASSWORD_KEY: "password"}),
    ]
    if managed.tls_secret_name is not None:
        files = ("tls.crt", "tls.key", "ca.crt")
        volumes.append(secret_volume("tls", managed.tls_secret_name, {f: f for f in files}))
        mounts.append({"name": "tls", "mountPath": _TLS, "readOnly": True})
    place = {"password": _PASSWORD, "run": _RUN, "tls": _TLS, "data": _DATA}
    start = _START.format(
        **place, service=names.service(obj), rules=RULES,
        reload=_RELOAD.format(**place) if tls else "",
    )  # fmt: skip
    ask = _ASK.format(password=_PASSWORD, tls=f"--tls --cacert {_TLS}/ca.crt " if tls else "")
    states = f"minisgl:{{{names.service(obj)}}}:state:*"
    # A state is written each second, to last for three time-outs.
    fresh = 3 * obj.spec.failure_policy.heartbeat_timeout_seconds - STALE_SECONDS
    container = parts.container(
        obj, CONTAINER, image, managed.resources,
        {
            "command": ["sh", "-c", start, "redis"],
            "args": _arguments(managed),
            "ports": [{"name": "redis", "containerPort": PORT}],
            "volumeMounts": mounts,
            # One that reads its file answers LOADING: alive, but not ready.
            "readinessProbe": parts.probe(
                _shell(ask + f'[ "$(ask PING)" = PONG ] && rm -f {_RUN}/starts'), 5, 2
            ),
            "livenessProbe": parts.probe(_shell(ask + '[ -n "$(ask PING)" ]'), 10, 6),
            "lifecycle": {"preStop": _shell(ask + _LEAVE, _DRAINING, states, str(fresh))},
        },
    )  # fmt: skip
    return parts.pod_template(
        obj, "redis",
        {
            "terminationGracePeriodSeconds": grace,
            "containers": [container],
            "volumes": volumes,
        },
    )  # fmt: skip


def _arguments(managed: ManagedRedis) -> list[str]:
    listen = ["--port", str(PORT)]
    if managed.tls_secret_name is not None:
        listen = ["--port", "0", "--tls-port", str(PORT), "--tls-auth-clients", "no"]
        for flag, file in (("cert", "tls.crt"), ("key", "tls.key"), ("ca-cert", "ca.crt")):
            listen += [f"--tls-{flag}-file", f"{_TLS}/{file}"]
    return [
        *listen, "--dir", _DATA, "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
        "--maxmemory", str(_bytes(managed.max_memory)), "--maxmemory-policy", "noeviction",
    ]  # fmt: skip


def _bytes(quantity: Quantity) -> int:
    """At least one: 0 would be no limit at all."""
    return max(1, int(parse_quantity(quantity)))  # type: ignore[no-untyped-call]


def _shell(script: str, *args: str) -> Manifest:
    return {"exec": {"command": ["sh", "-c", script, *(["redis", *args] if args else [])]}}
