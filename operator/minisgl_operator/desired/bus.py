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
class Connection:
    """What a pod needs to speak on the bus."""

    flags: dict[str, object]
    volumes: list[Manifest] = field(default_factory=list)
    mounts: list[Manifest] = field(default_factory=list)


def connection(obj: MiniSGLang) -> Connection:
    """The bus of this object; the same in all of its pods."""
    managed, external = obj.spec.redis.managed, obj.spec.redis.external
    password: tuple[str, str] | None = None
    ca: tuple[str, str] | None = None
    if external is not None:
        user = f"{quote(external.username, safe='')}@" if external.username else ""
        tls, host, database = external.tls, external.address, external.database
        if external.password_secret_ref:
            password = (external.password_secret_ref.name, external.password_secret_ref.key)
        if external.ca_secret_ref:
            ca = (external.ca_secret_ref.name, external.ca_secret_ref.key)
    else:
        certificate = managed.tls_secret_name if managed else None
        user, database, tls = "", 0, certificate is not None
        host = f"{names.redis(obj)}.{obj.namespace}.svc:{PORT}"
        password = (names.redis(obj), PASSWORD_KEY)
        if certificate is not None:
            ca = (certificate, "ca.crt")
    result = Connection(
        {
            "bus": f"{'rediss' if tls else 'redis'}://{user}{host}/{database}",
            "bus-password-file": f"{_PASSWORD}/password" if password else None,
            "bus-ca-file": f"{_CA}/ca.crt" if ca else None,
            "service": names.service(obj),
        }
    )
    for secret, name, path, file in (
        (password, "redis-password", _PASSWORD, "password"),
        (ca, "redis-ca", _CA, "ca.crt"),
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
