"""How pods reach Redis: an address in their flags, the password and the CA in files.

Files of a mounted Secret change with it, and workers read them again at each connection: another
password restarts nothing.
"""

from dataclasses import dataclass, field
from urllib.parse import quote

from minisgl_operator import names
from minisgl_operator.api import MiniSGLang
from minisgl_operator.desired import parts
from minisgl_operator.observed import Manifest

PORT = 6379
PASSWORD_KEY = "password"
"""Key in Secret NAME-redis."""
_PASSWORD = "/etc/minisgl/redis"
_CA = "/etc/minisgl/redis-ca"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an object's Redis is, and which Secrets open it: for its pods and for the operator."""

    address: str
    """HOST:PORT."""
    database: int = 0
    username: str | None = None
    tls: bool = False
    password: tuple[str, str] | None = None
    """Name of a Secret, and key in it."""
    ca: tuple[str, str] | None = None
    """The same; None: the system's authorities."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What a pod needs to speak on the bus."""

    flags: dict[str, object]
    volumes: list[Manifest] = field(default_factory=list)
    mounts: list[Manifest] = field(default_factory=list)


def endpoint(obj: MiniSGLang) -> Endpoint:
    """The Redis of this object, its own or an external one."""
    managed, external = obj.spec.redis.managed, obj.spec.redis.external
    if external is not None:
        secret, ca = external.password_secret_ref, external.ca_secret_ref
        return Endpoint(
            external.address,
            external.database,
            external.username,
            external.tls,
            password=(secret.name, secret.key) if secret else None,
            ca=(ca.name, ca.key) if ca else None,
        )
    certificate = managed.tls_secret_name if managed else None
    return Endpoint(
        f"{names.redis(obj)}.{obj.namespace}.svc:{PORT}",
        tls=certificate is not None,
        password=(names.redis(obj), PASSWORD_KEY),
        ca=(certificate, "ca.crt") if certificate is not None else None,
    )


def connection(obj: MiniSGLang) -> Connection:
    """The bus of this object; the same in all of its pods."""
    at = endpoint(obj)
    user = f"{quote(at.username, safe='')}@" if at.username else ""
    result = Connection(
        {
            "bus": f"{'rediss' if at.tls else 'redis'}://{user}{at.address}/{at.database}",
            "bus-password-file": f"{_PASSWORD}/password" if at.password else None,
            "bus-ca-file": f"{_CA}/ca.crt" if at.ca else None,
            "service": names.service(obj),
        }
    )
    for secret, name, path, file in (
        (at.password, "redis-password", _PASSWORD, "password"),
        (at.ca, "redis-ca", _CA, "ca.crt"),
    ):
        if secret is not None:
            result.volumes.append(secret_volume(name, secret[0], {secret[1]: file}))
            result.mounts.append({"name": name, "mountPath": path, "readOnly": True})
    return result


def secret_volume(name: str, secret: str, files: dict[str, str]) -> Manifest:
    """A volume with keys of a Secret as files: {key: file}."""
    return {
        "name": name,
        "secret": {
            "secretName": secret,
            "defaultMode": parts.SECRET_MODE,
            "items": [{"key": key, "path": file} for key, file in files.items()],
        },
    }
