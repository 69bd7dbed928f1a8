"""`python -m tests.cluster up` and `down`: the test cluster for a person at a shell.

`up` prints three lines that a shell can export: KUBECONFIG, PATH (with kubectl and helm) and
INGRESS. It builds the programs and images that are missing, which takes long the first time.
`images` builds the images alone and starts nothing: a start after it has them at once.
"""

import argparse
import os
import shutil
import subprocess
import sys

from tests.cluster.cluster import ROOT, TARGETS, Cluster, folder, remove
from tests.cluster.images import BuildError
from tests.cluster.programs import BUILD, Unavailable, tools_dir


def say(what: str) -> None:
    """A line of progress; standard output is for what a shell exports."""
    print(f"cluster: {what}", file=sys.stderr, flush=True)


def up(nodes: int, quick_loss: bool) -> None:
    """Start the cluster and leave it running."""
    say("building the programs that are missing (25 minutes the first time)")
    if shutil.which("go") and not os.environ.get("CLUSTER_TOOLS"):
        subprocess.run(["bash", str(BUILD), str(tools_dir())], check=True, stdout=sys.stderr)
    get_model = [sys.executable, str(ROOT / "scripts" / "get_model.py")]
    subprocess.run(get_model, check=True, stdout=sys.stderr)
    cluster = Cluster(nodes=nodes, quick_loss=quick_loss, detached=True)
    try:
        say(f"building the images {', '.join(TARGETS)}, those that have changed")
        cluster.load(*TARGETS)
        say("starting")
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    print(f"KUBECONFIG={cluster.api.kubeconfig}")
    print(f"PATH={tools_dir()}:{os.environ['PATH']}")
    print(f"INGRESS={cluster.ingress}")


def images() -> None:
    """Build all images that have changed."""
    cluster = Cluster()
    try:
        cluster.prepare(*TARGETS)
    finally:
        cluster.stop()


def main() -> int:
    """Exit code 1, with the reason in one line, if this machine cannot do it."""
    parser = argparse.ArgumentParser(prog="tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start it and leave it running")
    start.add_argument("--nodes", type=int, choices=(1, 2), default=2, help="default: 2")
    start.add_argument(
        "--quick-loss", action="store_true", help="find the loss of a node in 6 s instead of 50"
    )
    commands.add_parser("images", help="build what its nodes get, and start nothing")
    commands.add_parser("down", help="end it and remove all that it left")
    arguments = parser.parse_args()
    try:
        if arguments.command == "up":
            up(arguments.nodes, arguments.quick_loss)
        elif arguments.command == "images":
            images()
        else:
            remove()
            say(f"nothing is left, {folder()} is gone")
    except (Unavailable, BuildError, AssertionError, subprocess.CalledProcessError) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
