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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from minisgl import messages
from minisgl.bus import shown_url
from minisgl.bus.base import TOK, Bus, Entry, ReplacedError
from minisgl.bus.outage import Outage
from minisgl.config import UsageError
from minisgl.messages import Message, WorkerState

log = logging.getLogger(__name__)

GROUP = "tokenizers"
"""The consumer group of `tok`."""
ENTRIES_AT_ONCE = 256
"""Most entries of one queue that one `receive` returns."""
SHARED_ENTRIES_AT_ONCE = 8
"""Of `tok`: what one reader takes, the others cannot have."""
MAX_ENTRIES = 100_000
"""About the longest stream: beyond it the oldest entries are cut, which a reader sees as a gap."""
ANSWER_SECONDS = 2.0
"""A Redis that takes longer for any answer counts as away."""
BLOCK_SECONDS = 1.0
"""Longest wait of one call, so that the end of a connection is noticed."""
CLAIM_SECONDS = 0.25
"""How often a reader of `tok` looks for what others have left."""
CONSUMERS_SECONDS = 60.0
"""How often a reader of `tok` looks for consumers that are gone."""
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
        _check_file("--bus-password-file", password_file, "the password of Redis")
        _check_file("--bus-ca-file", ca_file, "the certificate authority of Redis, in PEM")
        self._outage = Outage(login(arguments))
        # Reading and writing happen in different threads; a reader may block for long.
        self._writer = redis.Redis(**arguments, socket_timeout=ANSWER_SECONDS)
        self._reader = redis.Redis(**arguments, socket_timeout=ANSWER_SECONDS + BLOCK_SECONDS)
        self._own: dict[str, deque[bytes]] = {}
        """Queues with one reader: ids that were taken, and not deleted yet."""
        self._shared = False
        self._recovered = False
        self._next_claim = self._next_look = 0.0
        self._claim_from = b"0-0"
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
                self._forget_shared(self._writer, ids)

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
            self._shared = True
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
                    entries += self._receive_shared(min(left, 0.02) if self._own else left)
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
        pipe.xread(dict.fromkeys(keys, b"0-0"), count=ENTRIES_AT_ONCE, block=_block(timeout))
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

    def _receive_shared(self, timeout: float) -> list[Entry]:
        client, key = self._reader, self._key(TOK)
        rows: Any
        try:
            if not self._recovered:
                # What this worker had taken under this name before it was started again.
                rows = client.xreadgroup(GROUP, self._worker, {key: "0"}, count=ENTRIES_AT_ONCE)
                self._recovered = True
                if rows and rows[0][1]:
                    return self._shared_entries(client, rows[0][1])
            now = time.monotonic()
            if now >= self._next_claim:
                self._next_claim = now + CLAIM_SECONDS
                claimed = self._claim(client, key)
                if claimed:
                    return claimed
            if now >= self._next_look:
                self._next_look = now + CONSUMERS_SECONDS
                self._forget_consumers(client, key)
            rows = client.xreadgroup(
                GROUP,
                self._worker,
                {key: ">"},
                count=SHARED_ENTRIES_AT_ONCE,
                block=_block(timeout),
            )
        except ResponseError as error:
            if str(error).startswith("NOGROUP"):
                # New, flushed, or destroyed: from the start, to pass over nothing that waits.
                self._make_group(client, key)
            elif not self._drop_foreign(client, [key], error):
                raise
            return []
        return self._shared_entries(client, rows[0][1], fresh=True) if rows else []

    def _claim(self, client: redis.Redis, key: str) -> list[Entry]:
        answer: Any = client.xautoclaim(
            key, GROUP, self._worker, self._milliseconds(1), self._claim_from,
            count=SHARED_ENTRIES_AT_ONCE,
        )  # fmt: skip
        self._claim_from = answer[0]
        return self._shared_entries(client, answer[1])

    def _forget_consumers(self, client: redis.Redis, key: str) -> None:
        """Remove readers that are gone and left nothing: each new name would stay for ever.

        One that was only frozen is made again by its next call.
        """
        found: Any = client.xinfo_consumers(key, GROUP)
        for consumer in found:
            if not consumer["pending"] and consumer["idle"] > self._milliseconds(10):
                client.xgroup_delconsumer(key, GROUP, consumer["name"])

    def _make_group(self, client: redis.Redis, key: str) -> None:
        try:
            client.xgroup_create(key, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._recovered = False

    def _shared_entries(
        self, client: redis.Redis, rows: Iterable[Any], *, fresh: bool = False
    ) -> list[Entry]:
        entries, useless = [], []
        for token, fields in rows:
            entry = self._entry(TOK, token, fields) if fields else None
            if entry is None:
                useless.append(token)  # garbage, or deleted by who finished it
                continue
            if not fresh:
                pending: Any = client.xpending_range(self._key(TOK), GROUP, token, token, 1)
                entry.deliveries = pending[0]["times_delivered"] if pending else 1
            entries.append(entry)
        if useless:
            self._forget_shared(client, useless)
        return entries

    def _forget_shared(self, client: redis.Redis, ids: Sequence[bytes]) -> None:
        key = self._key(TOK)
        pipe = client.pipeline(transaction=False)
        pipe.xack(key, GROUP, *ids)
        pipe.xdel(key, *ids)
        for result in pipe.execute(raise_on_error=False):
            # Without the group there is nothing to acknowledge, and deleting is enough.
            if isinstance(result, Exception) and not str(result).startswith("NOGROUP"):
                raise result

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

    def _milliseconds(self, silences: int) -> int:
        return max(1, int(silences * self._silence * 1000))

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


def _check_file(flag: str, path: str | None, content: str) -> None:
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


def _too_long(data: bytes) -> str:
    return f"it has {len(data)} bytes, more than {MAX_ENTRY_BYTES}"


def _block(timeout: float) -> int | None:
    """Milliseconds to block; None: not at all (0 would be for ever)."""
    return max(1, int(timeout * 1000)) if timeout > 0 else None


def _glob(text: str) -> str:
    """A pattern that only this text matches."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


def _boot(data: bytes) -> int | None:
    try:
        return messages.decode_state(data).boot
    except ValueError:
        return None
