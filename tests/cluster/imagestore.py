"""One containerd store with all images, of which each node gets a copy made of hard links.

Importing and unpacking an image costs seconds for each 100 MB, and a cluster starts often. What is
in a store never changes in place: blobs are named by their content, and a pod writes into a layer
of its own. Only the two databases must be copied. So a node has its images after a second or two.
"""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.cluster.images import BuildError, Image, snapshotter
from tests.cluster.programs import Program
from tests.support import wait_until


class ImageStore:
    """A folder that containerd fills while no node looks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root = folder / "root"
        self._markers = folder / "loaded"
        self._markers.mkdir(parents=True, exist_ok=True)

    def add(self, images: Iterable[Image]) -> None:
        """Load those that are not there yet with this content; raises `BuildError`."""
        new = [image for image in images if not (self._markers / image.archive.name).exists()]
        if not new:
            return
        state, layers = self._folder / "state", snapshotter(self._folder)
        config = self._folder / "config.toml"
        config.write_text(containerd_config(self._root, state, state / "socket"))
        log = self._folder / "log"
        log.unlink(missing_ok=True)
        alone = ["unshare", "--mount", "--propagation", "private"]
        server = Program([*alone, "containerd", f"--config={config}"], log)
        server.start()
        try:
            ctr = ["ctr", f"--address={state / 'socket'}", "--namespace=k8s.io"]
            wait_until(lambda: not _try([*ctr, "version"]), 30, server.tail)
            for image in new:
                error = _try(
                    [*ctr, "images", "import", f"--snapshotter={layers}", str(image.archive)]
                )
                if error:
                    raise BuildError(f"containerd does not take {image.archive}: {error}")
                for old in self._markers.glob(image.archive.name.rpartition("-")[0] + "-*"):
                    old.unlink()
                (self._markers / image.archive.name).touch()
        finally:
            server.stop()
            shutil.rmtree(state, ignore_errors=True)

    def copy_to(self, target: Path) -> None:
        """Give a node its own copy, at a place on the same file system."""
        subprocess.run(["cp", "--archive", "--link", str(self._root), str(target)], check=True)
        for database in target.rglob("*.db"):
            content = database.read_bytes()
            database.unlink()
            database.write_bytes(content)


def containerd_config(root: Path, state: Path, socket: Path, cri: str = "") -> str:
    """The configuration of containerd, as TOML.

    Args:
        root, state, socket: where it keeps things and listens.
        cri: the settings for a kubelet; there is no CRI if it is empty.
    """
    return f"""\
version = 2
root = "{root}"
state = "{state}"
oom_score = 0
disabled_plugins = [{"" if cri else '"io.containerd.grpc.v1.cri"'}]
[grpc]
address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"
{cri}"""


def _try(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    return (done.stderr[-2000:] or "failed") if done.returncode else ""
