"""A whole service in the background of a program that uses it, such as `minisgl chat`."""

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Sequence

from minisgl.config import StartError
from minisgl.launch.supervisor import Child, ChildSpec, minisgl_command

STOP_SECONDS = 20.0


@contextlib.contextmanager
def background_service(model: str, arguments: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a `minisgl serve MODEL` on a free port, which ends with the `with` block.

    It also ends when this process is killed, and it ignores Ctrl-C. Where it does not start, it has
    said why, and `SystemExit` carries its exit code.
    """
    read, write = os.pipe()
    command = minisgl_command("serve", "--port=0", *arguments, "--", model)
    child = None
    try:
        child = Child(ChildSpec(name="the service", command=command, quiet=True), read)
        select.select([child.ready_fd], [], [])
        child.read_ready()
        if child.ready is None:
            code = child.process.wait()
            if code > 0:
                raise SystemExit(code)
            raise StartError(f"{child.ending()} before it was ready")
        yield child.ready
    finally:
        if child is not None:
            _stop(child)
            os.close(child.ready_fd)
        os.close(read)
        os.close(write)


def _stop(child: Child) -> None:
    child.send(signal.SIGTERM)
    try:
        child.process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.send(signal.SIGKILL)
        child.process.wait()
