"""Which hubs and gateways a machine talks to: over TLS, or on its own loopback."""

import functools
import ipaddress
import ssl
from urllib.parse import urlsplit, urlunsplit

from linkcpp.common.errors import LinkcppError
from linkcpp.common.sockets import is_loopback
from linkcpp.common.text import printable

DEFAULT_HUB_PORT = 8720

_SECURE = {"https": True, "wss": True, "http": False, "ws": False}


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return what verifies certificates: the system's authorities, or ``SSL_CERT_FILE``'s."""
    return ssl.create_default_context()


def check_hub_url(text: str, *, allow_plain: bool = False) -> str:
    """Read the address of a hub, without a slash at its end.

    Raises:
        LinkcppError: it is not an HTTP address, or plain HTTP to another machine, where anybody
            on the way could take the token.
    """
    url = text.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit(""), None
    is_odd = parts.query or parts.fragment or "@" in url or not url.isprintable() or " " in url
    if parts.scheme not in ("http", "https") or not host or is_odd:
        # Not echoed where it may have a password in it.
        what = "That" if "@" in url else printable(url, 200)
        raise LinkcppError(
            f"{what} is not the address of a hub.",
            hint="Write it like https://hub.example.",
        )
    if not allow_plain and not is_protected(url):
        raise LinkcppError(
            f"{printable(url, 200)} is plain HTTP: everybody on the way could take the token.",
            hint="Use https:// (docs/operations.md shows a hub behind a TLS proxy), or "
            "--allow-plain-http inside a VPN that you trust.",
        )
    return url


def is_protected(url: str) -> bool:
    """Tell whether a URL is TLS, or stays on this machine."""
    parts = urlsplit(url)
    if _SECURE.get(parts.scheme, False):
        return True
    return is_loopback(parts.hostname or "")


def may_relay(url: str, hub_url: str) -> bool:
    """Tell whether a gateway's address that a hub named is as protected as the hub's own."""
    return is_protected(url) or not is_protected(hub_url)


def may_be_direct(url: str) -> bool:
    """Tell whether an address of a node itself, as a hub named it, may be dialled.

    A node has no certificate, and what an edge carries is encrypted all the same: so it may be
    without TLS. But then it is a number: a name would be looked up, and lead anywhere.
    """
    if is_protected(url):
        return True
    try:
        ipaddress.ip_address(urlsplit(url).hostname or "")
    except ValueError:
        return False
    return True


def websocket_url(url: str, path: str) -> str:
    """Return the WebSocket address of ``path`` below the HTTP (or WebSocket) address ``url``."""
    parts = urlsplit(url)
    scheme = "wss" if _SECURE[parts.scheme] else "ws"
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + path, "", ""))
