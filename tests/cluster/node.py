"""A node: containerd, kubelet and kube-proxy in namespaces of their own, which can lose power.

The namespaces are net, mount, pid, uts and ipc. Their process 1 is `pause`; with it all of the node
ends. /run is the node's own memory and /var its own disk (a folder that outlives a loss of power);
the rest of the file system is this machine's. Nothing is mounted outside, and no sysctl changes:
the kubelet finds files with the values that it wants.
"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster import cgroups
from tests.cluster.images import Image, snapshotter
from tests.cluster.imagestore import ImageStore, containerd_config
from tests.cluster.network import Switch, address, pod_cidr
from tests.cluster.pki import Authority
from tests.cluster.programs import Program, await_program, child
from tests.support import wait_until

PAUSE_IMAGE = "localhost/pause:1"
MODELS, VOLUMES = "/run/models", "/run/volumes"
"""Where a node sees the folder of models, read-only, and the disks that all nodes share."""
_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
_SERVICE_DNS = "10.96.0.10"
_PODS = "10.244.0.0/16"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all nodes of a cluster have in common."""

    folder: Path
    tools: dict[str, str]
    pause: Path
    switch: Switch
    pki: Authority
    server: str
    images: ImageStore
    models: Path
    nodes: int
    quick_loss: bool
    """Report to the control plane each second, as a cluster with short time-outs asks."""
    detached: bool
    record: Path


class Node:
    """Node `number` (from 1) of a cluster; it is called n1, n2, ..."""

    def __init__(self, number: int, around: Surroundings) -> None:
        self.number, self._around = number, around
        self.name = f"n{number}"
        self.address = address(number)
        self.folder = around.folder / self.name
        self.cgroup = f"msgl-{self.name}"
        self._power: Program | None = None
        self.since = datetime.now(UTC)
        """When it got its power."""
        self._agents: list[Program] = []
        self._configure()
        around.images.copy_to(self.folder / "var/lib/containerd")

    @property
    def pid(self) -> int:
        """The node's process 1, as this machine counts."""
        if self._power is None:
            raise RuntimeError(f"node {self.name} has no power")
        return child(self._power.pid)

    def power_on(self) -> None:
        """Start the node, again too; it needs some seconds until it is Ready."""
        around = self._around
        # After a loss of power: the kubelet takes 3 s for each group that a dead pod left behind.
        cgroups.remove(self.cgroup)
        cgroups.make(self.cgroup)
        self._power = self._program(
            "power",
            [
                "unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "private",
                "--pid", "--fork", "--kill-child", "--mount-proc", str(around.pause),
            ],
        )  # fmt: skip
        self.since = datetime.now(UTC)
        self._power.start()
        power = self._power.pid
        wait_until(lambda: child(power) > 0, 10, lambda: "the node has no process 1")
        await_program(self.pid, "pause")
        around.switch.plug_in(self.number, self.pid, around.nodes)
        self.run("sh", "-euc", self._layout())
        self.start_agents()

    def power_cut(self) -> None:
        """Everything on the node ends at once and its cable is dead: nobody is told."""
        self._around.switch.cut(self.number)
        self.stop()

    def restore(self) -> None:
        """Undo a loss of power, of the cable or of the programs, if there was one."""
        if self._power is None or not self._power.runs():
            self.power_on()
        self._around.switch.mend(self.number)
        self.start_agents()

    def start_agents(self) -> None:
        """Start containerd, kubelet and kube-proxy, those that do not run."""
        if all(agent.runs() for agent in self._agents):
            return
        for agent in self._agents:
            if not agent.runs():
                agent.argv = self._inside(agent.argv[agent.argv.index("--") + 1 :])
                agent.start()
            if agent is self._agents[0]:
                # A kubelet that finds no containerd ends.
                wait_until(self._containerd_answers, 30, agent.tail)

    def kill_agents(self) -> None:
        """Kill kubelet and containerd; the pods run on."""
        for agent in self._agents[:2]:
            # What was started is nsenter, which waits for the program and then ends.
            os.kill(child(agent.pid), signal.SIGKILL)
            wait_until(lambda agent=agent: not agent.runs(), 10, agent.tail)

    def run(self, *argv: str) -> str:
        """What a program in the node prints; raises `RuntimeError`."""
        done = subprocess.run(self._inside(argv), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(argv)}: {done.stderr[-2000:]}")
        return done.stdout

    def load(self, image: Image) -> None:
        """Give the running node an image."""
        archive = str(image.archive)
        self.run("ctr", "--namespace=k8s.io", "images", "import", archive)

    def _containerd_answers(self) -> bool:
        """Whether images can be loaded."""
        return not subprocess.run(self._inside(["ctr", "version"]), capture_output=True).returncode

    def tails(self) -> str:
        """The ends of the node's logs."""
        return "\n".join(agent.tail() for agent in self._agents)

    def stop(self) -> None:
        """End the node and remove what it left in the kernel; its disk stays."""
        if self._power is not None:
            self._power.stop(9)
            for agent in self._agents:
                agent.stop(9)
        cgroups.remove(self.cgroup)

    def _program(self, name: str, argv: Sequence[str]) -> Program:
        around = self._around
        return Program(argv, self.folder / f"{name}.log", around.detached, around.record)

    def _inside(self, argv: Sequence[str]) -> list[str]:
        kinds = ["--net", "--uts", "--ipc", "--mount", "--pid"]
        return ["nsenter", f"--target={self.pid}", *kinds, "--", *argv]

    def _layout(self) -> str:
        """The commands that give the node its file system."""
        values = self.folder / "sysctls"
        lines = [
            "mount --make-rshared /",
            f"hostname {self.name}",
            "mount -t tmpfs tmpfs /run",
            f"mount --bind {self.folder}/var /var",
            f"mkdir -p {MODELS} {VOLUMES} /run/lock",
            f"mount --bind {self._around.models} {MODELS}",
            f"mount -o remount,bind,ro {MODELS}",
            f"mount --bind {self._around.folder}/volumes {VOLUMES}",
        ]
        for name in _SYSCTLS:
            file = values / name.replace("/", "_")
            lines.append(f"test ! -e /proc/sys/{name} || mount --bind {file} /proc/sys/{name}")
        return "\n".join(lines)

    def _configure(self) -> None:
        around, pki = self._around, self._around.pki
        for part in ("var/lib", "var/log", "var/tmp", "var/cache", "cni", "sysctls"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        for link, target in {"run": "/run", "lock": "/run/lock"}.items():
            if not (self.folder / "var" / link).is_symlink():
                (self.folder / "var" / link).symlink_to(target)
        (around.folder / "volumes").mkdir(exist_ok=True)
        for name, value in _SYSCTLS.items():
            (self.folder / "sysctls" / name.replace("/", "_")).write_text(f"{value}\n")
        here = [f"DNS:{self.name}", f"IP:{self.address}"]
        pki.issue(self.name, f"system:node:{self.name}", ["system:nodes"], addresses=here)
        proxy = pki.folder / "kube-proxy.kubeconfig"
        if not proxy.exists():
            pki.issue("kube-proxy", "system:kube-proxy")
            pki.kubeconfig("kube-proxy", around.server)
        self._write("kubelet.json", self._kubelet_config())
        self._write("kube-proxy.json", self._proxy_config(proxy))
        self._write("cni/10-bridge.conflist", self._cni_config())
        (self.folder / "containerd.toml").write_text(self._containerd_config())

        def agent(name: str, *argv: str) -> Program:
            # What stands before "--" is filled in when the node has power.
            return self._program(name, ["nsenter", "--", *argv])

        self._agents = [
            agent("containerd", "containerd", f"--config={self.folder}/containerd.toml"),
            agent(
                "kubelet", around.tools["kubelet"], f"--config={self.folder}/kubelet.json",
                f"--kubeconfig={pki.kubeconfig(self.name, around.server)}",
                f"--hostname-override={self.name}", f"--node-ip={self.address}",
            ),
            agent(
                "kube-proxy", around.tools["kube-proxy"], f"--config={self.folder}/kube-proxy.json"
            ),
        ]  # fmt: skip

    def _write(self, name: str, content: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(content, indent=1))

    def _kubelet_config(self) -> dict[str, Any]:
        pki = self._around.pki
        config: dict[str, Any] = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "x509": {"clientCAFile": str(pki.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki.folder / f"{self.name}.crt"),
            "tlsPrivateKeyFile": str(pki.folder / f"{self.name}.key"),
            "clusterDomain": "cluster.local",
            "clusterDNS": [_SERVICE_DNS],
            "resolvConf": "",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            # With two kubelets on one machine each would remove the other's pods.
            "cgroupRoot": f"/{self.cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            # The disk is shared with everything else: never clear it for a node.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
            "serializeImagePulls": False,
        }
        if self._around.quick_loss:
            config |= {"nodeStatusUpdateFrequency": "1s", "nodeLeaseDurationSeconds": 4}
        return config

    def _proxy_config(self, kubeconfig: Path) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "hostnameOverride": self.name,
            "mode": "iptables",
            # What comes from elsewhere to a Service is masqueraded, so that answers come back.
            "clusterCIDR": _PODS,
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
            "oomScoreAdj": 0,
        }

    def _cni_config(self) -> dict[str, Any]:
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": pod_cidr(self.number)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]}

    def _containerd_config(self) -> str:
        plugins = Path(self._around.tools["bridge"]).parent
        cri = f"""\
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "{snapshotter(self.folder)}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{self.folder}/cni"
"""
        state = Path("/run/containerd")
        return containerd_config(Path("/var/lib/containerd"), state, state / "containerd.sock", cri)
