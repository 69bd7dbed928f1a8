"""All ranks see the same entries in the same step."""

import threading
from pathlib import Path

import pytest

from minisgl.distributed import SingleRank
from minisgl.scheduler.feed import Feed, FeedPlace, SingleFeed, make_feed


class _Threads(SingleRank):
    """Ranks that are threads of this test."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, box: list[int]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._box = barrier, box

    def barrier(self) -> None:
        self._barrier.wait(10)

    def broadcast_int(self, value: int) -> int:
        if self.rank == 0:
            self._box[0] = value
        self._barrier.wait(10)
        got = self._box[0]
        self._barrier.wait(10)
        return got


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_every_entry_of_every_step(size: int, tmp_path: Path) -> None:
    barrier, box = threading.Barrier(size), [0]
    steps = [[b"a"], [], [b"b", b"c" * 5_000_000, b""], [b"d"]]
    seen: dict[int, list[list[bytes] | None]] = {}

    def rank(number: int) -> None:
        feed: Feed = make_feed(
            _Threads(number, size, barrier, box), FeedPlace(f"ipc://{tmp_path}/feed"), 10
        )
        mine = [feed.exchange(step if number == 0 else None) for step in steps]
        mine.append(feed.exchange(None))
        seen[number] = mine
        barrier.wait(10)
        feed.close()

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {n: [*steps, None] for n in range(size)}


def test_a_group_of_one_needs_no_socket(tmp_path: Path) -> None:
    feed = make_feed(SingleRank(), FeedPlace(f"ipc://{tmp_path}/feed"), 1)
    assert isinstance(feed, SingleFeed)
    assert feed.exchange([b"x"]) == [b"x"] and feed.exchange(None) is None
    assert not list(tmp_path.iterdir())
