"""API keys: of the configuration, and of a file that is read again when it changes."""

import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from minisgl.config import UsageError

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""The file is looked at no more often than this."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """Which keys are let in; everybody is if neither a key nor a file is given.

    Raises `UsageError` if the file cannot be read. One that cannot be read later, or is empty,
    opens nothing: then the keys read last go on, or none does.
    """

    def __init__(self, keys: Sequence[str], file: str | None, clock: Callable[[], float]) -> None:
        self._given = [_digest(key) for key in keys]
        self._file = None if file is None else Path(file)
        self._clock = clock
        self._of_file: list[bytes] = []
        self._stamp: tuple[int, ...] | None = None
        self._checked = clock()
        if self._file is not None:
            try:
                self._load(self._file)
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"--api-keys-file {file}: {_reason(error)}") from None

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._given) or self._file is not None

    def allow(self, authorization: bytes | None) -> bool:
        """Whether this value of the header `Authorization` (None: absent) is let in."""
        if not self.required:
            return True
        self._refresh()
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        asked = hashlib.sha256(key.strip()).digest()
        # Every key is compared, and digests of one length: the time tells nothing.
        matches = [hmac.compare_digest(asked, known) for known in self._given + self._of_file]
        return any(matches)

    def _load(self, file: Path) -> None:
        status = os.stat(file)
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp != self._stamp:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            self._of_file = [_digest(line) for line in lines if line and line[0] != "#"]
            self._stamp = stamp
            log.info("api keys read file=%s keys=%d", file, len(self._of_file))
            if not self._of_file + self._given:
                log.warning("nobody is let in: file=%s holds no key", file)

    def _refresh(self) -> None:
        now = self._clock()
        if self._file is None or now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        try:
            self._load(self._file)
        except (OSError, UnicodeDecodeError) as error:
            log.warning("api keys kept, file=%s unreadable: %s", self._file, _reason(error))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
