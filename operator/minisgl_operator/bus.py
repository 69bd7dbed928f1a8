"""What the workers of an object say of themselves in its Redis: read only, every two seconds.

Silence is not absence (section 5 of docs/design.md): a worker's silence counts while the bus could
be read, and starts from zero after a time in which it could not, because a Redis that was frozen
or flushed makes everybody look dead.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeout

from minisgl.messages import WorkerState, decode_state
from minisgl_operator.observed import Bus, Meeting, Worker

log = logging.getLogger(__name__)

READ_SECONDS = 2.0
FORGET_SECONDS = 600.0
"""A worker that is silent for so long is no longer shown."""
ANSWER_SECONDS = 2.0
SAID_SECONDS = 30.0
"""So long another sentence must be the only one before it is shown."""
DOUBT_SECONDS = 5.0
"""A bus that was well is called so until it could not be read for longer, and more than once: one
answer that is late, or one question that a name server loses, is no outage."""
PAUSE_SECONDS = 6.0
"""After a gap between two readings as long as this, silences start from zero."""


@dataclass(frozen=True, slots=True)
class Address:
    """How to reach one object's Redis, and which keys are its own."""

    host: str
    port: int
    service: str
    """As in every key: `minisgl:{SERVICE}:...`."""
    database: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ca: str | None = None
    """PEM of the certificate authority; None: the system's."""
    managed: bool = True

    def same_place(self, other: "Address") -> bool:
        """Whether it leads to the same Redis and keys, whoever asks."""
        return other == replace(self, password=other.password, ca=other.ca)


@dataclass(slots=True)
class _Seen:
    boot: int
    beat: int
    since: float
    state: WorkerState


class Reader:
    """Reads one object's bus until it is closed; `bus` is what it last saw.

    `changed` is called when a reading differs from the one before in more than figures. `before`:
    a reader of the same Redis with another password or authority, whose readings go on here.
    """

    def __init__(
        self,
        address: Address,
        changed: Callable[[], None],
        *,
        before: "Reader | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._changed = changed
        self._clock = clock
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._last_read: float | None = None
        self._readable_since = 0.0
        self._started = clock()
        self._ever = False
        self._failures = 0
        """In a row."""
        self._said_at = self._started
        """When the present sentence of a failure was last heard."""
        self._said_nothing = True
        """Whether that sentence is a mere time-out's."""
        self._bus = Bus("starting")
        if before is not None:
            self._bus, self._seen, self._ever = before._bus, before._seen, before._ever
            self._last_read, self._started = before._last_read, before._started
            self._readable_since = before._readable_since
        self._client = _client(address)
        self._task = asyncio.create_task(self._run(), name=f"bus {address.service}")

    async def close(self) -> None:
        self._task.cancel()
        # Not `await self._task`: one cannot tell its end from that of who waits here.
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._client.aclose()

    @property
    def bus(self) -> Bus:
        """The last reading, with silences as of now."""
        now = self._clock()
        if self._bus.state != "ok":
            since = self._started if self._last_read is None else self._last_read
            return replace(self._bus, unread=now - since)
        return replace(
            self._bus,
            readable=(self._last_read or now) - self._readable_since,
            workers=tuple(replace(w, silent=self._silence(w, now)) for w in self._bus.workers),
        )

    def _silence(self, worker: Worker, now: float) -> float:
        """Up to the last reading only: what came since is not known yet."""
        seen = self._seen.get((worker.role, worker.id))
        return max(0.0, (self._last_read or now) - seen.since) if seen else 0.0

    async def _run(self) -> None:
        while True:
            before = _shape(self._bus)
            try:
                async with asyncio.timeout(3 * ANSWER_SECONDS):
                    states, meetings, refuses = await self._read()
            except (RedisError, OSError, TimeoutError) as error:
                self.fail(error)
            except Exception as error:  # a reader that ended would show its last reading for ever
                log.exception("the bus of %s could not be read", self.address.service)
                self.fail(error)
            else:
                self.take(states, meetings, refuses)
            if _shape(self._bus) != before:
                self._changed()
            await asyncio.sleep(READ_SECONDS)

    def fail(self, error: BaseException) -> None:
        """One reading that failed, which says nothing of the workers.

        Readings may fail in turns for several reasons, and each would be a status to write: a
        sentence that recurs stays, and a time-out, which says nothing, replaces none.
        """
        held, now = self._bus, self._clock()
        self._failures += 1
        state, said = _failure(error, self._ever, self.address), _sentence(error, self.address)
        slow, unread = _is_slow(error), now - (self._last_read or now)
        in_doubt = self._failures == 1 or unread <= DOUBT_SECONDS
        if held.state in ("ok", "full") and in_doubt and (slow or _is_unnamed(error)):
            return
        changed = state != held.state
        recurs = said == held.message or slow
        if changed or (self._said_nothing and not slow):
            self._bus, self._said_nothing = replace(held, state=state, message=said), slow
        elif not recurs and now - self._said_at >= SAID_SECONDS:
            self._bus = replace(held, message=said)
        elif not recurs:
            return
        self._said_at = now

    def take(
        self, states: list[WorkerState], meetings: Mapping[str, Meeting], refuses: str = ""
    ) -> None:
        """One reading: moves the silences of workers on. `refuses`: why Redis takes no writes."""
        now = self._clock()
        if self._last_read is None or now - self._last_read > PAUSE_SECONDS:
            self._seen.clear()
            self._readable_since = now
        if refuses:  # nobody can say that he lives
            self._readable_since = now
            for seen in self._seen.values():
                seen.since = now
        self._last_read, self._ever, self._failures = now, True, 0
        for state in states:
            key = (state.role, state.id)
            held = self._seen.get(key)
            if held is None or (held.boot, held.beat) != (state.boot, state.beat):
                self._seen[key] = _Seen(state.boot, state.beat, now, state)
        # One whose key expired stays, silent: its silence is what a lost node is known by.
        for gone in [k for k, seen in self._seen.items() if now - seen.since > FORGET_SECONDS]:
            del self._seen[gone]
        workers = tuple(_worker(seen.state) for _, seen in sorted(self._seen.items()))
        self._bus = Bus(
            "full" if refuses else "ok",
            refuses,
            workers=workers,
            meetings=dict(meetings),
        )

    async def _read(self) -> tuple[list[WorkerState], dict[str, Meeting], str]:
        prefix = f"minisgl:{{{self.address.service}}}:"
        keys: list[bytes] = []
        pattern = _glob(prefix) + "*"
        async for key in self._client.scan_iter(match=pattern, count=1000):
            keys.append(key)
        text = [key.decode("utf-8", "replace").removeprefix(prefix) for key in keys]
        state_keys = [k for k, t in zip(keys, text, strict=True) if t.startswith("state:")]
        groups = [t.removeprefix("rdzv:") for t in text if t.startswith("rdzv:")]
        states = []
        for data in await self._client.mget(state_keys) if state_keys else []:
            if data is not None:
                with contextlib.suppress(ValueError):
                    states.append(decode_state(data))  # type: ignore[arg-type]
        meetings = {}
        for group in groups:
            held = await _hash(self._client, f"{prefix}rdzv:{group}")
            if held.get("incarnation"):
                meetings[group] = Meeting(held["incarnation"], held.get("phase") == "formed")
        return states, meetings, await self._refuses()

    async def _refuses(self) -> str:
        """Why it takes no writes; empty if it does. A managed Redis tells; an external one is its
        owner's business and may forbid INFO."""
        if not self.address.managed:
            return ""
        told: dict[str, Any] = await self._client.info("memory", "persistence")
        if told.get("aof_last_write_status", "ok") != "ok":
            return "Redis cannot write its append-only file, as on a full disk, and refuses writes"
        most = int(told.get("maxmemory", 0))
        used = int(told.get("used_memory", 0)) - int(told.get("mem_not_counted_for_evict", 0))
        full = 0 < most <= used
        return "Redis has reached its maxmemory and refuses writes" if full else ""


def _client(address: Address) -> "redis.Redis":
    arguments: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": address.database,
        "username": address.username,
        "password": address.password,
        "socket_timeout": ANSWER_SECONDS,
        "socket_connect_timeout": ANSWER_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "max_connections": 1,
    }
    if address.tls:
        arguments |= {"ssl": True, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        if address.ca is not None:
            arguments["ssl_ca_data"] = address.ca
    return redis.Redis(**arguments)


async def _hash(client: "redis.Redis", key: str) -> dict[str, str]:
    try:
        held: dict[Any, Any] = await client.hgetall(key)
    except ResponseError:  # of another type: the ranks' business
        return {}
    return {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in held.items()}


def _worker(state: WorkerState) -> Worker:
    load = state.load
    return Worker(
        role=state.role,
        id=state.id,
        pod=state.pod,
        boot=state.boot,
        silent=0.0,
        draining=state.draining,
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        transport=load.transport if load else "",
    )


def _failure(
    error: BaseException, ever: bool, address: Address
) -> Literal["auth-failed", "unreachable", "not-observable"]:
    if isinstance(error, AuthenticationError | NoPermissionError):
        return "auth-failed"
    # A Redis that this process has never reached may well be reached by the workers: an external
    # one behind a firewall, or a NetworkPolicy between.
    return "unreachable" if ever or address.managed else "not-observable"


def _sentence(error: BaseException, address: Address) -> str:
    if _is_unnamed(error):
        # A name server that is flooded says at times that a name is unknown, at times that it
        # does not know: one sentence for both.
        return f"connecting to {address.host}:{address.port}: no name server knows the host"
    return (str(error) or type(error).__name__)[:300]


def _is_slow(error: BaseException) -> bool:
    return isinstance(error, TimeoutError | RedisTimeout)


def _is_unnamed(error: BaseException) -> bool:
    """Whether the host's address could not be found out."""
    return any(isinstance(one, socket.gaierror) for one in (error.__cause__, error.__context__))


def _shape(bus: Bus) -> object:
    """What a reconcile should run for at once: not the figures."""
    return (
        bus.state,
        tuple((w.role, w.id, w.pod, w.boot, w.draining, w.transport) for w in bus.workers),
        tuple(sorted(bus.meetings.items())),
    )


def _glob(text: str) -> str:
    """`text` as a pattern that matches itself."""
    return "".join("\\" + c if c in "*?[]\\" else c for c in text)
