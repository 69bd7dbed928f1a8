"""Tests on a GPU: each is skipped, with the reason, where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need a GPU."""
    reason = "needs an NVIDIA GPU that torch can use"
    missing = not torch.cuda.is_available()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def configs() -> Path:
    """A folder with the config.json of real models, for dummy weights."""
    return HERE / "configs"


@pytest.fixture(scope="module", autouse=True)
def _give_memory_back() -> Iterator[None]:
    """The next file starts with an empty device."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
