"""Which group has which prefix in its cache: the sets `prefix:<group>` in Redis.

A prompt is cut into blocks of 64 tokens, and each block's hash covers all blocks before it: a hash
that a group shows stands for a whole prefix. Rank 0 shows those that it put into its cache most
recently; a tokenizer asks how far the groups know a prompt. Both are hints: a stale one costs a
prefix that is computed again, and neither side ever waits for them or fails by them.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import redis
import xxhash
from redis.exceptions import RedisError

from minisgl.bus.connection import ANSWER_SECONDS, connection_arguments
from minisgl.config import WorkerConfig

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]

BLOCK = 64
"""Tokens a hash."""
MAX_HASHES = 65_536
"""Most hashes that a group shows: about 4 million tokens, and 3 MB in Redis."""
PUBLISH_SECONDS = 1.0
RETRY_SECONDS = 5.0
"""After a failure everything is published again, but a full Redis is not sent 1 MB each second."""
WAITING_PREFIXES = 4096
"""Most prefixes that wait to be hashed, while Redis is away; the oldest are dropped."""
HASHES_AT_ONCE = 4096
"""In one command: Redis serves nobody else meanwhile."""
CLOSE_SECONDS = 1.0
LOOKUP_SECONDS = 0.1
"""A tokenizer waits so long at most: the prompt is computed faster than it is waited for."""
ASKED = 128
"""Most hashes of one prompt that are asked for: of a longer one each second block, or third, ..."""
PAUSE_SECONDS = 1.0
"""How long a tokenizer does not ask after a failure."""


def block_hashes(ids: Ids) -> list[int]:
    """[T] token ids -> [T // 64] hashes of the prefixes that end with each whole block.

    64-bit xxh3 of the previous hash (8 bytes; 0 before the first) and the block's int32 bytes, all
    little-endian.
    """
    raw = ids.astype("<i4").tobytes()
    size, last, hashes = BLOCK * 4, b"\0" * 8, []
    for start in range(0, len(raw) - size + 1, size):
        value = xxhash.xxh3_64_intdigest(last + raw[start : start + size])
        last = value.to_bytes(8, "little")
        hashes.append(value)
    return hashes


class RecentHashes:
    """The hashes used most recently, and what changed since the last `take`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[int, None] = OrderedDict()
        self._added: set[int] = set()
        self._removed: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        """From the one that goes first."""
        return iter(self._held)

    def use(self, chain: Sequence[int]) -> None:
        """Remember the hashes of one prompt. Of a chain its end goes first: it needs the rest."""
        for value in reversed(chain[: self._limit]):
            if value in self._held:
                self._held.move_to_end(value)
                continue
            self._held[value] = None
            if value in self._removed:
                self._removed.discard(value)
            else:
                self._added.add(value)
        while len(self._held) > self._limit:
            value, _ = self._held.popitem(last=False)
            if value in self._added:
                self._added.discard(value)
            else:
                self._removed.add(value)

    def take(self) -> tuple[set[int], set[int]]:
        """(Added, removed) since the last call."""
        changes = self._added, self._removed
        self._added, self._removed = set(), set()
        return changes


class PrefixPublisher:
    """Rank 0's side. `add` only hands over; a thread hashes, and tells Redis each second.

    The set is compared by its size with what it should be. Whatever made them differ, a flush, a
    full Redis or the last words of an earlier incarnation, is mended by writing the set anew; so
    the first round clears what the incarnation before has left.
    """

    def __init__(
        self,
        config: WorkerConfig,
        group: str,
        cache_tokens: int,
        *,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        """`cache_tokens`: what the group's KV cache holds; it shows no more than that.

        `guard` is called before Redis is, and ends a process that must not write any more.
        """
        self._client = _client(config, ANSWER_SECONDS)
        self._key = _key(config.service, group)
        self._expire = max(2, int(10 * config.heartbeat_timeout_seconds))
        self._recent = RecentHashes(max(1, min(MAX_HASHES, cache_tokens // BLOCK)))
        self._waiting: deque[tuple[Ids, Ids]] = deque(maxlen=WAITING_PREFIXES)
        self._guard = guard
        self._anew = True
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefixes", daemon=True)

    def start(self) -> None:
        """From now on the set is this incarnation's."""
        self._thread.start()

    def add(self, prompt: Ids, output: Ids) -> None:
        """Both together are in the cache. They must not change any more; nothing waits here."""
        if len(prompt) + len(output) >= BLOCK:
            self._waiting.append((prompt, output))

    def publish(self) -> None:
        """Tell Redis what was added. Raises `RedisError` and `OSError`; the next call mends it."""
        while self._waiting:
            self._recent.use(block_hashes(np.concatenate(self._waiting.popleft())))
            # The step loop may have waited for the interpreter's lock: it gets it here.
            time.sleep(0)
        added, removed = self._recent.take()
        anew, self._anew = self._anew, True  # until it went well
        pipe = self._client.pipeline(transaction=False)
        if anew:
            pipe.unlink(self._key)
            added, removed = set(self._recent), set()
        for part in _parts(removed):
            pipe.srem(self._key, *part)
        for part in _parts(added):
            pipe.sadd(self._key, *part)
        pipe.expire(self._key, self._expire)
        pipe.scard(self._key)
        self._guard()
        *_, size = pipe.execute()
        self._anew = size != len(self._recent)

    def close(self) -> None:
        """End the thread. The set stays until it expires or the next incarnation clears it."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        self._client.close()

    def _run(self) -> None:
        pause, well = 0.0, True
        while not self._end.wait(pause):
            try:
                self.publish()
                pause, well = PUBLISH_SECONDS, True
            except (RedisError, OSError) as error:
                if well:  # once an outage: it is no fault of this service
                    log.warning("cached prefixes are not published for now: %s", error)
                pause, well = RETRY_SECONDS, False


class PrefixLookup:
    """A tokenizer's side: how far the groups know a prompt."""

    def __init__(self, config: WorkerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = _client(config, LOOKUP_SECONDS)
        self._service = config.service
        self._clock = clock
        self._not_before = float("-inf")

    def cached(self, groups: Sequence[str], ids: Sequence[int]) -> dict[str, int]:
        """By group: tokens of the longest prefix of `ids` that it shows.

        In whole blocks, or for a long prompt in steps of so many that `ASKED` hashes cover it.
        0 for all if Redis does not answer at once, and for a while after that.
        """
        nothing = dict.fromkeys(groups, 0)
        if len(ids) < BLOCK or self._clock() < self._not_before:
            return nothing
        hashes = block_hashes(np.array(ids, np.int32))
        step = -(-len(hashes) // ASKED)
        # A hash covers all blocks before it, so those in between need not be asked for.
        members = [_member(value) for value in hashes[step - 1 :: step]]
        pipe = self._client.pipeline(transaction=False)
        for group in groups:
            pipe.smismember(_key(self._service, group), members)
        try:
            found: list[Any] = pipe.execute()
        except (RedisError, OSError) as error:
            log.info("groups are chosen without their prefixes for now: %s", error)
            self._not_before = self._clock() + PAUSE_SECONDS
            return nothing
        return {
            group: step * BLOCK * sum(takewhile(bool, known))
            for group, known in zip(groups, found, strict=True)
        }

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()


def _client(config: WorkerConfig, seconds: float) -> redis.Redis:
    arguments = connection_arguments(config.bus, config.bus_password_file, config.bus_ca_file)
    return redis.Redis(**arguments | {"socket_timeout": seconds, "socket_connect_timeout": seconds})


def _key(service: str, group: str) -> str:
    return f"minisgl:{{{service}}}:prefix:{group}"


def _member(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _parts(values: Iterable[int]) -> Iterator[list[bytes]]:
    members = map(_member, values)
    while part := list(islice(members, HASHES_AT_ONCE)):
        yield part
