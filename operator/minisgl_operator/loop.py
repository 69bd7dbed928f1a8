"""The operator's event loop, which waits for names of hosts beside its other threads.

A name server that does not answer holds each lookup for many seconds, and asyncio makes lookups in
the few threads that HTTP requests want as well: two hundred objects whose Redis cannot be found
would keep the operator from the API server, and from its Lease.
"""

import asyncio
import socket
import threading
from typing import Any

_Query = tuple[bytes | str | None, bytes | str | int | None, int, int, int, int]


class Loop(asyncio.SelectorEventLoop):
    """Looks names up in threads of their own: one at most for a name, however many ask."""

    def __init__(self) -> None:
        super().__init__()
        self._lookups: dict[_Query, asyncio.Future[Any]] = {}

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """As `socket.getaddrinfo`. Who is cancelled leaves the lookup to the next who asks."""
        query = (host, port, family, type, proto, flags)
        lookup = self._lookups.get(query)
        if lookup is None:
            lookup = self.create_future()
            lookup.add_done_callback(lambda done: self._end(query, done))
            # No pool: its threads would be waited for at the end of the process.
            threading.Thread(target=self._look_up, args=(query, lookup), daemon=True).start()
            self._lookups[query] = lookup
        found: list[Any] = await asyncio.shield(lookup)
        return found

    def _look_up(self, query: _Query, lookup: "asyncio.Future[Any]") -> None:
        try:
            found = socket.getaddrinfo(*query)
        except (OSError, UnicodeError) as error:  # the latter: a name that cannot be one
            self._tell(lookup.set_exception, error)
        else:
            self._tell(lookup.set_result, found)

    def _tell(self, tell: Any, what: Any) -> None:
        try:
            self.call_soon_threadsafe(tell, what)
        except RuntimeError:  # the loop has been closed meanwhile
            return

    def _end(self, query: _Query, lookup: "asyncio.Future[Any]") -> None:
        del self._lookups[query]
        if not lookup.cancelled():
            lookup.exception()  # who asked may have left: it is nobody's error then
