"""Each exit code of a rank that docs/reliability.md lists, from the process of a real rank."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minisgl.bus.base import REPLACED_CODE
from minisgl.config import StartError, UsageError
from minisgl.scheduler.watchdog import FORMING_CODE, PEER_LOST_CODE, STUCK_CODE
from tests.redis_server import PAGE, RedisServer
from tests.support import wait_until
from tests.tiny import build_tiny

pytestmark = [pytest.mark.redis, pytest.mark.slow]

SHORT, LONG = 6, 30
"""Heartbeat time-outs in seconds; no rank of a busy machine stands still for the long one."""
LIMIT = 60.0


class Rank:
    """A rank with a fake engine; ranks of two or more meet through Gloo like any others."""

    def __init__(
        self, server: RedisServer, model: Path, log: Path, rank: int, size: int, silence: int
    ) -> None:
        self._log = log
        flags = [
            f"--bus={server.url}", "--service=test", f"--model={model}", "--device=cpu",
            f"--tp-rank={rank}", f"--tensor-parallel-size={size}", "--fake-engine",
            f"--heartbeat-timeout-seconds={silence}",
        ]  # fmt: skip
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minisgl", "engine", *flags], stdout=file, stderr=file
            )

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    @property
    def code(self) -> int:
        """Its exit code, once it has ended by itself."""
        wait_until(lambda: self.process.poll() is not None, LIMIT, lambda: self.said)
        return self.process.wait()


Start = Callable[..., Rank]
Group = Callable[..., list[Rank]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def start(server: RedisServer, tiny: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts ranks, which have all ended after the test."""
    started: list[Rank] = []

    def one(rank: int = 0, size: int = 1, model: Path = tiny, silence: int = LONG) -> Rank:
        log = tmp_path / f"{len(started)}.log"
        started.append(Rank(server, model, log, rank, size, silence))
        return started[-1]

    server.client().flushall()
    yield one
    for rank in started:
        rank.process.kill()
        rank.process.wait()


@pytest.fixture
def group(start: Start, server: RedisServer) -> Group:
    """Starts all ranks of a group, and waits until it has formed."""

    def ranks(size: int, silence: int = LONG) -> list[Rank]:
        members = [start(rank, size, silence=silence) for rank in range(size)]
        await_phase(server, b"formed", members[0])
        return members

    return ranks


def await_phase(server: RedisServer, phase: bytes, rank: Rank, *joined: int) -> None:
    """Until the group has come so far, and these ranks have joined."""
    with server.client() as client:

        def there() -> bool:
            held = client.hgetall("minisgl:{test}:rdzv:g0")
            boots = all(f"boot.{number}".encode() in held for number in joined)
            return held.get(b"phase") == phase and boots  # type: ignore[no-any-return]

        wait_until(there, LIMIT, lambda: rank.said)


def test_the_page_lists_the_codes_that_ranks_have() -> None:
    table = PAGE.read_text().partition("## Exit codes of a rank")[2].partition("\n## ")[0]
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.M)
              for code in row.split(",")}  # fmt: skip
    failed = {StartError.exit_code, UsageError.exit_code}
    assert listed == {0, PEER_LOST_CODE, STUCK_CODE, REPLACED_CODE, FORMING_CODE} | failed


@pytest.mark.parametrize("asked", [0, 1])
def test_0_when_any_rank_was_asked_to_drain(group: Group, asked: int) -> None:
    ranks = group(2)
    ranks[asked].signal(signal.SIGTERM)
    assert [rank.code for rank in ranks] == [0, 0]


def test_0_when_it_was_asked_to_end_before_its_group_was_formed(
    start: Start, server: RedisServer
) -> None:
    ranks = [start(rank, 3) for rank in range(2)]
    await_phase(server, b"forming", ranks[0], 1)
    for rank in ranks:
        rank.signal(signal.SIGTERM)
    assert [rank.code for rank in ranks] == [0, 0]


def test_1_when_the_files_of_the_model_are_broken(start: Start, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert start(model=tmp_path / "broken").code == StartError.exit_code == 1


def test_2_when_the_arguments_are_wrong(start: Start, tmp_path: Path) -> None:
    ranks = [start(model=tmp_path / "missing"), start(2, 2)]
    assert [rank.code for rank in ranks] == [2, 2]


@pytest.mark.parametrize("killed", [0, 1])
def test_3_when_a_peer_is_gone(group: Group, killed: int) -> None:
    ranks = group(2)
    ranks[killed].signal(signal.SIGKILL)
    assert ranks[1 - killed].code == PEER_LOST_CODE == 3


def test_4_when_its_own_loop_stood_still_for_t(group: Group) -> None:
    first, second = group(2, silence=SHORT)
    second.signal(signal.SIGSTOP)
    assert first.code == STUCK_CODE == 4  # it waited for the other one
    second.signal(signal.SIGCONT)
    assert second.code in (STUCK_CODE, PEER_LOST_CODE)  # it may notice either


def test_5_when_another_process_takes_its_place(group: Group, start: Start) -> None:
    (first,) = group(1)
    start()
    assert first.code == REPLACED_CODE == 5


def test_6_when_a_rank_that_had_joined_is_started_anew(start: Start, server: RedisServer) -> None:
    first, second = start(0, 3), start(1, 3)
    await_phase(server, b"forming", first, 1)
    second.signal(signal.SIGKILL)
    start(1, 3)
    assert first.code == FORMING_CODE == 6
    assert "rank 1 was started anew" in first.said
