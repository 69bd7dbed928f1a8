"""/dev/shm of a pod, which NCCL needs between the ranks of a node and does not clean up.

It is a folder of this group alone, and it outlives containers: what a killed rank has left there
would take the node's memory until it boots.
"""

import contextlib
import tempfile
from pathlib import Path

from minisgl.config import StartError

FOLDER = Path("/dev/shm")


def prepare_shared_memory(folder: Path = FOLDER) -> None:
    """Empty it, before this rank joins its group: NCCL makes files only after all have joined.

    Raises `StartError` where it cannot be written: NCCL would fall back to sockets in silence.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StartError(
            f"{folder} cannot be written ({error.strerror}), and NCCL needs it between pods: see "
            "ranks.sharedMemory (under SELinux: seLinuxOptions.type spc_t)"
        ) from None
    empty_shared_memory(folder)


def empty_shared_memory(folder: Path = FOLDER) -> None:
    """Remove the files in it, and leave those that are another user's."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            with contextlib.suppress(OSError):
                if not file.is_dir():
                    file.unlink()
