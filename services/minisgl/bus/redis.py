"""The bus of a cluster: Redis streams, one a queue.

An entry is one field `m`, a batch in MessagePack. A queue with one reader is read from its start
and what was taken is deleted by its id: no cursor outlives a restart or a flush of Redis. The
shared queue `tok` has one consumer group; an entry stays pending until what follows from it was
written, and a reader that is silent for the heartbeat time-out loses its entries to the others.

Nothing here is atomic over several keys, because a full Redis refuses every command of a
transaction; readers must still drain it then. A failed call raises `BusError`, and the caller tries
again: what was sent, but not confirmed, comes twice.
"""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import redis
from redis.exceptions import RedisError, ResponseError

from minisgl import messages
from minisgl.bus.base import TOK, Bus, Entry, ReplacedError
from minisgl.bus.connection import (
    ANSWER_SECONDS,
    block_milliseconds,
    check_file,
    connection_arguments,
    log_foreign,
    login,
    wrong_type,
)
from minisgl.bus.outage import Outage
from minisgl.bus.tok import SharedQueue, forget
from minisgl.messages import Message, WorkerState

log = logging.getLogger(__name__)

ENTRIES_AT_ONCE = 256
"""Most entries of one queue that one `receive` returns."""
MAX_ENTRIES = 100_000
"""About the longest stream: beyond it the oldest entries are cut, which a reader sees as a gap."""
BLOCK_SECONDS = 1.0
"""Longest wait of one call, so that the end of a connection is noticed."""
MAX_ENTRY_BYTES = 64 << 20
"""A longer entry is not of this program, which divides what it sends: it is dropped unread."""


class RedisBus(Bus):
    """One worker's end of the bus of `service`.

    `silence` is the heartbeat time-out in seconds, `worker` the name under which this worker's
    share of `tok` is kept: one that comes back under its name finds what it had not finished.
    """

    def __init__(
        self,
        url: str,
        service: str,
        *,
        worker: str = "0",
        silence: float = 30.0,
        password_file: str | None = None,
        ca_file: str | None = None,
    ) -> None:
        """Connects at the first call.

        Raises `UsageError` for a URL that Redis does not have, and a file that is not there now.
        """
        self.errors = 0
        self._prefix = f"minisgl:{{{service}}}:"
        self._worker = worker
        self._silence = silence
        arguments = connection_arguments(url, password_file, ca_file)
        check_file("--bus-password-file", password_file, "the password of Redis")
        check_file("--bus-ca-file", ca_file, "the certificate authority of Redis, in PEM")
        self._outage = Outage(login(arguments))
        # Reading and writing happen in different threads; a reader may block for long.
        self._writer = redis.Redis(**arguments, socket_timeout=ANSWER_SECONDS)
        self._reader = redis.Redis(**arguments, socket_timeout=ANSWER_SECONDS + BLOCK_SECONDS)
        self._own: dict[str, deque[bytes]] = {}
        """Queues with one reader: ids that were taken, and not deleted yet."""
        self._shared: SharedQueue | None = None
        self._published: dict[tuple[str, str], int] = {}
        self._unreadable_states: set[bytes] = set()
        """Keys, as the last look at them had it."""
        self._lock = threading.Lock()

    # --- writing -------------------------------------------------------------------------------

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        if not batch:
            return
        key, data = self._key(queue), messages.encode(batch)
        if len(data) > MAX_ENTRY_BYTES:
            if len(batch) > 1:
                half = len(batch) // 2
                self.send(queue, batch[:half])
                self.send(queue, batch[half:])
            else:
                self._unreadable(f"a message for {queue}", ValueError(_too_long(data)))
            return
        with self._outage.during("writing"):
            try:
                self._append(key, data)
            except ResponseError as error:
                if not self._drop_foreign(self._writer, [key], error):
                    raise
                self._append(key, data)

    def _append(self, key: str, data: bytes) -> None:
        pipe = self._writer.pipeline(transaction=False)
        pipe.xadd(key, {"m": data}, maxlen=MAX_ENTRIES, approximate=True)
        pipe.expire(key, self._seconds(10))
        pipe.execute()

    def ack(self, entries: Sequence[Entry]) -> None:
        ids = [e.token for e in entries if e.queue == TOK and isinstance(e.token, bytes)]
        if ids:
            with self._outage.during("acknowledging"):
                forget(self._writer, self._key(TOK), ids)

    def publish_state(self, state: WorkerState) -> None:
        key = self._key(f"state:{state.role}:{state.id}")
        name = (str(state.role), state.id)
        with self._outage.during("publishing"):
            if self._published.get(name) == state.boot:
                shown = self._shown(key)
                if shown is not None and _boot(shown) not in (None, state.boot):
                    raise ReplacedError(
                        f"another process has taken the place of {state.role} {state.id}"
                    )
            self._writer.set(key, messages.encode_state(state), ex=self._seconds(3))
            self._published[name] = state.boot

    def _shown(self, key: str) -> bytes | None:
        found: Any = self._writer.mget([key])  # unlike GET it bears a key of another type
        return found[0]

    def read_states(self) -> list[WorkerState]:
        states, unreadable = [], set()
        with self._outage.during("reading states"):
            keys = sorted(
                set(self._writer.scan_iter(match=_glob(self._key("state:")) + "*", count=500))
            )
            found: Any = self._writer.mget(keys) if keys else []
            for key, data in zip(keys, found, strict=True):
                if data is None:
                    continue  # expired in between
                try:
                    states.append(self._own_state(key.decode(errors="replace"), data))
                except ValueError as error:
                    unreadable.add(key)
                    if key not in self._unreadable_states:  # counted once, not each second
                        self._unreadable("a state", error)
            self._unreadable_states = unreadable
        return states

    def _own_state(self, key: str, data: bytes) -> WorkerState:
        """The state in `data`. Raises `ValueError` if it speaks for another worker or group."""
        state = messages.decode_state(data)
        if key != self._key(f"state:{state.role}:{state.id}"):
            raise ValueError(f"{key} holds that of {state.role} {state.id}")
        load = state.load
        if load is not None and (state.role, state.id) != ("rank", f"{load.group}/0"):
            raise ValueError(f"{key} holds the load of group {load.group}")
        return state

    # --- reading -------------------------------------------------------------------------------

    def subscribe(self, queue: str) -> None:
        if queue == TOK:
            self._shared = SharedQueue(
                self._reader, self._key(TOK), self._worker, self._silence, self._tok_entry
            )
        else:
            self._own[queue] = deque()

    def receive(self, timeout: float) -> list[Entry]:
        deadline = time.monotonic() + timeout
        while True:
            left = min(max(deadline - time.monotonic(), 0), BLOCK_SECONDS)
            entries: list[Entry] = []
            with self._outage.during("reading"):
                if self._shared:
                    # With queues of both kinds neither may block the other for long.
                    wait = min(left, 0.02) if self._own else left
                    entries += self._receive_shared(self._shared, wait)
                if self._own and not entries:
                    entries += self._receive_own(min(left, 0.02) if self._shared else left)
            if entries or time.monotonic() >= deadline:
                return entries

    def _receive_own(self, timeout: float) -> list[Entry]:
        pipe = self._reader.pipeline(transaction=False)
        deleting = {queue: list(ids) for queue, ids in self._own.items() if ids}
        for queue, ids in deleting.items():
            pipe.xdel(self._key(queue), *ids)
        keys = {self._key(queue): queue for queue in self._own}
        pipe.xread(
            dict.fromkeys(keys, b"0-0"), count=ENTRIES_AT_ONCE, block=block_milliseconds(timeout)
        )
        try:
            *_, found = pipe.execute()
        except ResponseError as error:
            if not self._drop_foreign(self._reader, keys, error):
                raise
            for taken in self._own.values():
                taken.clear()  # a stream made anew may use them again
            return []
        for queue in deleting:
            self._own[queue].clear()
        entries = []
        for key, rows in found or []:
            queue = keys[key.decode()]
            for token, fields in rows:
                self._own[queue].append(token)
                entry = self._entry(queue, token, fields)
                if entry is not None:
                    entries.append(entry)
        return entries

    def _receive_shared(self, shared: SharedQueue, timeout: float) -> list[Entry]:
        try:
            return shared.receive(timeout)
        except ResponseError as error:
            if not self._drop_foreign(self._reader, [self._key(TOK)], error):
                raise
            return []

    def _tok_entry(self, token: bytes, fields: dict[bytes, bytes]) -> Entry | None:
        return self._entry(TOK, token, fields)

    def _entry(self, queue: str, token: bytes, fields: dict[bytes, bytes]) -> Entry | None:
        data = fields.get(b"m", b"")
        try:
            if len(data) > MAX_ENTRY_BYTES:
                raise ValueError(_too_long(data))
            return Entry(queue, messages.decode(data), data, token)
        except ValueError as error:
            self._unreadable(f"an entry of {queue}", error)
            return None

    # --- both ----------------------------------------------------------------------------------

    def close(self) -> None:
        try:
            for (role, id), boot in self._published.items():
                key = self._key(f"state:{role}:{id}")
                shown = self._shown(key)
                if shown is not None and _boot(shown) == boot:
                    self._writer.delete(key)
            for queue, ids in self._own.items():
                if ids:
                    self._writer.xdel(self._key(queue), *ids)
        except (RedisError, OSError) as error:
            log.info("the bus was left without a word: %s", error)
        self._writer.close()
        self._reader.close()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _seconds(self, silences: int) -> int:
        return max(1, int(silences * self._silence))

    def _unreadable(self, what: str, error: ValueError) -> None:
        with self._lock:
            self.errors += 1
        log.warning("dropped %s: %s", what, error)

    def _drop_foreign(self, client: redis.Redis, keys: Iterable[str], error: ResponseError) -> bool:
        """Whether `error` came of keys that are no streams. They are deleted: the names are ours.

        Nobody could write or read there otherwise, until somebody looked after it by hand.
        """
        if not wrong_type(error):
            return False
        keys = list(keys)
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.xdel(key, "0-0")
        for key, result in zip(keys, pipe.execute(raise_on_error=False), strict=True):
            if wrong_type(result):
                client.unlink(key)
                with self._lock:
                    self.errors += 1
                log_foreign(key, "a stream")
        return True


def _too_long(data: bytes) -> str:
    return f"it has {len(data)} bytes, more than {MAX_ENTRY_BYTES}"


def _glob(text: str) -> str:
    """A pattern that only this text matches."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


def _boot(data: bytes) -> int | None:
    try:
        return messages.decode_state(data).boot
    except ValueError:
        return None
