"""The network between the nodes: a switch in a namespace of its own, with a port for each.

    10.240.0.0/24   the machines: .1 this one (the control plane), .11 and .12 the nodes
    10.244.N.0/24   pods of node N
    10.96.0.0/16    Services, through kube-proxy of each node; from this machine through node 1

There is no way to anywhere else: what pods fetch must listen on 10.240.0.1.
"""

import os
import shutil
import subprocess
from pathlib import Path

from tests.cluster.apiserver import SERVICE_CIDR
from tests.cluster.programs import Program, Unavailable, await_program

HOST = "10.240.0.1"
LINK = "msgl0"
"""The only link that this machine gets."""


def address(number: int) -> str:
    """Where node 1, 2, ... is."""
    return f"10.240.0.{10 + number}"


def pod_cidr(number: int) -> str:
    """The addresses of the pods of node 1, 2, ..."""
    return f"10.244.{number}.0/24"


class Switch:
    """An Ethernet switch that outlives the nodes, and this machine's cable to it."""

    def __init__(self, pause: Path, folder: Path, detached: bool, record: Path) -> None:
        if shutil.which("ip") is None:
            raise Unavailable("needs ip: apt-get install iproute2")
        self._holder = Program(
            ["unshare", "--net", str(pause)], folder / "switch.log", detached, record
        )

    def start(self, nodes: int) -> None:
        """Set it up, with routes for that many nodes."""
        self._holder.start()
        await_program(self._holder.pid, "pause")
        self._ip("link add br0 type bridge")
        self._ip("link set br0 up")
        self._ip(f"link add host type veth peer name {LINK} netns {os.getpid()}")
        self._ip("link set host master br0 up")
        ip(f"address add {HOST}/24 dev {LINK}")
        ip(f"link set {LINK} up")
        for number in range(1, nodes + 1):
            ip(f"route add {pod_cidr(number)} via {address(number)} dev {LINK}")
        ip(f"route add {SERVICE_CIDR} via {address(1)} dev {LINK}")

    def plug_in(self, number: int, pid: int, nodes: int) -> None:
        """Give a node, the network namespace of a process, its cable, address and routes."""
        self.pull_out(number)
        self._ip(f"link add n{number} type veth peer name eth0 netns {pid}")
        self._ip(f"link set n{number} master br0 up")
        ip("link set lo up", pid)
        ip(f"address add {address(number)}/24 dev eth0", pid)
        ip("link set eth0 up", pid)
        ip(f"route add {SERVICE_CIDR} dev eth0", pid)
        for other in range(1, nodes + 1):
            if other != number:
                ip(f"route add {pod_cidr(other)} via {address(other)} dev eth0", pid)
        _in_namespace(pid, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])

    def cut(self, number: int) -> None:
        """Take the port of a node down: nothing goes in or out, nobody is told."""
        self._ip(f"link set n{number} down")

    def mend(self, number: int) -> None:
        """Undo `cut`, for a node that has been running all the time."""
        self._ip(f"link set n{number} up")

    def pull_out(self, number: int) -> None:
        """Take a node's cable away."""
        subprocess.run(
            [
                "nsenter",
                f"--net=/proc/{self._holder.pid}/ns/net",
                "ip",
                "link",
                "del",
                f"n{number}",
            ],
            capture_output=True,
        )

    def stop(self) -> None:
        """End it; all links and routes go with it."""
        self._holder.stop()
        remove_link()

    def _ip(self, words: str) -> None:
        ip(words, self._holder.pid)


def ip(words: str, pid: int | None = None) -> None:
    """Run `ip WORDS` here or in the network namespace of a process."""
    _in_namespace(pid, ["ip", *words.split()])


def remove_link() -> None:
    """See that this machine's link is gone, now and not when the kernel gets to it."""
    subprocess.run(["ip", "link", "del", LINK], capture_output=True)


def _in_namespace(pid: int | None, argv: list[str]) -> None:
    # `ip netns exec` would mount /sys anew, without the cgroups.
    enter = [] if pid is None else ["nsenter", f"--net=/proc/{pid}/ns/net"]
    done = subprocess.run([*enter, *argv], capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{' '.join(argv)}: {done.stderr.strip()}: the network needs root")
