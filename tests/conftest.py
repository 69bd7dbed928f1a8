"""What all tests share: threads, which programs there are, the real model, one running server."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.apiserver import ApiServer
from tests.cluster.programs import Unavailable

# Before torch is imported anywhere: the tests share few cores with the servers that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent
MODEL_ENV = "MINISGL_TEST_MODEL"
DEFAULT_MODEL = ROOT / ".models" / "SmolLM2-135M-Instruct"
PROGRAMS = {"nginx": "nginx", "redis": "redis-server"}


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with what to install, the tests marked with a program that this machine lacks."""
    missing = {mark: name for mark, name in PROGRAMS.items() if shutil.which(name) is None}
    gpu = Path("/proc/driver/nvidia/version").exists()
    for item in items:
        tier = item.path.relative_to(ROOT / "tests").parts[0]
        if tier in ("cluster", "gpu") or item.get_closest_marker("soak"):
            item.add_marker("alone")
        for mark, name in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"needs {name}: apt-get install {name}"))
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of a small real model; for tests with the mark `model`."""
    given = os.environ.get(MODEL_ENV)
    folder = Path(given) if given else DEFAULT_MODEL
    if not (folder / "config.json").exists():
        if given:
            pytest.fail(f"{MODEL_ENV}={given} is no model folder: it has no config.json")
        pytest.skip("needs the real model: run scripts/get_model.py")
    return folder


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """Kubernetes' API and nothing that acts on it: tests play scheduler, kubelet, controllers."""
    yield from _api_server()


@pytest.fixture(scope="module")
def own_api_server() -> Iterator[ApiServer]:
    """One that no other file of tests uses: to be killed, or to hold an older chart."""
    yield from _api_server()


def _api_server() -> Iterator[ApiServer]:
    try:
        server = ApiServer()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with server:
        yield server


@pytest.fixture(scope="session")
def soak_seconds() -> float:
    """How long a soak lasts: `MINISGL_SOAK_SECONDS`, 30 seconds by default."""
    return float(os.environ.get("MINISGL_SOAK_SECONDS", "30"))


@pytest.fixture(autouse=True)
def _no_forgotten_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A developer's own settings must not decide what a test sees.
    for name in ("MINISGL_DISABLE_OVERLAP_SCHEDULING", "MINISGL_READY_FD", "MINISGL_PARENT_FD"):
        monkeypatch.delenv(name, raising=False)
    yield
