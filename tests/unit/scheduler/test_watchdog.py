"""A process whose loop stands still ends itself, with a code of its own."""

import subprocess
import sys

import pytest

from minisgl.scheduler.watchdog import STUCK_CODE

PROGRAM = """
import signal, sys, threading, time
from minisgl.scheduler.watchdog import Watchdog
dog = Watchdog(0.5)
dog.start()
{body}
"""


def _run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_a_loop_that_turns_goes_on() -> None:
    body = "for _ in range(15): dog.turn(); time.sleep(0.1)\nprint('alive')"
    assert _run(body).stdout == "alive\n"


@pytest.mark.parametrize(
    "stuck", ["time.sleep(20)", "threading.Lock().acquire() and 0 or time.sleep(20)"]
)
def test_a_loop_that_stands_still_ends_the_process(stuck: str) -> None:
    done = _run(f"dog.turn()\n{stuck}\nprint('alive')")
    assert done.returncode == STUCK_CODE and done.stdout == ""


def test_a_process_that_was_frozen_ends_before_it_says_anything() -> None:
    body = (
        "import os, subprocess\n"
        "subprocess.Popen(['sh', '-c', f'sleep 1; kill -CONT {os.getpid()}'])\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "dog.turn()\nprint('alive')"
    )
    done = _run(body)
    assert done.returncode == STUCK_CODE and done.stdout == ""


def test_a_loop_that_has_ended_may_take_its_time() -> None:
    assert _run("dog.stop()\ntime.sleep(1)\nprint('alive')").stdout == "alive\n"
