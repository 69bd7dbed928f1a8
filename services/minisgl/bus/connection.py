"""How a client of Redis logs in, and what it says of one that it cannot use."""

import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import ResponseError
from redis.retry import Retry

from minisgl.bus import shown_url
from minisgl.config import UsageError

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""A Redis that takes longer for any answer counts as away."""


class _PasswordFile(CredentialProvider):
    """Reads the password at each connection, so that it can be changed while everything runs."""

    def __init__(self, user: str | None, path: str) -> None:
        self.user = user
        self.path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            with open(self.path, encoding="utf-8") as file:
                password = file.read().strip()
        except OSError as error:
            raise redis.ConnectionError(f"--bus-password-file: {error}") from None
        return (self.user, password) if self.user else (password,)


def connection_arguments(
    url: str, password_file: str | None, ca_file: str | None
) -> dict[str, Any]:
    """The arguments of a client for this URL; nothing is retried behind the caller's back.

    Raises `UsageError` that names what is wrong with the URL.
    """
    try:
        parsed = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UsageError(f"--bus: {error}") from None
    if "path" in parsed:
        raise UsageError("--bus must be redis://... or rediss://..., not a Unix socket")
    database = urlsplit(url).path.strip("/")
    if database and not re.fullmatch(r"\d+", database, re.ASCII):  # the library takes it for 0
        raise UsageError(
            f"--bus: what follows the port in {shown_url(url)!r} must be the number of a database, "
            "as in redis://HOST:PORT/0"
        )
    tls = parsed.pop("connection_class", None) is not None
    arguments: dict[str, Any] = {
        **parsed,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": ANSWER_SECONDS,
        "socket_keepalive": True,
        "driver_info": None,  # no CLIENT SETINFO, which a user of few commands may not send
    }
    if tls:
        arguments["ssl"] = True
        if ca_file is not None:
            arguments["ssl_ca_certs"] = ca_file
    elif ca_file is not None:
        raise UsageError("--bus-ca-file is for rediss://, which speaks TLS")
    if password_file is not None:
        if arguments.pop("password", None) is not None:
            raise UsageError("give the password in --bus-password-file or in the URL, not in both")
        arguments["credential_provider"] = _PasswordFile(
            arguments.pop("username", None), password_file
        )
    return arguments


def login(arguments: Mapping[str, Any]) -> str:
    """Who a client with these arguments is to Redis, for messages, and how that can be changed."""
    provider = arguments.get("credential_provider")
    if isinstance(provider, _PasswordFile):
        user, source = provider.user, f"with the password in --bus-password-file {provider.path!r}"
    elif "password" in arguments:
        user, source = arguments.get("username"), "with the password in --bus"
    else:
        user, source = arguments.get("username"), "without a password: give --bus-password-file"
    return f"the user {user or 'default'!r} {source}"


def check_file(flag: str, path: str | None, content: str) -> None:
    """Raises `UsageError` if the file of a flag cannot be read."""
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise UsageError(
            f"{flag} {path!r} cannot be read: {error.strerror or error}. It must be a file with "
            f"{content}"
        ) from None


def wrong_type(error: object) -> bool:
    """Whether Redis refused a command because of what its key holds."""
    return isinstance(error, ResponseError) and "WRONGTYPE" in str(error)


def log_foreign(key: str, wanted: str) -> None:
    """Say whose fault it was that a key of ours had to be deleted."""
    log.warning(
        "deleted key=%s: it was not %s. Another program writes under this name: keep it away by an "
        "ACL user of its own, or give this service another --service",
        key, wanted,
    )  # fmt: skip


def block_milliseconds(timeout: float) -> int | None:
    """How long a reading command blocks for `timeout` seconds; None: not at all (0 is for ever)."""
    return max(1, int(timeout * 1000)) if timeout > 0 else None
