"""The network addresses of this machine and of what it hears about."""

import contextlib
import ipaddress
import socket

import psutil

# A machine with dozens of container bridges would fill mDNS packets with addresses of no use.
MOST_ADDRESSES = 12


def own_addresses(bind_host: str) -> tuple[str, ...]:
    """List the addresses at which a server bound to ``bind_host`` can be reached, without zones.

    A wildcard (``0.0.0.0``, ``::``) stands for every address of the interfaces that are up;
    loopback is listed only where it is all that there is.
    """
    try:
        bound = ipaddress.ip_address(bind_host.partition("%")[0])
    except ValueError:
        bound = ipaddress.ip_address(socket.gethostbyname(bind_host))
    if not bound.is_unspecified:
        return (bound.compressed,)
    found = [
        address
        for address in interface_addresses()
        if bound.version == 6 or isinstance(address, ipaddress.IPv4Address)
    ]
    beyond = [address for address in found if not address.is_loopback]
    # IPv4 and global IPv6 before link-local, so that the cut takes the least useful ones.
    ordered = sorted(beyond or found, key=lambda address: (address.is_link_local, address.version))
    return tuple(address.compressed.partition("%")[0] for address in ordered[:MOST_ADDRESSES])


def interface_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """List the addresses of all interfaces that are up; link-local IPv6 ones with their zone."""
    stats = psutil.net_if_stats()
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    for interface, addresses in psutil.net_if_addrs().items():
        if interface in stats and not stats[interface].isup:
            continue
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(ValueError):
                    found.append(ipaddress.ip_address(entry.address))
    return found


def link_local_zones() -> tuple[str, ...]:
    """Name the interfaces on which a link-local IPv6 address could be."""
    return tuple(
        sorted(
            {
                address.scope_id
                for address in interface_addresses()
                if isinstance(address, ipaddress.IPv6Address)
                and address.is_link_local
                and address.scope_id
            }
        )
    )


def reachable_hosts(advertised: list[str], zones: tuple[str, ...]) -> tuple[str, ...]:
    """Turn addresses as mDNS tells them into hosts that a socket can connect to.

    A link-local IPv6 address needs the interface it was heard on; where that is not known (the
    record came over IPv4) each of ``zones`` is tried. Addresses that no single host can have are
    left out, and no more than ``MOST_ADDRESSES`` are returned.
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
    return tuple(dict.fromkeys(hosts))[:MOST_ADDRESSES]


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
