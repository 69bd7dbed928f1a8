"""The reading end of `tok` in Redis: a stream with one consumer group, which all tokenizers share.

An entry stays pending until what follows from it was written. What a reader has taken and left for
the heartbeat time-out goes to the others; one that comes back under its name finds it again.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import redis
from redis.exceptions import ResponseError

from minisgl.bus.base import Entry
from minisgl.bus.connection import block_milliseconds

GROUP = "tokenizers"
"""The consumer group."""
ENTRIES_AT_ONCE = 8
"""What one reader takes, the others cannot have."""
OWN_ENTRIES_AT_ONCE = 256
"""Of what it had taken before it was started again: nobody else gets it before the time-out."""
CLAIM_SECONDS = 0.25
"""How often a reader looks for what others have left."""
CONSUMERS_SECONDS = 60.0
"""How often a reader looks for consumers that are gone."""


class SharedQueue:
    """One reader. `silence` is the heartbeat time-out in seconds, `key` that of the stream.

    `worker` is the name under which its share is kept. `read` makes an `Entry` of an id and its
    fields, or says what is wrong with them and returns None.
    """

    def __init__(
        self,
        client: redis.Redis,
        key: str,
        worker: str,
        silence: float,
        read: Callable[[bytes, dict[bytes, bytes]], Entry | None],
    ) -> None:
        self._client = client
        self._key = key
        self._worker = worker
        self._silence_ms = silence * 1000
        self._read = read
        self._recovered = False
        self._next_claim = self._next_look = 0.0
        self._claim_from = b"0-0"

    def receive(self, timeout: float) -> list[Entry]:
        """Entries that are now this reader's, or none after `timeout` seconds at most.

        Raises what the library does, also for a key that holds no stream.
        """
        rows: Any
        try:
            if not self._recovered:
                # What this worker had taken under this name before it was started again.
                rows = self._client.xreadgroup(
                    GROUP, self._worker, {self._key: "0"}, count=OWN_ENTRIES_AT_ONCE
                )
                self._recovered = True
                if rows and rows[0][1]:
                    return self._entries(rows[0][1])
            now = time.monotonic()
            if now >= self._next_claim:
                self._next_claim = now + CLAIM_SECONDS
                claimed = self._claim()
                if claimed:
                    return claimed
            if now >= self._next_look:
                self._next_look = now + CONSUMERS_SECONDS
                self._forget_consumers()
            rows = self._client.xreadgroup(
                GROUP,
                self._worker,
                {self._key: ">"},
                count=ENTRIES_AT_ONCE,
                block=block_milliseconds(timeout),
            )
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            # New, flushed, or destroyed: from the start, to pass over nothing that waits.
            self._make_group()
            return []
        return self._entries(rows[0][1], fresh=True) if rows else []

    def _claim(self) -> list[Entry]:
        answer: Any = self._client.xautoclaim(
            self._key, GROUP, self._worker, self._milliseconds(1), self._claim_from,
            count=ENTRIES_AT_ONCE,
        )  # fmt: skip
        self._claim_from = answer[0]
        return self._entries(answer[1])

    def _forget_consumers(self) -> None:
        """Remove readers that are gone and left nothing: each new name would stay for ever.

        One that was only frozen is made again by its next call.
        """
        found: Any = self._client.xinfo_consumers(self._key, GROUP)
        for consumer in found:
            if not consumer["pending"] and consumer["idle"] > self._milliseconds(10):
                self._client.xgroup_delconsumer(self._key, GROUP, consumer["name"])

    def _make_group(self) -> None:
        try:
            self._client.xgroup_create(self._key, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._recovered = False

    def _entries(self, rows: Iterable[Any], *, fresh: bool = False) -> list[Entry]:
        entries, useless = [], []
        for token, fields in rows:
            entry = self._read(token, fields) if fields else None
            if entry is None:
                useless.append(token)  # garbage, or deleted by who finished it
                continue
            if not fresh:
                pending: Any = self._client.xpending_range(self._key, GROUP, token, token, 1)
                entry.deliveries = pending[0]["times_delivered"] if pending else 1
            entries.append(entry)
        if useless:
            forget(self._client, self._key, useless)
        return entries

    def _milliseconds(self, silences: int) -> int:
        return max(1, int(silences * self._silence_ms))


def forget(client: redis.Redis, key: str, ids: Sequence[bytes]) -> None:
    """Acknowledge and delete these entries of the shared stream."""
    pipe = client.pipeline(transaction=False)
    pipe.xack(key, GROUP, *ids)
    pipe.xdel(key, *ids)
    for result in pipe.execute(raise_on_error=False):
        # Without the group there is nothing to acknowledge, and deleting is enough.
        if isinstance(result, Exception) and not str(result).startswith("NOGROUP"):
            raise result
