"""E03: pinned memory is written again only when the copies out of it have ended."""

import torch

from minisgl.attention.staging import PinnedRing


class FakeEvent:
    """Notes when it is recorded and waited for, in a log that all events share."""

    def __init__(self, log: list[tuple[str, int]], name: int) -> None:
        self._log, self._name = log, name

    def record(self) -> None:
        self._log.append(("record", self._name))

    def synchronize(self) -> None:
        self._log.append(("wait", self._name))


def ring(log: list[tuple[str, int]], depth: int) -> PinnedRing:
    names = iter(range(depth))
    return PinnedRing(
        8, depth, allocate=lambda n: torch.empty(n, dtype=torch.uint8),
        event=lambda: FakeEvent(log, next(names)),
    )  # fmt: skip


def test_a_buffer_is_waited_for_only_when_its_own_copy_may_still_read_it() -> None:
    log: list[tuple[str, int]] = []
    buffers = ring(log, 2)
    taken = []
    for _ in range(4):
        taken.append(buffers.take().data_ptr())
        buffers.sent()
    assert taken[0] == taken[2] != taken[1] == taken[3]
    assert log == [
        ("record", 0), ("record", 1), ("wait", 0), ("record", 0), ("wait", 1), ("record", 1),
    ]  # fmt: skip


def test_a_buffer_that_was_never_sent_is_not_waited_for() -> None:
    log: list[tuple[str, int]] = []
    buffers = ring(log, 2)
    for _ in range(6):
        buffers.take()
    assert not log
