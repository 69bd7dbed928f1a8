from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import build_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny family, built when it is first asked for."""
    base = tmp_path_factory.mktemp("tiny")

    def get(family: str) -> Path:
        folder = base / family
        return folder if folder.exists() else build_tiny(folder, family)

    return get
