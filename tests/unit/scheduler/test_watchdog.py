"""A process whose loop stands still ends itself, with a code of its own."""

import subprocess
import sys

import pytest

from minisgl.scheduler.main import step_tokens
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


FORMING = """
import ctypes, logging, os, signal, threading, time
logging.basicConfig(level="INFO")
from minisgl.scheduler.watchdog import ends_at_once
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
{before}
with ends_at_once(stop):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    {waits}
print("alive", stop.is_set())
"""
IN_C = "mutex = bytes(64); [ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]"


def _form(waits: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FORMING.format(waits=waits, before=before)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("waits", ["time.sleep(20)", IN_C], ids=["in Python", "in C"])
def test_sigterm_ends_a_rank_that_waits_for_its_group(waits: str) -> None:
    done = _form(waits)
    assert (done.returncode, done.stdout) == (0, "") and "before the group" in done.stderr


def test_a_rank_that_was_asked_to_end_before_does_not_wait() -> None:
    done = _form("stop.wait(20)", before="stop.set()")
    assert (done.returncode, done.stdout) == (0, "")


def test_sigterm_asks_a_formed_group_to_drain() -> None:
    body = FORMING.replace("print", "stop.wait(20)\nprint")
    done = subprocess.run(
        [sys.executable, "-c", body.format(waits="pass", before="")],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "alive True\n")


@pytest.mark.parametrize(
    ("rate", "silence", "tokens"),
    [(1e9, 30, 8192), (400, 30, 1500), (400, 4, 200), (10, 4, 64)],
)
def test_no_step_of_prompts_lasts_so_long_that_the_group_seems_to_hang(
    rate: float, silence: float, tokens: int
) -> None:
    assert step_tokens(8192, rate, silence) == tokens
    assert step_tokens(50, rate, silence) == 50
