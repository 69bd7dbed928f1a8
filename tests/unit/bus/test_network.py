"""H05: which interface ranks talk over, on hosts that are made up."""

import ipaddress
import socket

import pytest

from minisgl.bus.network import Network, Nic, ipv6_of, tell_libraries, this_host
from minisgl.config import StartError, UsageError

LO, LO6 = Nic("lo", "127.0.0.1"), Nic("lo", "::1")
ETH0, ETH0V6 = Nic("eth0", "10.0.0.7"), Nic("eth0", "fd00::7")
ETH1, IB0 = Nic("eth1", "10.1.0.7"), Nic("ib0", "192.168.9.7")
DOCKER, SERVICES = Nic("docker0", "172.17.0.1"), Nic("kube-ipvs0", "10.96.0.10")
OWN, DEFAULT, DEFAULT6 = "127.0.0.0/8", "0.0.0.0/0", "::/0"


def host(routes: dict[str, Nic], *more: Nic) -> Network:
    """A host with these routes, each to the address that is its source, and `more` addresses."""

    def source(target: str, _: int) -> str:
        address = ipaddress.ip_address(target)
        fits = [way for way in map(ipaddress.ip_network, routes) if address in way]
        if not fits:
            raise OSError(101, "Network is unreachable")
        return routes[str(max(fits, key=lambda way: way.prefixlen))].address

    return Network((*routes.values(), *more), source)


BUSY = host({OWN: LO, DEFAULT: ETH0, "10.1.0.0/16": ETH1, "172.17.0.0/16": DOCKER}, IB0, LO6)


@pytest.mark.parametrize(
    ("network", "target", "nic"),
    [
        pytest.param(BUSY, "10.5.0.1", ETH0, id="the default route"),
        pytest.param(BUSY, "10.1.0.3", ETH1, id="of several the one with the way"),
        pytest.param(BUSY, "127.0.0.1", LO, id="loopback, where Redis is on this host"),
        pytest.param(BUSY, "172.17.0.2", ETH0, id="no bridge of containers"),
        pytest.param(
            host({DEFAULT: ETH0, "10.96.0.10/32": SERVICES}), "10.96.0.10", ETH0,
            id="no address of a Service that kube-proxy holds here",
        ),
        pytest.param(
            host({OWN: LO, "172.17.0.0/16": DOCKER}), "172.17.0.2", DOCKER,
            id="a bridge, where there is no other way",
        ),
        pytest.param(
            host({DEFAULT6: ETH0V6, "172.17.0.0/16": DOCKER}), "172.17.0.2", ETH0V6,
            id="instead of a bridge IPv6, where that leads out",
        ),
        pytest.param(host({"::1/128": LO6, DEFAULT6: ETH0V6}), "fd00::3", ETH0V6, id="IPv6 only"),
        pytest.param(
            Network((LO,), lambda *_: "10.9.0.7"), "10.5.0.1", Nic("", "10.9.0.7"),
            id="an address that no interface shows",
        ),
    ],
)  # fmt: skip
def test_the_interface_is_that_of_the_way(network: Network, target: str, nic: Nic) -> None:
    assert network.towards(target, 6379) == nic


def test_no_way_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(StartError, match=r"no way to 10\.5\.0\.1: .*unreachable; give --interface"):
        host({OWN: LO}).towards("10.5.0.1", 6379)


def test_an_interface_that_is_named_overrides_the_way() -> None:
    assert BUSY.called("ib0") == IB0 and BUSY.called("docker0") == DOCKER


def test_the_address_of_an_interface_is_ipv6_only_where_it_has_no_other() -> None:
    both = host({DEFAULT6: ETH0V6, DEFAULT: ETH0})
    assert both.called("eth0") == ETH0
    assert host({DEFAULT6: ETH0V6}).called("eth0") == ETH0V6


@pytest.mark.parametrize("name", ["eth", "eth01", "ETH0", "eth0 ", ""])
def test_a_name_is_taken_exactly_and_the_others_are_listed(name: str) -> None:
    with pytest.raises(UsageError, match="there are: lo, eth0, eth1, docker0, ib0$"):
        BUSY.called(name)


def test_nccl_gets_the_exact_name_and_gloo_the_plain_one() -> None:
    environ: dict[str, str] = {}
    tell_libraries(ETH1, environ, asked=False)
    assert environ == {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"}


def test_what_the_user_has_set_stays_unless_an_interface_was_asked_for() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": ""}
    tell_libraries(ETH1, environ, asked=False)
    assert environ == {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "eth1"}
    tell_libraries(IB0, environ, asked=True)
    assert environ == {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0"}


def test_an_interface_without_a_name_is_told_to_nobody() -> None:
    environ: dict[str, str] = {}
    tell_libraries(Nic("", "10.9.0.7"), environ, asked=False)
    assert environ == {}


def test_addresses_that_hold_on_one_link_only_are_left_out() -> None:
    table = (
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe80000000000000000000000fe00001 03 40 20 80     eth0\n"
        "fd000000000000000000000000000007 03 40 00 80     eth0\n"
    )
    assert ipv6_of(table) == [LO6, ETH0V6] and ipv6_of("") == []


def test_this_host_shows_its_addresses_and_its_ways() -> None:
    here = this_host()
    assert here.called("lo") == LO and here.towards("127.0.0.1", 6379) == LO
    assert {nic.name for nic in here.nics} <= {name for _, name in socket.if_nameindex()}
    with pytest.raises(StartError, match="give --interface"):
        here.towards("no.such.host.invalid", 6379)
