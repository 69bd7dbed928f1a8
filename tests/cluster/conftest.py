"""The cluster that tests share: two nodes, started once, or one that exists already.

An existing cluster is taken when both KUBECONFIG and MINISGL_TEST_IMAGE (the image of all roles)
are set; KUBECONFIG alone is not enough, as it may well be a cluster that somebody needs.
MINISGL_TEST_INGRESS is then the URL of its ingress. What such a cluster lacks is skipped.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.cluster import HOST_NAME, TARGETS, Cluster, folder
from tests.cluster.images import ROOT
from tests.cluster.kubectl import Kubectl
from tests.cluster.product import Product
from tests.cluster.programs import Unavailable

IMAGE = "MINISGL_TEST_IMAGE"
LONG = "MINISGL_TEST_LONG"


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster that tests may use."""

    kubectl: Kubectl
    ingress: str
    image: str | None
    """Of all roles, if the cluster exists already; else `own.load` builds what is asked for."""
    own: Cluster | None
    """The tests' own cluster, whose nodes can be lost; None for an existing one."""


class Clusters:
    """The one cluster of the tests' own: what a test asks for is started if it does not run."""

    def __init__(self) -> None:
        self._running: Cluster | None = None
        self._shape = (0, False)

    def get(
        self, nodes: int = 2, quick_loss: bool = True, targets: tuple[str, ...] = ()
    ) -> Cluster:
        """A cluster of that shape with all its nodes, which have the images of these targets of
        the Dockerfile when it is started for them; raises `Unavailable`."""
        if self._running is not None and self._shape == (nodes, quick_loss):
            for node in self._running.nodes:
                node.restore()
            self._running.wait_until_ready()
            return self._running
        self.stop()
        cluster = Cluster(nodes, quick_loss, models=models())
        try:
            cluster.load(*targets)
            cluster.start()
        except BaseException:
            cluster.stop()
            raise
        self._running, self._shape = cluster, (nodes, quick_loss)
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
    """The tests' own cluster: two nodes whose loss is found in seconds."""
    if _existing() is not None:
        pytest.skip(f"needs a cluster of its own: unset {IMAGE}")
    try:
        return clusters.get()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def product(clusters: Clusters) -> Product:
    """The chart on a cluster of two nodes with Kubernetes' own time-outs."""
    if _existing() is not None:
        pytest.skip(f"needs a cluster of its own: unset {IMAGE}")
    try:
        return Product(clusters.get(quick_loss=False, targets=TARGETS))
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    """An existing cluster if one is named, else the tests' own."""
    existing = _existing()
    if existing is not None:
        return existing
    own: Cluster = request.getfixturevalue("cluster")
    return Target(own.kubectl, own.ingress, None, own)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The whole list of faults takes half an hour on two cores."""
    if os.environ.get(LONG):
        return
    skip = pytest.mark.skip(reason=f"takes minutes: `make cluster-test`, which sets {LONG}")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)


def _existing() -> Target | None:
    image, kubeconfig = os.environ.get(IMAGE), os.environ.get("KUBECONFIG")
    if not image or not kubeconfig:
        return None
    ingress = os.environ.get("MINISGL_TEST_INGRESS", f"http://{HOST_NAME}")
    return Target(Kubectl(Path(kubeconfig)), ingress, image, None)
