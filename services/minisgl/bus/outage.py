"""Redis that is away: a log line when that begins, few while it lasts, and one when it is over."""

import logging
import threading
import time
from collections.abc import Callable

from redis.exceptions import AuthenticationError, RedisError

from minisgl.bus.base import BusError

log = logging.getLogger(__name__)

REPEAT_SECONDS = 10.0
"""An outage that lasts is logged so often."""
_PARTS = {"acknowledging": "reading", "reading states": "reading"}
"""These are not tried again by themselves; that reading works says that they would. A full Redis
can be read, and takes nothing: writing is another part."""


class Outage:
    """What one worker knows of it. Its calls come from several threads.

    `login` says who this is to Redis, and where its password comes from.
    """

    def __init__(self, login: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._login = login
        self._clock = clock
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        """Parts whose last call failed."""
        self._since = self._logged = 0.0

    def during(self, what: str) -> "_During":
        """A context for calls to Redis: what the library raises there becomes a `BusError`."""
        return _During(self, what)

    def failed(self, what: str, error: BaseException) -> str:
        """A call failed; returns what is to be said of it."""
        reason = str(error) or type(error).__name__
        if isinstance(error, AuthenticationError):
            reason = f"Redis refuses {self._login} ({reason})"
        text, now = f"{what}: {reason}", self._clock()
        with self._lock:
            if not self._failing:
                self._since = self._logged = now
                log.warning("Redis cannot be used: %s", text)
            elif now - self._logged >= REPEAT_SECONDS:
                self._logged = now
                log.warning("Redis cannot be used for %.0f s now: %s", now - self._since, text)
            self._failing.add(_PARTS.get(what, what))
        return text

    def answered(self, what: str) -> None:
        """A call succeeded."""
        part = _PARTS.get(what, what)
        if part not in self._failing:
            return
        with self._lock:
            self._failing.discard(part)
            if not self._failing:
                log.warning("Redis can be used again, after %.0f s", self._clock() - self._since)


class _During:
    def __init__(self, outage: Outage, what: str) -> None:
        self._outage = outage
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RedisError | OSError):
            raise BusError(self._outage.failed(self._what, error)) from error
        if error is None:
            self._outage.answered(self._what)
