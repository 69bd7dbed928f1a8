"""Which network interface the ranks of a group talk over, and who else has to know its name.

It is that of the way to the others, and `--interface` overrides it. Addresses and routes are data
here, so that the rules hold for any host; `this_host` reads those of this one.
"""

import array
import contextlib
import ipaddress
import re
import socket
import struct
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from minisgl.config import StartError, UsageError

_HOST_ONLY = re.compile(r"docker\d+|br-[0-9a-f]{12}|virbr\d+|cni\d+|kube-ipvs\d+")
"""Bridges of containers, and where kube-proxy keeps the addresses of Services: what another host
finds under such an address is something else."""
_ELSEWHERE = ("198.51.100.1", "2001:db8::1")
"""Addresses for documentation, which no network has: the way there is the default route."""
_LINK_LOCAL = 0x20


def loopback(address: str) -> bool:
    """Whether only the host itself can reach an address. What is none can be anything."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Nic:
    """One address of a network interface."""

    name: str
    """Empty: no interface of this host is known to have the address."""
    address: str

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it."""
        return loopback(self.address)


@dataclass(frozen=True, slots=True)
class Network:
    """The addresses and the routes of a host."""

    nics: tuple[Nic, ...]
    """Without addresses that hold on one link only."""
    source: Callable[[str, int], str]
    """The host's own address on the way to a host and port; `OSError` where there is no way."""

    def towards(self, host: str, port: int) -> Nic:
        """The interface on the way to a host. Raises `StartError` where there is no way.

        A bridge of this host's containers leads to nobody else: then it is the default route's.
        """
        try:
            nic = self._owner(self.source(host, port))
        except OSError as error:
            raise StartError(f"there is no way to {host}: {error}; give --interface") from None
        for elsewhere in _ELSEWHERE if _HOST_ONLY.fullmatch(nic.name) else ():
            with contextlib.suppress(OSError):
                return self._owner(self.source(elsewhere, port))
        return nic

    def called(self, name: str) -> Nic:
        """The interface of exactly this name, with its IPv4 address if it has one.

        Raises `UsageError` that lists the interfaces with an address.
        """
        found = [nic for nic in self.nics if nic.name == name]
        if not found:
            known = ", ".join(dict.fromkeys(nic.name for nic in self.nics))
            raise UsageError(
                f"--interface {name!r} has no address on this host; there are: {known}"
            )
        return min(found, key=lambda nic: ":" in nic.address)

    def _owner(self, address: str) -> Nic:
        return next((nic for nic in self.nics if nic.address == address), Nic("", address))


def tell_libraries(nic: Nic, environ: MutableMapping[str, str], *, asked: bool) -> None:
    """Name the interface to NCCL and Gloo, which read it in the environment.

    What the user has set there stays, unless `--interface` was `asked` for.
    """
    # NCCL takes a bare name for a prefix: eth1 would be eth10 too. Gloo wants the name alone.
    names = {"NCCL_SOCKET_IFNAME": f"={nic.name}", "GLOO_SOCKET_IFNAME": nic.name}
    for variable, value in names.items():
        if nic.name and (asked or not environ.get(variable)):
            environ[variable] = value


def this_host() -> Network:
    """The network of this host as it is now. Where it is not Linux interfaces have no names."""
    if sys.platform != "linux":
        return Network((), _source)
    return Network((*_ipv4(), *ipv6_of(_read(Path("/proc/net/if_inet6")))), _source)


def _source(host: str, port: int) -> str:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # nothing is sent
        return str(probe.getsockname()[0])


def _ipv4() -> list[Nic]:
    """See netdevice(7): an array of `struct ifreq`, one for each address."""
    import fcntl

    siocgifconf, size = 0x8912, struct.calcsize("16sLLHBBB0L")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        needed = fcntl.ioctl(probe, siocgifconf, struct.pack("iP", 0, 0))
        room = struct.unpack("iP", needed)[0] + 16 * size  # some may come meanwhile
        held = array.array("B", bytes(room))
        filled = fcntl.ioctl(probe, siocgifconf, struct.pack("iP", room, held.buffer_info()[0]))
    found = []
    for at in range(0, struct.unpack("iP", filled)[0], size):
        # A second address may have a label of its own behind a colon.
        name = held[at : at + 16].tobytes().partition(b"\0")[0].partition(b":")[0]
        found.append(Nic(name.decode(), socket.inet_ntoa(held[at + 20 : at + 24].tobytes())))
    return found


def ipv6_of(table: str) -> list[Nic]:
    """What /proc/net/if_inet6 lists: address, index, prefix, scope and flags in hex, and name."""
    found = []
    for line in table.splitlines():
        address, _, _, scope, _, name = line.split()
        if int(scope, 16) != _LINK_LOCAL:
            found.append(Nic(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))))
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""  # a kernel without IPv6
