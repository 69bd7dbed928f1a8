"""How the processes of a service start and end together, and that nothing of them stays.

Stub children stand for the roles, so each fault comes at will and takes milliseconds.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import StartError
from minisgl.gateway.listen import bind_http, service_url
from minisgl.rundir import LOCK_NAME, RunDirectory

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

STUB = Path(__file__).with_name("lifecycle_stub.py")
LIMIT = 20.0
BOTH = [signal.SIGINT, signal.SIGTERM]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail with its name when it takes too long."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(0.01)


class World:
    """Services of one test: their processes by a mark in the environment, and their TMPDIR."""

    def __init__(self) -> None:
        self.mark = f"MINISGL_TEST_MARK={uuid.uuid4().hex}"
        self.tmp = Path(tempfile.mkdtemp(prefix="life-"))
        self.work = Path(tempfile.mkdtemp(prefix="life-work-"))

    def processes(self) -> dict[int, str]:
        """Command lines of all living processes that belong to this test."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        if command:
                            found[int(entry.name)] = command
                except OSError:
                    pass
        return found

    def directories(self) -> list[Path]:
        """Private directories of services. Beside theirs stands, for a moment, the file by which
        Python tries whether it may write there."""
        return [path for base in self.tmp.glob("minisgl-*") for path in base.iterdir()]

    def start(self, *children: dict[str, Any], **options: Any) -> "Service":
        return Service(self, children, {"startup_seconds": LIMIT} | options)

    def assert_nothing_left(self) -> None:
        until(lambda: not self.processes(), f"no process is left of {self.processes()}")
        assert sorted(self.tmp.rglob("*")) == []


class Service:
    """One launcher with stub children."""

    def __init__(self, world: World, children: Any, options: dict[str, Any]) -> None:
        name = uuid.uuid4().hex
        self.journal = world.work / f"{name}.journal"
        self.journal.touch()
        self._errors = world.work / f"{name}.err"
        spec = world.work / f"{name}.json"
        spec.write_text(
            json.dumps(
                {"children": list(children), "journal": str(self.journal), "options": options}
            )
        )
        key, _, value = world.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, str(STUB), "supervise", str(spec)],
            env=dict(os.environ, TMPDIR=str(world.tmp), **{key: value}),
            stdout=subprocess.PIPE,
            stderr=self._errors.open("wb"),
            text=True,
        )

    def wait_ready(self) -> "Service":
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.errors()
        return self

    def wait_journal(self, *lines: str) -> "Service":
        until(lambda: set(lines) <= set(self.notes()), f"{lines} are in {self.notes()}")
        return self

    def notes(self) -> list[str]:
        return self.journal.read_text().splitlines()

    def pid(self, name: str) -> int:
        def found() -> list[int]:
            notes = [n.rsplit(" ", 2) for n in self.notes()]
            return [int(n[2]) for n in notes if len(n) == 3 and n[:2] == [name, "pid"]]

        until(lambda: bool(found()), f"{name} has started")
        return found()[0]

    def end(self) -> int:
        return self.process.wait(LIMIT)

    def errors(self) -> list[str]:
        return self._errors.read_text().splitlines()


def stub(name: str, behaviour: str = "works", **fields: Any) -> dict[str, Any]:
    return {"name": name, "behaviour": behaviour, "stage": 0 if name == "gateway" else 1} | fields


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for pid in world.processes():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(world.tmp)
    shutil.rmtree(world.work)


ALL = [stub("gateway"), stub("detokenizer"), stub("rank 0"), stub("rank 1", waited=False)]


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_ends_the_gateway_first_and_leaves_nothing(world: World, number: int) -> None:
    service = world.start(*ALL).wait_ready().wait_journal("rank 1 ready")
    service.process.send_signal(number)
    assert service.end() == 0
    stopped = [n.removesuffix(" stopped") for n in service.notes() if n.endswith("stopped")]
    assert stopped[0] == "gateway"
    assert sorted(stopped) == ["detokenizer", "gateway", "rank 0", "rank 1"]
    assert service.errors() == []
    world.assert_nothing_left()


def test_an_interrupt_of_the_whole_process_group_ends_the_gateway_first_too(world: World) -> None:
    # What Ctrl-C at a terminal does.
    service = world.start(*ALL).wait_ready().wait_journal("rank 1 ready")
    for pid in world.processes():
        os.kill(pid, signal.SIGINT)
    assert service.end() == 0
    assert next(n for n in service.notes() if n.endswith("stopped")) == "gateway stopped"
    world.assert_nothing_left()


def test_a_sigterm_to_the_whole_process_group_is_an_orderly_end_too(world: World) -> None:
    service = world.start(*ALL).wait_ready().wait_journal("rank 1 ready")
    pids = sorted(world.processes(), key=lambda pid: pid != service.process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    assert service.end() == 0
    assert service.errors() == []
    world.assert_nothing_left()


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_during_the_start_ends_everything(world: World, number: int) -> None:
    service = world.start(stub("gateway"), stub("rank 0", "never-ready"))
    service.pid("rank 0")
    service.process.send_signal(number)
    assert service.end() == 0
    world.assert_nothing_left()


@pytest.mark.parametrize("name", ["gateway", "detokenizer", "rank 0", "rank 1"])
def test_the_death_of_any_child_ends_the_service_with_a_line_that_names_it(
    world: World, name: str
) -> None:
    service = world.start(*ALL).wait_ready()
    os.kill(service.pid(name), signal.SIGKILL)
    assert service.end() == 1
    (line,) = service.errors()
    assert line.startswith(f"launcher: {name} was ended by SIGKILL")
    world.assert_nothing_left()


@pytest.mark.parametrize("behaviour, code", [("exits-0", 0), ("exits-7", 7)])
def test_a_child_that_ends_by_itself_ends_the_service(
    world: World, behaviour: str, code: int
) -> None:
    service = world.start(stub("gateway"), stub("rank 0", behaviour))
    assert service.end() == 1
    assert any(f"rank 0 ended with code {code}" in line for line in service.errors()) or code
    world.assert_nothing_left()


@pytest.mark.parametrize("behaviour, code, words", [
    ("usage-error", 2, "the model folder is missing"),
    ("start-error", 1, "the weights are broken"),
])  # fmt: skip
def test_the_error_of_a_child_that_cannot_start_is_the_last_line(
    world: World, behaviour: str, code: int, words: str
) -> None:
    service = world.start(stub("gateway"), stub("rank 0", behaviour), stub("rank 1", "never-ready"))
    assert service.end() == code
    assert service.errors()[-1] == f"rank 0: {words}"
    world.assert_nothing_left()


def test_a_child_that_is_killed_during_the_start_is_named(world: World) -> None:
    service = world.start(stub("gateway", "never-ready"), stub("rank 0", "killed-at-start"))
    assert service.end() == 1
    assert service.errors() == [
        "launcher: rank 0 was ended by SIGKILL (out of memory?) before it was ready"
    ]
    world.assert_nothing_left()


def test_a_start_that_takes_too_long_says_for_whom_it_waited(world: World) -> None:
    service = world.start(stub("gateway"), stub("rank 0", "never-ready"), startup_seconds=1.5)
    assert service.end() == 1
    assert "still waiting for rank 0" in service.errors()[-1]
    world.assert_nothing_left()


def test_children_end_when_the_launcher_is_killed(world: World) -> None:
    service = world.start(*ALL).wait_ready().wait_journal("rank 1 ready")
    service.process.kill()
    world.assert_nothing_left()


def test_children_end_when_the_launcher_is_killed_while_it_starts_them(world: World) -> None:
    service = world.start(stub("gateway", "never-ready"), stub("rank 0", "never-ready"))
    service.pid("gateway"), service.pid("rank 0")
    service.process.kill()
    world.assert_nothing_left()


def test_a_child_with_a_stuck_main_loop_ends_too_when_the_launcher_is_killed(
    world: World,
) -> None:
    service = world.start(stub("gateway"), stub("rank 0", "stuck")).wait_ready()
    service.process.kill()
    world.assert_nothing_left()


def test_a_child_that_does_not_stop_in_time_is_killed_and_named(world: World) -> None:
    service = world.start(stub("gateway"), stub("rank 0", "stuck", stop_seconds=0.2)).wait_ready()
    service.process.terminate()
    assert service.end() == 1
    assert service.errors() == ["launcher: rank 0 did not end in 0.2 s: killed"]
    world.assert_nothing_left()


def test_a_second_interrupt_ends_everything_at_once(world: World) -> None:
    service = world.start(stub("gateway", "stuck", stop_seconds=600), stub("rank 0")).wait_ready()
    service.process.send_signal(signal.SIGINT)
    # The launcher is waiting for the gateway as soon as its first SIGINT is no longer pending.
    until(lambda: not pending(service.process.pid, signal.SIGINT), "the first SIGINT is taken")
    service.process.send_signal(signal.SIGINT)
    assert service.end() == 130
    world.assert_nothing_left()


def pending(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line for line in lines if line.startswith("ShdPnd")).split()[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_an_engine_that_dies_while_the_gateway_drains_ends_the_drain(world: World) -> None:
    service = world.start(stub("gateway", "stuck", stop_seconds=600), stub("rank 0")).wait_ready()
    service.process.terminate()
    os.kill(service.pid("rank 0"), signal.SIGKILL)
    assert service.end() == 1
    assert service.errors()[-1].startswith("launcher: rank 0 was ended by SIGKILL")
    world.assert_nothing_left()


def nobody_locks(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_the_next_start_removes_what_a_power_loss_left(world: World) -> None:
    service = world.start(*ALL).wait_ready().wait_journal("rank 1 ready")
    (left,) = world.directories()
    for pid in world.processes():
        os.kill(pid, signal.SIGSTOP)  # so that none has the time to clean up
    for pid in world.processes():
        os.kill(pid, signal.SIGKILL)
    service.end()
    until(lambda: not world.processes(), "all are dead")
    # A dying process loses its memory, by which it was found, before it loses its locks.
    until(lambda: nobody_locks(left / LOCK_NAME), "all locks are gone")
    assert world.directories() == [left]
    again = world.start(*ALL).wait_ready()
    assert len(world.directories()) == 1 and not left.exists()
    again.process.terminate()
    assert again.end() == 0
    world.assert_nothing_left()


def test_a_service_leaves_the_directory_of_another_one_alone(world: World) -> None:
    first = world.start(*ALL).wait_ready()
    (kept,) = world.directories()
    second = world.start(*ALL).wait_ready()
    second.process.terminate()
    assert second.end() == 0
    assert world.directories() == [kept]
    first.process.terminate()
    assert first.end() == 0
    world.assert_nothing_left()


def test_services_that_start_and_end_at_the_same_time_do_not_disturb_each_other(
    world: World,
) -> None:
    services = [world.start(stub("gateway"), stub("rank 0")) for _ in range(4)]
    for service in services:
        service.wait_ready().process.terminate()
    assert [service.end() for service in services] == [0] * 4
    world.assert_nothing_left()


def test_ranks_of_a_pod_end_with_the_code_of_the_first_that_fails(world: World) -> None:
    pod = {"waited": False, "stage": 0}
    service = world.start(
        stub("rank 0", **pod), stub("rank 1", "exits-7", **pod), end_with_first=False
    )
    assert service.end() == 7
    world.assert_nothing_left()


def test_a_rank_of_a_pod_that_has_done_its_work_does_not_end_the_others(world: World) -> None:
    pod = {"waited": False, "stage": 0}
    service = world.start(
        stub("rank 0", **pod), stub("rank 1", "exits-0", **pod), end_with_first=False
    ).wait_journal("rank 1 ready", "rank 0 ready")
    gone = service.pid("rank 1")
    until(lambda: gone not in world.processes(), "rank 1 has ended")
    service.process.terminate()
    assert service.end() == 0
    assert "rank 0 stopped" in service.notes()
    world.assert_nothing_left()


def test_a_rank_that_fails_while_it_drains_gives_the_pod_its_code(world: World) -> None:
    pod = {"waited": False, "stage": 0}
    service = world.start(
        stub("rank 0", **pod), stub("rank 1", "stops-with-3", **pod), end_with_first=False
    ).wait_journal("rank 1 ready", "rank 0 ready")
    service.process.terminate()
    assert service.end() == 3
    world.assert_nothing_left()


# --- the port and the directory


def test_the_port_is_taken_at_the_start_and_refuses_connections_until_it_listens() -> None:
    with bind_http("127.0.0.1", 0) as http:
        port = http.getsockname()[1]
        assert service_url("127.0.0.1", http) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        http.listen()
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_two_services_that_start_together_cannot_both_have_a_port() -> None:
    with bind_http("127.0.0.1", 0) as http, pytest.raises(StartError, match="choose another"):
        bind_http("127.0.0.1", http.getsockname()[1])


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 300, "203.0.113.1"])
def test_a_host_that_is_not_ours_is_an_error_of_one_line(host: str) -> None:
    with pytest.raises(StartError, match=r"--host|cannot listen"):
        bind_http(host, 0)


def test_an_ipv6_url_has_brackets() -> None:
    with bind_http("127.0.0.1", 0) as http:
        assert service_url("::1", http).startswith("http://[::1]:")


def test_a_base_directory_that_others_may_enter_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(world.tmp))
    (world.tmp / f"minisgl-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(StartError, match="TMPDIR"):
        RunDirectory.create()


def test_a_base_directory_that_is_a_link_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(world.tmp))
    (world.tmp / "elsewhere").mkdir(mode=0o700)
    (world.tmp / f"minisgl-{os.getuid()}").symlink_to(world.tmp / "elsewhere")
    with pytest.raises(StartError, match="TMPDIR"):
        RunDirectory.create()


def test_a_directory_that_no_launcher_made_is_never_removed(world: World) -> None:
    own = world.tmp / "own"
    own.mkdir()
    assert RunDirectory.join(own) is None
    assert own.exists()


def test_the_last_of_two_shares_removes_the_directory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(world.tmp))
    first = RunDirectory.create()
    second = RunDirectory.join(first.path)
    assert second is not None
    first.release()
    first.release()
    assert second.path.exists()
    second.release()
    assert list(world.tmp.iterdir()) == []
