"""Which addresses of a machine others are told, and in which order."""

import ipaddress
import random
import socket
from types import SimpleNamespace

import psutil
import pytest

from linkcpp.cluster import addresses
from linkcpp.cluster.addresses import InterfaceAddress, most_useful_first, own_addresses


def at(interface: str, text: str, *, is_way_out: bool = False) -> InterfaceAddress:
    return InterfaceAddress(interface, ipaddress.ip_address(text), is_way_out)


def test_the_way_out_goes_first_then_private_networks_and_bridges_of_containers_last() -> None:
    ordered = [
        at("enp3s0", "192.168.1.20", is_way_out=True),
        at("enp3s0", "2001:4860::20", is_way_out=True),
        at("eth1", "10.1.0.4"),
        at("wg0", "10.9.0.2"),
        at("eth2", "203.1.113.9"),
        at("tailscale0", "100.64.0.7"),
        at("enp3s0", "fe80::1%enp3s0", is_way_out=True),
        at("eth1", "fe80::2%eth1"),
        at("br-0a1b2c3d4e5f", "172.18.0.1"),
        at("docker0", "172.17.0.1"),
        at("lxcbr0", "10.0.3.1"),
        at("virbr0", "192.168.122.1"),
        at("docker0", "fe80::3%docker0"),
    ]
    for seed in range(20):
        shuffled = random.Random(seed).sample(ordered, len(ordered))  # noqa: S311
        assert most_useful_first(shuffled) == [one.address for one in ordered]


def test_a_bridge_that_leads_to_the_internet_is_no_containers_bridge() -> None:
    lan = at("br-lan", "192.168.1.1", is_way_out=True)
    assert most_useful_first([at("eth1", "10.0.0.1"), lan])[0] == lan.address


def test_a_lan_interface_that_came_after_thirteen_container_bridges_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(text: str) -> SimpleNamespace:
        family = socket.AF_INET6 if ":" in text else socket.AF_INET
        return SimpleNamespace(family=family, address=text)

    interfaces = {"lo": [entry("127.0.0.1")]}
    for number in range(13):
        name = f"br-{number:012x}"
        interfaces[name] = [entry(f"172.{18 + number}.0.1"), entry(f"fe80::{number}%{name}")]
    interfaces["wlan0"] = [entry("192.168.1.20"), entry("fe80::aaaa%wlan0")]
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    for sources in (frozenset(), frozenset({"192.168.1.20"})):
        monkeypatch.setattr(addresses, "_default_sources", lambda sources=sources: sources)
        assert own_addresses("::")[0] == "192.168.1.20"
        assert own_addresses("::", with_link_local=True)[:2] == ("192.168.1.20", "fe80::aaaa")
        assert addresses.link_local_zones()[0] == "wlan0"
