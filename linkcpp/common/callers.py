"""Whose a connection is, for limits and for what only this machine may see. Pure."""

import ipaddress
from collections.abc import Sequence
from typing import Final

Headers = Sequence[tuple[bytes, bytes]]

_IPV6_SITE_BITS: Final = 64
_PROXY_HEADERS: Final = frozenset(
    (b"x-forwarded-for", b"forwarded", b"x-real-ip", b"cf-connecting-ip", b"via")
)


def caller(peer: str, headers: Headers) -> str:
    """Name whom limits count: an IPv4 address, or an IPv6 network of 64 bits.

    Behind a proxy on this machine or in its private network it is the address that the proxy saw:
    the last one, since all before it may be invented. ``headers`` have names in small letters.
    """
    address = _parse(peer)
    if address is None:
        return peer
    if address.is_private:
        told = [value for name, value in headers if name == b"x-forwarded-for"]
        last = told[-1].rpartition(b",")[2].strip().decode("latin-1") if told else peer
        address = _parse(last) or address
    return network_of(str(address))


def network_of(host: str) -> str:
    """Return what limits count an address by: itself, or the IPv6 network that one host owns."""
    address = _parse(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, _IPV6_SITE_BITS), strict=False))
    return host if address is None else str(address)


def is_this_machine(peer: str, headers: Headers) -> bool:
    """Whether a request comes from this machine itself, and not through a proxy on it."""
    address = _parse(peer)
    is_proxied = any(name in _PROXY_HEADERS for name, _ in headers)
    return address is not None and address.is_loopback and not is_proxied


def _parse(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
