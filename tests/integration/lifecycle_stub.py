"""A launcher with stub children, for test_lifecycle.py: what they do is said on the command line.

`supervise JSON` runs the supervisor as `minisgl serve` does, over children that are this file too.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from minisgl.config import StartError, UsageError
from minisgl.launch.supervisor import ChildSpec, Supervisor
from minisgl.lifecycle import Lifecycle, report_errors
from minisgl.rundir import RunDirectory


def child(name: str, behaviour: str, bus: str, journal: str) -> int:
    """One stub. It writes its pid, and later how it ended, into the journal."""
    life = Lifecycle()
    life.handle_signals()

    def note(what: str) -> None:
        with open(journal, "a") as file:
            file.write(f"{name} {what}\n")

    with life.directory(bus):
        note(f"pid {os.getpid()}")
        if behaviour == "usage-error":
            raise UsageError("the model folder is missing")
        if behaviour == "start-error":
            raise StartError("the weights are broken")
        if behaviour == "killed-at-start":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "never-ready":
            life.stop.wait()
            return 0
        if behaviour == "stuck":  # its main loop takes no notice of any signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        life.ready()
        note("ready")
        if behaviour == "stuck":
            while True:
                time.sleep(60)
        if behaviour == "exits-0":
            return 0
        if behaviour == "exits-7":
            return 7
        life.stop.wait()
        note("stopped")
        return 3 if behaviour == "stops-with-3" else 0


def supervise(children: list[dict[str, object]], journal: str, options: dict[str, object]) -> int:
    """Run the children until the end."""
    directory = RunDirectory.create()
    try:
        bus = f"ipc://{directory.path}"
        specs = []
        for fields in children:
            fields = dict(fields)
            behaviour = str(fields.pop("behaviour"))
            name = str(fields["name"])
            command = (sys.executable, __file__, "child", name, behaviour, bus, journal)
            specs.append(dataclasses.replace(ChildSpec(name=name, command=command), **fields))
        supervisor = Supervisor("launcher", specs, **options)  # type: ignore[arg-type]
        return supervisor.run(lambda: print("ready", flush=True))
    finally:
        directory.release()


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "child":
        sys.exit(report_errors(rest[0], lambda: child(*rest)))
    given = json.loads(Path(rest[0]).read_text())
    sys.exit(report_errors("launcher", lambda: supervise(**given)))
