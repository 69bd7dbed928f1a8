"""A gateway for each test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.gateway.scripted import Stage


@pytest.fixture
def make_stage() -> Iterator[Callable[..., Stage]]:
    """Start a gateway with these settings; it is stopped after the test."""
    stages: list[Stage] = []

    def make(*, wait: bool = True, **config: Any) -> Stage:
        stage = Stage(
            heartbeat_timeout_seconds=config.pop("heartbeat_timeout_seconds", 30.0),
            drain_seconds=config.pop("drain_seconds", 1.0),
            **config,
        )
        stages.append(stage)
        return stage.start(wait=wait)

    yield make
    for stage in stages:
        stage.close()


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    """A gateway with the defaults."""
    return make_stage()
