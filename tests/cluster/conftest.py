"""The cluster that tests share: two nodes, started once.

It is always the tests' own, as they cut its nodes' power; a cluster of KUBECONFIG is never touched,
and one of MINISGL_TEST_KUBECONFIG only by `test_existing.py`.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import TARGETS, Cluster, folder
from tests.cluster.images import ROOT
from tests.cluster.product import Product
from tests.cluster.programs import Unavailable

LONG = "MINISGL_TEST_LONG"


class Clusters:
    """The one cluster of the tests' own: what a test asks for is started if it does not run."""

    def __init__(self) -> None:
        self._running: Cluster | None = None
        self._quick_loss = False

    def get(self, *, quick_loss: bool = False, targets: tuple[str, ...] = ()) -> Cluster:
        """A cluster of that kind with all its nodes, which have the images of these targets of
        the Dockerfile when it is started for them; raises `Unavailable`."""
        if self._running is not None and self._quick_loss == quick_loss:
            for node in self._running.nodes:
                node.restore()
            self._running.wait_until_ready()
            return self._running
        self.stop()
        cluster = Cluster(2, quick_loss, models=models())
        try:
            cluster.load(*targets)
            cluster.start()
        except BaseException:
            cluster.stop()
            raise
        self._running, self._quick_loss = cluster, quick_loss
        return cluster

    def stop(self) -> None:
        """End the one that runs."""
        if self._running is not None:
            self._running.stop()
            self._running = None


def models() -> Path:
    """The folder of models that nodes of the tests' own cluster show: that of this machine, and
    `tiny`, a random one that loads at once."""
    shown = folder().parent / "cluster-models"
    shutil.rmtree(shown, ignore_errors=True)
    shown.mkdir(parents=True)
    for model in (ROOT / ".models").glob("*/"):
        # A symbolic link would lead out of what a pod sees.
        shutil.copytree(model, shown / model.name, copy_function=_link)
    from tests.tiny import build_tiny

    tiny = build_tiny(shown / "tiny", max_position_embeddings=4096)
    # Pods have a user of their own, and transformers keeps weights for the one who writes them.
    (tiny / "model.safetensors").chmod(0o644)
    return shown


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    """For tests that say which cluster they need, or none."""
    found = Clusters()
    yield found
    found.stop()


@pytest.fixture
def cluster(clusters: Clusters) -> Cluster:
    """The tests' own cluster: two nodes, with Kubernetes' own time-outs."""
    try:
        return clusters.get(targets=TARGETS)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def product(clusters: Clusters) -> Product:
    """The chart on a cluster of two nodes with Kubernetes' own time-outs."""
    try:
        return Product(clusters.get(targets=TARGETS))
    except Unavailable as reason:
        pytest.skip(str(reason))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The whole list of faults takes half an hour on two cores."""
    if os.environ.get(LONG):
        return
    skip = pytest.mark.skip(reason=f"takes minutes: `make cluster-test`, which sets {LONG}")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)
