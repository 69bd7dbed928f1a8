"""A whole Kubernetes cluster on this machine: control plane, one node or two, DNS, ingress, images.

    with Cluster(nodes=2, quick_loss=True) as cluster:
        cluster.kubectl.get("nodes")
        cluster.nodes[1].power_cut()              # and .power_on(), .kill_agents(), .start_agents()
        httpx.get(cluster.ingress)                # http://llm.example.com, node 1's port 80
        cluster.load("engine-cpu", "operator")    # images of the Dockerfile's targets

The claim `models` of namespace `default` (`claim_models` for others) holds the models of this
machine: `pvc://models/SmolLM2-135M-Instruct`. Other claims find an empty volume of the default
class. `cluster.redis_image` and `cluster.base_image` (it has python3) are on each node. Pods reach
this machine at `network.HOST`, and nothing further away.

The control plane runs on this machine itself, so each node can be lost. With `quick_loss` a lost
node is NotReady after 6 seconds and its pods are deleted 5 seconds later; otherwise after
Kubernetes' own 50 and 300. It takes 20 to 40 seconds to start. There is one cluster a machine; it
lies in `~/.cache/minisgl/cluster` (XDG_CACHE_HOME), logs included. Needs root, the Debian packages
of `PACKAGES`, and `make cluster-tools`; raises `Unavailable` where one is missing. Works without
systemd and in a privileged container.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import TracebackType

import yaml

from tests.cluster import addons, cgroups, network
from tests.cluster.apiserver import ApiServer
from tests.cluster.images import ROOT, Image, Images
from tests.cluster.imagestore import ImageStore
from tests.cluster.kubectl import Kubectl
from tests.cluster.node import PAUSE_IMAGE, Node, Surroundings
from tests.cluster.programs import (
    Program,
    Unavailable,
    end_recorded,
    find,
    free_ports,
    recorded,
    tools_dir,
)

PROGRAMS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
    "kubectl", "helm", "coredns", "traefik", "bridge", "loopback", "host-local", "portmap",
)  # fmt: skip
PACKAGES = {
    "containerd": "containerd", "runc": "runc", "iptables": "iptables", "ip": "iproute2",
    "buildah": "buildah", "debootstrap": "debootstrap", "cc": "gcc libc6-dev",
    "openssl": "openssl", "unshare": "util-linux",
}  # fmt: skip
"""The programs of the system that are needed, and Debian's packages of them."""
HOST_NAME = "llm.example.com"
TARGETS = ("engine-cpu", "operator")
"""The images that an object on a CPU needs."""
BASE_IMAGE = "docker.io/library/python:3.11-slim-bookworm"
_HOSTS = Path("/etc/hosts")
_MARK = "# MiniSGLang test cluster"


def missing() -> list[str]:
    """What this machine lacks for a cluster, in words."""
    lacks = [] if os.geteuid() == 0 else ["to be root"]
    packages = [package for name, package in PACKAGES.items() if shutil.which(name) is None]
    lacks += [f"apt-get install {' '.join(packages)}"] if packages else []
    return lacks


def folder() -> Path:
    """Where the cluster of this machine lies."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "minisgl" / "cluster"


class Cluster:
    """Args:
    nodes: 1 or 2.
    quick_loss: whether the loss of a node is found in seconds; see above.
    models: the folder of models that the claim `models` shows.
    redis: the image of Redis that the nodes have; the chart's if None.
    detached: whether the cluster outlives this process.
    """

    def __init__(
        self,
        nodes: int = 1,
        quick_loss: bool = False,
        models: Path = ROOT / ".models",
        redis: str | None = None,
        detached: bool = False,
    ) -> None:
        lacks = missing()
        if lacks:
            raise Unavailable(f"a cluster needs {', '.join(lacks)}")
        tools = find(*PROGRAMS)
        self.folder, self._detached, self._quick = folder(), detached, quick_loss
        if self.folder.is_relative_to("/var") or self.folder.is_relative_to("/run"):
            raise Unavailable(f"{self.folder} is hidden in nodes: set XDG_CACHE_HOME elsewhere")
        self._record = self.folder / "processes"
        if recorded(self._record):
            raise Unavailable("a cluster runs already on this machine: run `make cluster-down`")
        remove()
        self.folder.mkdir(parents=True)
        self.images = Images()
        self._store = ImageStore(self.images.cache / "containerd")
        self.redis_image, self.base_image = redis or chart_redis_image(), BASE_IMAGE
        pause = self.folder / "pause"
        source = Path(__file__).with_name("pause.c")
        subprocess.run(["cc", "-O2", "-static", "-o", pause, source], check=True)
        self._pause = pause
        self._switch = network.Switch(pause, self.folder, detached, self._record)
        self._api: ApiServer | None = None
        self.nodes: list[Node] = []
        self._tools, self.models, self._count = tools, models, nodes
        self.ingress = f"http://{HOST_NAME}"

    @property
    def api(self) -> ApiServer:
        """The control plane; only while it runs."""
        if self._api is None:
            raise RuntimeError("the cluster has not been started")
        return self._api

    @property
    def kubectl(self) -> Kubectl:
        """Asks it as its administrator."""
        return self.api.kubectl

    def start(self) -> None:
        """Start it and wait until all nodes, DNS and the ingress are ready."""
        self.models.mkdir(exist_ok=True)
        self._store.add(self._own_images())
        self._switch.start(self._count)
        self._start_control_plane()
        around = Surroundings(
            folder=self.folder,
            tools=self._tools,
            pause=self._pause,
            switch=self._switch,
            pki=self.api.pki,
            server=self.api.url,
            images=self._store,
            models=self.models,
            nodes=self._count,
            quick_loss=self._quick,
            detached=self._detached,
            record=self._record,
        )
        for number in range(addons.VOLUME_COUNT):
            # Pods have users of their own; a hostPath gets no group of theirs.
            volume = self.folder / "volumes" / str(number)
            volume.mkdir(parents=True)
            volume.chmod(0o777)
        self.nodes = [Node(number, around) for number in range(1, self._count + 1)]
        for node in self.nodes:
            node.power_on()
        crds = sorted((tools_dir() / "gateway-api").glob("*.yaml"))
        self.kubectl.apply(*crds)
        self.kubectl.apply(
            *addons.volumes(), *addons.model_claim("default"), *addons.dns(),
            *addons.ingress(self._count),
        )  # fmt: skip
        self._add_host_entry()
        self.wait_until_ready()

    def wait_until_ready(self, seconds: float = 120) -> None:
        """Until all nodes are Ready, and DNS and ingress run on each."""
        for node in self.nodes:
            try:
                self.kubectl.wait_for(
                    f"node {node.name} is Ready", lambda node=node: self._is_up(node), seconds
                )
            except AssertionError as error:
                raise AssertionError(f"{error}\n{node.tails()}") from None
        for namespace, name in (("kube-system", "coredns"), ("traefik", "traefik")):
            self.kubectl.wait_for(
                f"{name} runs on each node",
                lambda namespace=namespace, name=name: self._daemons_ready(namespace, name),
                seconds,
                "pods -A",
            )

    def _is_up(self, node: Node) -> bool:
        node.start_agents()  # a service manager starts a kubelet that has ended again, too
        if not self.is_ready(node.name):
            return False
        # That may be from before a short loss of power: the control plane believes it for a while.
        lease = self.kubectl.get("lease", node.name, "--namespace=kube-node-lease")
        return datetime.fromisoformat(lease["spec"]["renewTime"]) > node.since

    def is_ready(self, node: str) -> bool:
        """Whether Kubernetes takes a node for Ready."""
        conditions = self.kubectl.get("node", node)["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def ingress_of(self, number: int) -> str:
        """The ingress of one node (1, 2); the name of the host goes into the request."""
        return f"http://{network.address(number)}"

    def load(self, *targets: str) -> list[str]:
        """Build the image of each target of the Dockerfile, give it to the nodes; their names.

        Before `start` this is much faster.
        """
        images = [self.images.of_project(target, image_name(target)) for target in targets]
        if self.nodes:
            self._load(images)
        else:
            self._store.add(images)
        return [image.name for image in images]

    def prepare(self, *targets: str) -> None:
        """Build all images that nodes get, so that the next start finds them."""
        self.load(*targets)
        self._store.add(self._own_images())

    def claim_models(self, namespace: str) -> None:
        """Give another namespace its claim `models`."""
        self.kubectl.apply(*addons.model_claim(namespace))

    def stop(self) -> None:
        """End it and remove all that it left."""
        for node in self.nodes:
            node.stop()
        if self._api is not None:
            # Its folder goes with it: a graceful end would take 10 seconds.
            self._api.stop(signal.SIGKILL)
        self._switch.stop()
        remove()

    def __enter__(self) -> "Cluster":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _own_images(self) -> list[Image]:
        """The images without which a cluster is none, and what test pods are made of."""
        text = 'FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n'
        images = [self.images.from_files(PAUSE_IMAGE, text, {"pause": self._pause})]
        for name, (dockerfile, files) in addons.image_files(tools_dir()).items():
            images.append(self.images.from_files(name, dockerfile, files))
        return [*images, self.images.base(self.redis_image), self.images.base(self.base_image)]

    def _start_control_plane(self) -> None:
        quick = ["--node-monitor-period=1s", "--node-monitor-grace-period=6s"]
        tolerations = ("not-ready", "unreachable")
        self._api = ApiServer(
            self.folder,
            address=network.HOST,
            controllers=["*"],
            flags=[f"--default-{one}-toleration-seconds=5" for one in tolerations if self._quick],
            controller_flags=quick if self._quick else [],
            detached=self._detached,
            record=self._record,
        )
        self._api.start()
        pki = self._api.pki
        pki.issue("kube-scheduler", "system:kube-scheduler")
        config = pki.kubeconfig("kube-scheduler", self._api.url)
        Program(
            [
                self._tools["kube-scheduler"], f"--kubeconfig={config}", "--leader-elect=false",
                "--bind-address=127.0.0.1", f"--secure-port={free_ports(1)[0]}",
            ],
            self.folder / "kube-scheduler.log", self._detached, self._record,
        ).start()  # fmt: skip

    def _load(self, images: Sequence[Image]) -> None:
        """Load images into all nodes, the nodes at the same time."""

        def fill(node: Node) -> None:
            for image in images:
                node.load(image)

        with ThreadPoolExecutor(len(self.nodes)) as threads:
            list(threads.map(fill, self.nodes))

    def _daemons_ready(self, namespace: str, name: str) -> bool:
        status = self.kubectl.get("daemonset", name, "--namespace", namespace)["status"]
        return status.get("numberReady") == len(self.nodes) == status["updatedNumberScheduled"]

    def _add_host_entry(self) -> None:
        text = _HOSTS.read_text()
        _HOSTS.write_text(f"{text.rstrip()}\n{network.address(1)} {HOST_NAME} {_MARK}\n")


def image_name(target: str) -> str:
    """How users call the image of a target of the Dockerfile, with this version."""
    source = (ROOT / "services/minisgl/__init__.py").read_text()
    version = re.search(r'__version__ = "([^"]+)"', source)
    if version is None:
        raise Unavailable("services/minisgl/__init__.py states no __version__")
    return f"ghcr.io/minisglang/minisglang-{target}:{version[1]}"


def chart_redis_image() -> str:
    """The image of Redis that objects get by default."""
    values = yaml.safe_load((ROOT / "helm/minisglang/values.yaml").read_text())
    return str(values["defaults"]["redisImage"])


def remove() -> None:
    """End whatever runs of this machine's cluster, and remove what it left; needs no object."""
    end_recorded(folder() / "processes")
    network.remove_link()
    for number in (1, 2):
        cgroups.remove(f"msgl-n{number}")
    lines = _HOSTS.read_text().splitlines(keepends=True)
    kept = [line for line in lines if _MARK not in line]
    if kept != lines:
        # In place: in a container the file is a mount, which cannot be replaced.
        _HOSTS.write_text("".join(kept))
    shutil.rmtree(folder(), ignore_errors=True)
