"""The network addresses of this machine and of what it hears about."""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple

import psutil

# A machine with dozens of container bridges would fill mDNS packets with addresses of no use.
MAX_ADDRESSES = 12

_CONTAINERS = re.compile(
    r"(docker|podman|cni|nerdctl|lxc|lxd|incus|virbr|vmnet|vboxnet|veth|cali|flannel|weave)"
    r"|br-|vethernet \("
)
# Nothing is sent there: the system only says from which of its addresses it would be.
_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class InterfaceAddress(NamedTuple):
    """One address of this machine; ``has_default_route``: its interface leads to the internet.

    A link-local IPv6 address has its zone.
    """

    interface: str
    address: _Address
    has_default_route: bool


def own_addresses(bind_host: str, *, with_link_local: bool = False) -> tuple[str, ...]:
    """List the addresses at which a server bound to ``bind_host`` can be reached, without zones.

    A wildcard (``0.0.0.0``, ``::``) stands for every address of the interfaces that are up, the
    most useful first (``most_useful_first``) and no more than ``MAX_ADDRESSES``; loopback is
    listed only where it is all that there is. A link-local IPv6 address says nothing without the
    interface of whoever connects, so that it is listed only for those who hear it by mDNS
    (``with_link_local``).
    """
    try:
        bound = ipaddress.ip_address(bind_host.partition("%")[0])
    except ValueError:
        bound = ipaddress.ip_address(socket.gethostbyname(bind_host))
    if not bound.is_unspecified:
        listed = [bound]
    else:
        found = [
            address
            for address in interface_addresses()
            if bound.version == 6 or isinstance(address, ipaddress.IPv4Address)
        ]
        listed = [address for address in found if not address.is_loopback] or found
    told = (
        address.compressed.partition("%")[0]
        for address in listed
        if with_link_local or address.version == 4 or not address.is_link_local
    )
    return tuple(dict.fromkeys(told))[:MAX_ADDRESSES]


def interface_addresses() -> list[_Address]:
    """List the addresses of all interfaces that are up, the most useful first.

    Link-local IPv6 ones have their zone.
    """
    stats = psutil.net_if_stats()
    sources = _default_sources()
    found: list[InterfaceAddress] = []
    for interface, entries in psutil.net_if_addrs().items():
        if interface in stats and not stats[interface].isup:
            continue
        texts = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        for text in texts:
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(text)
                found.append(InterfaceAddress(interface, address, not sources.isdisjoint(texts)))
    return most_useful_first(found)


def most_useful_first(found: Iterable[InterfaceAddress]) -> list[_Address]:
    """Order addresses by how likely another machine reaches this one there. Pure.

    Those of the interface with the default route first, then those of private networks, then
    others, then link-local ones; last what bridges of containers and virtual machines have, which
    other machines have too. IPv4 goes before IPv6, and the order is the same at every call.
    """

    def rank(one: InterfaceAddress) -> tuple[bool, bool, bool, bool, int, str, int]:
        address = one.address
        is_bridge = _CONTAINERS.match(one.interface.lower()) is not None
        return (
            # A hypervisor's own way out may be a bridge.
            is_bridge and not one.has_default_route,
            address.is_link_local,
            not one.has_default_route,
            not address.is_private,
            address.version,
            one.interface,
            int(address),
        )

    return [one.address for one in sorted(found, key=rank)]


def _default_sources() -> frozenset[str]:
    """Return the addresses from which this machine would call the internet."""
    sources: set[str] = set()
    for family, host in _FAR_AWAY:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            sources.add(probe.getsockname()[0])
    return frozenset(sources)


def link_local_zones() -> tuple[str, ...]:
    """Name the interfaces on which a link-local IPv6 address could be, the most useful first."""
    zones = (
        address.scope_id
        for address in interface_addresses()
        if isinstance(address, ipaddress.IPv6Address) and address.is_link_local
    )
    return tuple(dict.fromkeys(zone for zone in zones if zone))


def reachable_hosts(advertised: list[str], zones: tuple[str, ...]) -> tuple[str, ...]:
    """Turn addresses as mDNS tells them into hosts that a socket can connect to.

    A link-local IPv6 address needs the interface it was heard on; where that is not known (the
    record came over IPv4) each of ``zones`` is tried. Addresses that no single host can have are
    left out, and no more than ``MAX_ADDRESSES`` are returned.
    """
    hosts: list[str] = []
    for text in advertised:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if address.is_unspecified or address.is_multicast:
            continue
        if not isinstance(address, ipaddress.IPv6Address) or not address.is_link_local:
            hosts.append(address.compressed.partition("%")[0])
        elif address.scope_id:
            hosts.append(f"{address.compressed.partition('%')[0]}%{_zone_name(address.scope_id)}")
        else:
            hosts.extend(f"{address.compressed}%{zone}" for zone in zones)
    return tuple(dict.fromkeys(hosts))[:MAX_ADDRESSES]


def host_of(socket_address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Write the host of a socket's address with its zone, so that one can connect to it again."""
    host = socket_address[0]
    if len(socket_address) == 4 and socket_address[3] and "%" not in host:
        return f"{host}%{_zone_name(str(socket_address[3]))}"
    return host


def _zone_name(scope: str) -> str:
    """Name the interface of a numeric zone: names stay valid when they are read by people."""
    try:
        return socket.if_indextoname(int(scope))
    except (ValueError, OSError, OverflowError):
        return scope
