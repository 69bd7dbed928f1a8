"""How the ranks of a group find each other: a hash in Redis, `rdzv:<group>`.

Rank 0 opens an incarnation and says where it listens; each other rank joins it, once. There is no
name to resolve and no port to agree on beforehand, and a rank of another revision stays outside.
Everybody else learns here which incarnation of the group is the present one.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import ResponseError

from minisgl.bus.base import BusError, ReplacedError
from minisgl.bus.connection import (
    ANSWER_SECONDS,
    connection_arguments,
    log_foreign,
    login,
    wrong_type,
)
from minisgl.bus.network import Network, Nic, loopback, this_host
from minisgl.bus.outage import Outage
from minisgl.config import StartError, UsageError, port_range
from minisgl.messages import decode_state

POLL_SECONDS = 0.1
_NOBODY = "no rank 0 has opened a rendezvous"

_OPEN = """
local held = redis.call('HGET', KEYS[1], 'incarnation')
if (held or '') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""
"""Compare and set: a new incarnation in the place of the one that was seen, and of no other."""

_JOIN = """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return -1 end
if redis.call('HGET', KEYS[1], 'phase') ~= 'forming' then return -1 end
redis.call('HSETNX', KEYS[1], ARGV[2], ARGV[3])
if redis.call('HGET', KEYS[1], ARGV[2]) ~= ARGV[3] then return 0 end
return 1
"""
"""1 also for who has joined already: its answer may have been lost on the way."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One incarnation of a group, and where its rank 0 listens."""

    incarnation: int
    host: str
    store_port: int
    """TCP, of the store that communication groups meet at."""
    feed_port: int
    """TCP, where rank 0 publishes messages to the other ranks."""


class Rendezvous:
    """One rank's view of its group's hash. All methods may raise `BusError`: try again."""

    def __init__(
        self,
        url: str,
        service: str,
        group: str,
        *,
        size: int,
        revision: str,
        silence: float,
        password_file: str | None = None,
        ca_file: str | None = None,
        network: Network | None = None,
    ) -> None:
        """`network` is the host's; None: as it is now."""
        self._network = network or this_host()
        arguments = connection_arguments(url, password_file, ca_file)
        self._outage = Outage(login(arguments))
        self._client = redis.Redis(**arguments, socket_timeout=ANSWER_SECONDS)
        self._bus_host = (str(arguments.get("host", "localhost")), int(arguments.get("port", 6379)))
        self._prefix = f"minisgl:{{{service}}}:"
        self._group = group
        self._key = f"{self._prefix}rdzv:{group}"
        self._size = size
        self._revision = revision
        self._expire = max(2, int(10 * silence))
        self._fields: dict[str, str] = {}

    def open(self, meeting: Meeting, boot: int) -> bool:
        """Rank 0: publish a new incarnation, forming. False: another rank 0 was faster."""
        self._fields = {
            "incarnation": f"{meeting.incarnation:016x}",
            "revision": self._revision,
            "host": meeting.host,
            "store_port": str(meeting.store_port),
            "feed_port": str(meeting.feed_port),
            "phase": "forming",
            "boot.0": f"{boot:016x}",
        }
        held = self._read().get("incarnation", "")
        if held == self._fields["incarnation"]:
            return True  # the answer to an earlier try was lost, and others may have joined since
        flat = [part for pair in self._fields.items() for part in pair]
        return bool(self._call(lambda: self._client.eval(
            _OPEN, 1, self._key, held, str(self._expire), *flat
        )))  # fmt: skip

    def started_anew(self) -> list[int]:
        """Rank 0: ranks that had joined, and show another boot in their state since then."""
        held = self._mine()
        ranks = [r for r in range(1, self._size) if f"boot.{r}" in held]
        if not ranks:
            return []
        shown: Any = self._call(lambda: self._client.mget([self._state_key(r) for r in ranks]))
        return [
            rank
            for rank, data in zip(ranks, shown, strict=True)
            if data is not None and _shown_boot(data) not in (None, held[f"boot.{rank}"])
        ]

    def absent(self) -> list[int]:
        """Rank 0: ranks that have not joined."""
        held = self._mine()
        return [rank for rank in range(1, self._size) if f"boot.{rank}" not in held]

    def formed(self) -> None:
        """Rank 0: everybody is there and warm."""
        self._mine()
        self._fields["phase"] = "formed"
        self._publish()

    def keep(self) -> None:
        """Rank 0, each second: publish again after a flush.

        Raises `ReplacedError` if another incarnation stands there.
        """
        if not self._mine():
            self._publish()
        self._call(lambda: self._client.expire(self._key, self._expire))

    def join(self, rank: int, boot: int, *, seconds: float) -> Meeting:
        """Another rank: wait for a forming incarnation of this revision, and join it.

        `StartError` after `seconds`, with what stood there instead.
        """
        deadline = time.monotonic() + seconds
        seen = _NOBODY
        while time.monotonic() < deadline:
            try:
                held = self._read()
                seen = self._why_not(held, rank, boot) if held else _NOBODY
                if held and not seen:
                    meeting = _meeting(held)  # before others see that this rank has joined
                    if self._joined(held, rank, boot):
                        return meeting
            except BusError as error:
                seen = f"Redis does not answer: {error}"
            time.sleep(POLL_SECONDS)
        raise StartError(f"rank {rank} found no group to join in {seconds:g} s: {seen}")

    def replaced(self, incarnation: int) -> bool:
        """Whether another incarnation stands there; that none does proves nothing."""
        return self._read().get("incarnation", "") not in ("", f"{incarnation:016x}")

    def nic(self, interface: str | None, way: tuple[str, int] | None = None) -> Nic:
        """`interface`, else that of the `way` to a host and port: by default that to Redis."""
        if interface:
            return self._network.called(interface)
        if way is None:
            self._read()  # where Redis is not there yet, its name may be none either
        return self._network.towards(*(way or self._bus_host))

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def _state_key(self, rank: int) -> str:
        return f"{self._prefix}state:rank:{self._group}/{rank}"

    def _why_not(self, held: dict[str, str], rank: int, boot: int) -> str:
        if held.get("revision") != self._revision:
            return f"the group is of revision {held.get('revision')!r}, not {self._revision!r}"
        if held.get("phase") != "forming":
            return "the group is formed already, and its rank 0 lives"
        if held.get(f"boot.{rank}", f"{boot:016x}") != f"{boot:016x}":
            return f"another process has joined as rank {rank}"
        if not held.get("host"):
            return "rank 0 gave an empty address"
        if loopback(held["host"]) and not self._network.towards(*self._bus_host).loopback:
            return f"rank 0 gave {held['host']}, which is its host's own: give it --interface"
        return ""

    def _joined(self, held: dict[str, str], rank: int, boot: int) -> bool:
        return self._call(lambda: self._client.eval(
            _JOIN, 1, self._key, held["incarnation"], f"boot.{rank}", f"{boot:016x}"
        )) == 1  # fmt: skip

    def _mine(self) -> dict[str, str]:
        held = self._read()
        if held and held.get("incarnation") != self._fields["incarnation"]:
            raise ReplacedError("another rank 0 has opened a rendezvous for this group")
        # After a flush a rank that joined before it is still known by its boot.
        self._fields |= {name: held[name] for name in held if name.startswith("boot.")}
        return held

    def _publish(self) -> None:
        mapping: Any = dict(self._fields)
        self._call(lambda: self._client.hset(self._key, mapping=mapping))

    def _read(self) -> dict[str, str]:
        raw: Any = self._call(lambda: self._client.hgetall(self._key))
        return {k.decode(errors="replace"): v.decode(errors="replace") for k, v in raw.items()}

    def _call(self, work: Any) -> Any:
        with self._outage.during("rendezvous"):
            try:
                return work()
            except ResponseError as error:
                if not wrong_type(error):
                    raise
                self._client.unlink(self._key)
                log_foreign(self._key, "a hash")
                return work()


def _meeting(held: dict[str, str]) -> Meeting:
    try:
        return Meeting(
            incarnation=int(held["incarnation"], 16),
            host=held["host"],
            store_port=int(held["store_port"]),
            feed_port=int(held["feed_port"]),
        )
    except (KeyError, ValueError) as error:
        raise BusError(f"rendezvous: what stands there cannot be read: {error}") from None


def _shown_boot(data: bytes) -> str | None:
    try:
        return f"{decode_state(data).boot:016x}"
    except ValueError:
        return None


def listeners(host: str, ports: str | None, count: int) -> list[socket.socket]:
    """So many sockets that listen on ports of `A-B`, or anywhere. Raises `UsageError`.

    They listen from the start, and are handed over to who serves there: a port that was only found
    to be free may be taken by another group of the host before it is used.
    """
    candidates: Sequence[int] = [0] * count if ports is None else port_range(ports)
    found: list[socket.socket] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    why = ""
    for port in candidates:
        try:
            found.append(socket.create_server((host, port), family=family))
        except OSError as error:
            why = f": {error.strerror}"
            continue
        if len(found) == count:
            return found
    for one in found:
        one.close()
    shown = ports or "of any port"
    raise UsageError(f"--port-range {shown} has no {count} free ports on {host}{why}")
