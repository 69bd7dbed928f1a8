"""The private directory of one running service: its sockets and states, and who removes it.

It lies in `<tmp>/minisgl-<user id>/` and only its user can enter it. Every process of the service
holds a shared lock on `DIR/lock`. Whoever can make that lock exclusive when it leaves is the last
one, and removes the directory. Locks die with their holder, so after a `kill -9` of everything, or
a power loss, the next start finds directories that nobody holds, and removes them.

Making and cleaning happen under a lock on the parent directory: a directory that is just being
made is never taken for a stale one.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from minisgl.config import StartError

LOCK_NAME = "lock"
MAX_PATH_BYTES = 84
"""Leaves room for the name of a socket within the 107 bytes of a Unix socket's path."""


class RunDirectory:
    """This process's share of one directory; `release` gives it back."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        self._releasing = threading.Lock()

    @classmethod
    def create(cls) -> "RunDirectory":
        """A new empty directory; removes those that nobody holds. Raises `StartError`."""
        base = _base()
        while True:
            base.mkdir(mode=0o700, exist_ok=True)
            try:
                parent = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:  # the last service of this user has just removed it
                continue
            except OSError as error:
                raise _unusable(base, error.strerror or "cannot be opened") from None
            try:
                status = os.fstat(parent)
                if status.st_uid != os.getuid() or status.st_mode & 0o077:
                    raise _unusable(base, "others than this user may use it")
                fcntl.flock(parent, fcntl.LOCK_EX)
                _remove_stale(base)
                try:
                    path = Path(tempfile.mkdtemp(prefix="", dir=base))
                except FileNotFoundError:
                    continue
                lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_SH)
                return cls(path, lock)
            except OSError as error:
                raise _unusable(base, str(error)) from None
            finally:
                os.close(parent)

    @classmethod
    def join(cls, path: str | Path) -> "RunDirectory | None":
        """A share of a launcher's directory; None for any other one, which is never removed.

        Raises `StartError` if the launcher's directory has gone meanwhile.
        """
        path = Path(path)
        if path.absolute().parent != _base().absolute():
            return None
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise StartError(f"the service's directory {path} has gone: it has ended") from None
        fcntl.flock(lock, fcntl.LOCK_SH)
        return cls(path, lock)

    def release(self, wait: float = 0.0) -> None:
        """Give the share back; the last one removes the directory. Harmless when repeated.

        `wait` is how many seconds others get to let go. It is needed after a launcher was killed:
        the kernel closes its pipes, which is what we noticed, a moment before its locks.
        """
        with self._releasing:
            lock, self._lock = self._lock, None
            if lock is None:
                return
            deadline = time.monotonic() + wait
            try:
                while not (last := _exclusive(lock)) and time.monotonic() < deadline:
                    time.sleep(0.01)
                if last:
                    _remove(self.path)
            finally:
                os.close(lock)
            with contextlib.suppress(OSError):  # not empty: other services of this user run
                self.path.parent.rmdir()


def _base() -> Path:
    base = Path(tempfile.gettempdir()) / f"minisgl-{os.getuid()}"
    if len(os.fsencode(base)) + 9 > MAX_PATH_BYTES:
        raise _unusable(base, "its path is too long for the sockets in it")
    return base


def _unusable(base: Path, why: str) -> StartError:
    return StartError(f"cannot use {base}: {why}; set TMPDIR to another directory")


def _exclusive(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(base: Path) -> None:
    for path in base.iterdir():
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            _remove(path)  # its maker was killed before it could lock it
        except OSError:
            continue  # nothing that a service made
        else:
            if _exclusive(lock):
                _remove(path)
            os.close(lock)


def _remove(path: Path) -> None:
    # Two processes may be at it, and a worker that is just ending may still write its state.
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
