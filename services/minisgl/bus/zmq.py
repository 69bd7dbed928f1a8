"""The bus of one machine: ZMQ PUSH/PULL over Unix sockets in one private directory.

A queue is a socket file. Its one reader binds it and its writers connect, so writers may come
first. The shared queue `tok` is the other way round: the one gateway binds it and every tokenizer
connects, so that PUSH deals the entries out. Nothing is limited and nothing is acknowledged: a
worker that dies takes what it held with it, and the launcher ends the whole service then.

States are small files in the same directory, replaced by renaming, so that a reader sees one
whole state or the one before it.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import zmq

from minisgl import messages
from minisgl.bus.base import TOK, Bus, Entry
from minisgl.config import UsageError
from minisgl.messages import Message, WorkerState

log = logging.getLogger(__name__)

LINGER_MS = 1000
"""How long `close` waits for a reader to take what was sent."""
ENTRIES_AT_ONCE = 512
"""Most entries that one `receive` returns; the rest wait in their sockets."""
STATE_PREFIX = "state."
BACKLOG_POLL_MS = 50


class ZmqBus(Bus):
    """One worker's end of the bus in `directory`, which is made if it is missing.

    Raises `UsageError` if the directory cannot be used or its path is too long for a socket.
    """

    def __init__(self, directory: str | Path) -> None:
        self.errors = 0
        self._directory = Path(directory).absolute()
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--bus: cannot use the directory {self._directory}: {error.strerror}"
            ) from None
        self._endpoint(TOK)
        self._context = zmq.Context()
        self._writers: dict[str, _Writer] = {}
        self._readers: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._states: dict[str, int] = {}
        self._states_lock = threading.Lock()
        self._unreadable: dict[str, int] = {}
        self._temporary = itertools.count()
        self._closed = False

    def _endpoint(self, queue: str) -> str:
        """The socket of a queue. Its name is a digest, as ids are longer than a socket path."""
        digest = hashlib.blake2b(queue.encode(), digest_size=6).hexdigest()
        kind = "".join(c for c in queue.partition(":")[0][:6] if c.isascii() and c.isalnum())
        path = str(self._directory / f"{kind}-{digest}")
        if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            raise UsageError(
                f"--bus: the path {path} is longer than the {zmq.IPC_PATH_MAX_LEN} bytes that a "
                "Unix socket may have: choose a shorter directory (TMPDIR for `minisgl serve`)"
            )
        return f"ipc://{path}"

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket

    def subscribe(self, queue: str) -> None:
        if queue in self._readers:
            return
        socket = self._socket(zmq.PULL)
        if queue == TOK:
            socket.connect(self._endpoint(queue))
        else:
            socket.bind(self._endpoint(queue))
        self._readers[queue] = socket
        self._poller.register(socket, zmq.POLLIN)

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        if not batch:
            return
        writer = self._writers.get(queue)
        if writer is None:
            socket = self._socket(zmq.PUSH)
            if queue == TOK:
                socket.bind(self._endpoint(queue))
            else:
                socket.connect(self._endpoint(queue))
            writer = self._writers[queue] = _Writer(socket)
        writer.send(messages.encode(batch))

    def receive(self, timeout: float) -> list[Entry]:
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            # Rounded up: a wait below one millisecond must not become a busy loop.
            readable = dict(self._poller.poll(int(left * 1000) + (left > 0)))
            entries: list[Entry] = []
            for queue, socket in self._readers.items():
                if socket in readable:
                    self._drain(queue, socket, entries)
            if entries or time.monotonic() >= deadline:
                return entries

    def _drain(self, queue: str, socket: "zmq.Socket[bytes]", entries: list[Entry]) -> None:
        """Take what is there, without waiting; a busy queue leaves room for the others."""
        for _ in range(max(1, ENTRIES_AT_ONCE // len(self._readers))):
            try:
                raw = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                entries.append(Entry(queue, messages.decode(raw), raw))
            except ValueError as error:
                self.errors += 1
                log.warning("dropped %d unreadable bytes of %s: %s", len(raw), queue, error)

    def ack(self, entries: Sequence[Entry]) -> None:
        """Nothing to do: an entry is gone from its socket once it was received."""

    def publish_state(self, state: WorkerState) -> None:
        name = _state_name(state)
        with self._states_lock:
            if self._closed:
                return
            temporary = self._directory / f".{os.getpid()}.{next(self._temporary)}.{id(self):x}"
            try:
                temporary.write_bytes(messages.encode_state(state))
                temporary.replace(self._directory / name)
                self._states[name] = state.boot
            except OSError as error:  # a full disk makes a worker silent, it does not end it
                temporary.unlink(missing_ok=True)
                self.errors += 1
                log.warning("cannot publish the state of %s %s: %s", state.role, state.id, error)

    def read_states(self) -> list[WorkerState]:
        states = []
        try:
            names = sorted(n for n in os.listdir(self._directory) if n.startswith(STATE_PREFIX))
        except FileNotFoundError:  # the service has ended around us
            return []
        for name in names:
            path, version = self._directory / name, 0
            try:
                version = path.stat().st_mtime_ns
                states.append(messages.decode_state(path.read_bytes()))
            except FileNotFoundError:  # its worker has just left
                continue
            except (OSError, ValueError) as error:
                if self._unreadable.get(name) != version:  # counted once, not each second
                    self._unreadable[name] = version
                    self.errors += 1
                    log.warning("dropped the unreadable state %s: %s", name, error)
        return states

    def close(self) -> None:
        with self._states_lock:
            if self._closed:
                return
            self._closed = True
            for name, boot in self._states.items():
                path = self._directory / name
                with contextlib.suppress(OSError, ValueError):
                    # A later process of the same id may have put its own in this place.
                    if messages.decode_state(path.read_bytes()).boot == boot:
                        path.unlink()
        for writer in self._writers.values():
            writer.close()
        for socket in self._readers.values():
            socket.close(linger=0)
        self._context.term()


class _Writer:
    """A PUSH socket that never waits, also while no reader has ever come.

    A bound PUSH has no pipe to put an entry into before its first reader; entries then go to a
    backlog, and until that is empty again the socket belongs to the thread that empties it.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._lock = threading.Lock()
        self._backlog: deque[bytes] = deque()
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None

    def send(self, data: bytes) -> None:
        with self._lock:
            if self._thread is None:
                try:
                    self._socket.send(data, zmq.NOBLOCK)
                    return
                except zmq.Again:
                    self._thread = threading.Thread(
                        target=self._empty_backlog, name="bus-backlog", daemon=True
                    )
                    self._thread.start()
            self._backlog.append(data)

    def _empty_backlog(self) -> None:
        while self._deadline is None or time.monotonic() < self._deadline:
            if not self._socket.poll(BACKLOG_POLL_MS, zmq.POLLOUT):
                continue
            with self._lock:
                try:
                    while self._backlog:
                        self._socket.send(self._backlog[0], zmq.NOBLOCK)
                        self._backlog.popleft()
                except zmq.Again:
                    continue
                self._thread = None
                return

    def close(self) -> None:
        """Let go of the socket; what was sent still goes out, for at most `LINGER_MS` twice."""
        self._deadline = time.monotonic() + LINGER_MS / 1000
        thread = self._thread
        if thread is not None:
            thread.join()
        self._socket.close()


def _state_name(state: WorkerState) -> str:
    """The file of a state. Ids may hold a slash (`group/rank`) or be longer than a file name."""
    shown = urllib.parse.quote(state.id, safe="")
    if len(shown) > 180:
        shown = "~" + hashlib.blake2b(state.id.encode(), digest_size=16).hexdigest()
    return f"{STATE_PREFIX}{state.role}.{shown}"
