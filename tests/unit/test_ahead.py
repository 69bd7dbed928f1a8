"""Which weights are fetched beside a step, and when the step waits for them."""

import contextlib
from typing import Any

import pytest
import torch

from minisgl.config import UsageError
from minisgl.layers import ahead
from minisgl.layers.ahead import AHEAD_ENV, Ahead

WEIGHT = torch.ones(4, 8)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is queued, of a device that captures."""
    seen: list[Any] = []

    class Event:
        def record(self, stream: object = None) -> None:
            seen.append("record beside" if stream is not None else "record")

    class Stream:
        def wait_event(self, event: Event) -> None:
            seen.append("wait beside" if self is not current else "wait")

    current = Stream()
    for name, stand_in in {
        "Stream": Stream, "Event": Event, "current_stream": lambda: current,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: True,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    fetch = lambda weight, most: seen.append(most)  # noqa: E731
    monkeypatch.setattr(ahead, "prefetch_function", lambda: fetch)
    monkeypatch.setenv(AHEAD_ENV, "2")
    return seen


def test_a_step_goes_on_while_weights_are_fetched_and_waits_at_its_end(log: list[Any]) -> None:
    beside = Ahead(torch.device("cuda"))
    with beside.step(torch.ones(64, 8)):
        log.clear()  # the kernel was called once, to be compiled
        beside.fetch(WEIGHT)
        beside.fetch(WEIGHT, 2)
        log.append("product")
    assert log == [
        "record", "wait beside", 2 << 20, "record", "wait beside", 4 << 20, "product",
        "record beside", "wait",
    ]  # fmt: skip


def test_nothing_is_fetched_between_steps_nor_for_many_tokens(log: list[Any]) -> None:
    beside = Ahead(torch.device("cuda"))
    beside.fetch(WEIGHT)
    with beside.step(torch.ones(65, 8)):
        beside.fetch(WEIGHT)
    assert not log


def test_nothing_is_fetched_outside_of_a_capture(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    beside = Ahead(torch.device("cuda"))
    with beside.step(torch.ones(1, 8)):
        beside.fetch(WEIGHT)
    assert log == [0]


def test_a_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AHEAD_ENV, "much")
    with pytest.raises(UsageError, match="MINISGL_PREFETCH_MIB must be a whole number"):
        Ahead(torch.device("cpu"))
