"""A connection that fails as networks do: it stays open, and nothing comes through any more."""

import contextlib
import socket
import threading
from types import TracebackType

from tests.cluster.apiserver import ApiServer


class Proxy:
    """TCP between the operator and the API server, as a context."""

    def __init__(self, api: ApiServer) -> None:
        host, _, port = api.url.removeprefix("https://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._frozen = threading.Event()
        """What connects is not passed on."""
        self._passing: list[threading.Event] = []
        """Of each connection: set while it passes on what it gets."""
        self._sockets = [self._listener]

    def freeze(self, *, also_new: bool = False) -> None:
        """What is open now is dead from here on; what is opened later passes, or is dead too."""
        if also_new:
            self._frozen.set()
        for passing in self._passing:
            passing.clear()

    def heal(self) -> None:
        """What is opened from now on passes."""
        self._frozen.clear()

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                if self._frozen.is_set():
                    continue
                try:
                    server = socket.create_connection(self._target)
                except OSError:  # the server is not there now
                    client.close()
                    continue
                self._sockets.append(server)
                passing = threading.Event()
                passing.set()
                self._passing.append(passing)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=_pass, args=(*ends, passing), daemon=True).start()


def _pass(source: socket.socket, target: socket.socket, passing: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if not passing.is_set():
                return
            target.sendall(data)
        if passing.is_set():
            target.shutdown(socket.SHUT_RDWR)
