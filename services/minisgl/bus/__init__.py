"""The bus: messages between workers, over ZMQ on one machine or Redis streams in a cluster."""

from minisgl.bus.base import TOK, Bus, Entry, detok_queue, reply_queue, req_queue
from minisgl.config import UsageError, WorkerConfig

__all__ = [
    "TOK", "Bus", "Entry", "connect", "connect_worker", "detok_queue", "reply_queue", "req_queue",
]  # fmt: skip


def connect(
    url: str,
    service: str,
    *,
    worker: str = "0",
    silence: float = 30.0,
    password_file: str | None = None,
    ca_file: str | None = None,
) -> Bus:
    """The bus at `url`: `ipc://DIR` on one machine, `redis://...` or `rediss://...` in a cluster.

    `worker` names this worker among those that share a queue; `silence` is the heartbeat time-out
    in seconds. The files are read again at each connection. Raises `UsageError` for any other URL.
    """
    if url.startswith("ipc://"):
        from minisgl.bus.zmq import ZmqBus

        return ZmqBus(url.removeprefix("ipc://"))
    if url.startswith(("redis://", "rediss://")):
        try:
            from minisgl.bus.redis import RedisBus
        except ImportError as error:
            raise UsageError(
                f"--bus {url.partition(':')[0]}:// needs the package redis: "
                f"pip install 'minisglang[redis]' ({error})"
            ) from None

        return RedisBus(
            url,
            service,
            worker=worker,
            silence=silence,
            password_file=password_file,
            ca_file=ca_file,
        )
    raise UsageError(
        f"--bus must be ipc://DIR, redis://... or rediss://..., not {shown_url(url)!r}"
    )


def connect_worker(config: WorkerConfig) -> Bus:
    """The bus that a worker's config names, as that worker. Raises `UsageError`."""
    return connect(
        config.bus,
        config.service,
        worker=config.id,
        silence=config.heartbeat_timeout_seconds,
        password_file=config.bus_password_file,
        ca_file=config.bus_ca_file,
    )


def shown_url(url: str) -> str:
    """The URL without its password, for messages."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user + ':***' if at else ''}{at}{host}"
