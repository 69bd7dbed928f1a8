"""A peer that is gone is noticed, one that leaves in order is not."""

import threading
from pathlib import Path

import pytest

from minisgl.distributed import lifeline
from minisgl.distributed.base import Communicator, PeerError
from minisgl.distributed.lifeline import Lifeline
from tests.unit.distributed.test_gloo import in_threads

WAIT = 30.0


class Heard:
    """What a lifeline said, and when it was over."""

    def __init__(self) -> None:
        self.why: list[str] = []
        self.said = threading.Event()

    def __call__(self, why: str) -> None:
        self.why.append(why)
        self.said.set()


class Peers(Communicator):
    """A group whose other rank does as the test says."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.left, self.dead = False, False
        self.beats = threading.Semaphore(0)

    def gather_ints(self, values: object) -> list[list[int]]:
        self.beats.release()
        if self.dead:
            raise PeerError("rank 0 lost a peer: Connection closed by peer")
        return [[0], [int(self.left)]]

    def all_reduce(self, tensor: object) -> None: ...
    def all_gather(self, tensor: object) -> object: ...
    def barrier(self) -> None: ...
    def broadcast_int(self, value: int) -> int:
        return value

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "BEAT_SECONDS", 0.001)


def test_a_dead_peer_is_reported_once() -> None:
    peers, heard = Peers(), Heard()
    Lifeline(peers, heard).start()
    peers.beats.acquire(timeout=WAIT)
    peers.dead = True
    assert heard.said.wait(WAIT)
    assert heard.why == ["rank 0 lost a peer: Connection closed by peer"]


def test_another_failure_is_reported_too() -> None:
    heard, failures = Heard(), iter([None, None, "remote error"])
    Lifeline(Peers(), heard, lambda: next(failures)).start()
    assert heard.said.wait(WAIT)
    assert heard.why == ["remote error"]


def test_who_leaves_with_its_peers_is_told_of_no_loss(tmp_path: Path) -> None:
    def use(comm: Communicator) -> list[str]:
        heard = Heard()
        line = Lifeline(comm, heard)
        line.start()
        line.stop()
        line._thread.join(WAIT)
        assert not line._thread.is_alive()
        return heard.why

    assert in_threads(tmp_path / "meet", 3, use) == [[], [], []]


def test_a_peer_that_leaves_alone_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "LEAVE_SECONDS", 0.001)
    peers, heard = Peers(), Heard()
    peers.left = True
    Lifeline(peers, heard).start()
    assert heard.said.wait(WAIT)
    assert heard.why == ["rank 1 has left the group"]


def test_a_peer_that_dies_while_this_rank_leaves_is_no_loss() -> None:
    peers, heard = Peers(), Heard()
    line = Lifeline(peers, heard)
    line.start()
    peers.beats.acquire(timeout=WAIT)
    line.stop()
    peers.dead = True
    line._thread.join(WAIT)
    assert heard.why == []
