"""What was measured on this device once, kept for the next start: which way to compute is fastest.

A measurement decides between ways whose results differ in their last bits, so one that is repeated
at each start may give another answer at another start, and takes time. The file stands in the
kernel cache, `measured-<key>.json`; the key is a hash of everything that decides how fast things
are: the device, the driver, CUDA, torch, and the sources of all kernels. It is only ever an
advice: a file that is missing, damaged or not writable means to measure again.
"""

import functools
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from minisgl_kernels.build import CSRC, cache_root

_log = logging.getLogger(__name__)

JSON = Any
"""What json gives: whoever reads it checks it."""


class Measured:
    """Results by name, in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values = _read(path)

    def get(self, name: str) -> JSON:
        """What was kept under this name; None if nothing was."""
        return self._values.get(name)

    def put(self, name: str, value: JSON) -> None:
        """Keep a result. Those of other processes stay; one under the same name is replaced."""
        self._values = {**_read(self._path), **self._values, name: value}
        made = self._path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made.write_text(json.dumps(self._values, indent=1, sort_keys=True))
            os.replace(made, self._path)  # no reader finds half a file
        except OSError as error:
            _log.debug("measurements are not kept in %s: %s", self._path, error)
            with suppress(OSError):
                made.unlink(missing_ok=True)


@functools.cache
def measured() -> Measured:
    """Those of the current device."""
    return Measured(cache_root() / f"measured-{_key(_device())}.json")


def _read(path: Path) -> dict[str, JSON]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("measurements in %s cannot be read, measuring again: %s", path, error)
        return {}
    if not isinstance(values, dict):
        _log.warning("measurements in %s are no table, measuring again", path)
        return {}
    return values


def _device() -> list[str]:
    found = [torch.__version__, str(torch.version.cuda)]
    if torch.cuda.is_available():
        found += [torch.cuda.get_device_name(), str(torch.cuda.get_device_capability())]
    with suppress(OSError):
        found.append(Path("/proc/driver/nvidia/version").read_text())
    return found


def _key(device: Iterable[str]) -> str:
    digest = hashlib.sha256()
    sources = [*sorted(Path(__file__).parent.glob("*.py")), *sorted(CSRC.glob("*.cu*"))]
    for part in (*device, *(source.read_text("utf-8") for source in sources)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]
