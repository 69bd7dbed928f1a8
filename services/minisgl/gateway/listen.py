"""The socket of an HTTP service: bound first, listened on later.

Bound but not listening, connections are refused, so clients can wait for a service that starts.
"""

import socket

from minisgl.config import StartError


def bind_http(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen; port 0 is any free one.

    Raises `StartError` if the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise StartError(f"--host {host!r} is no address of this machine: {error}") from None
    reason = ""
    # Without SO_REUSEADDR the address is ours alone from now on; with it, two services that start
    # at the same time could both have it. It is needed only where an old connection lingers.
    for reuse in (False, True):
        bound = socket.socket(family, kind, protocol)
        try:
            if reuse:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            return bound
        except OSError as error:
            bound.close()
            reason = error.strerror or str(error)
    raise StartError(
        f"cannot listen on {host} port {port}: {reason}; choose another --port, or 0 for a free one"
    )


def service_url(host: str, bound: socket.socket) -> str:
    """The URL to show: the host as given, the port as bound."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{bound.getsockname()[1]}"
