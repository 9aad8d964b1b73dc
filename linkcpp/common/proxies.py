"""Which proxy leads to an address: one place decides for every client.

As everywhere, ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` say it, in small
letters too. Machines that are near are dialled directly whatever these say: this one, and those of
private networks that are named by number.
"""

import contextlib
import ipaddress
import os
import ssl
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable

_VARIABLES_OF: Final = {
    "https": ("https_proxy", "all_proxy"),
    "wss": ("https_proxy", "all_proxy"),
    "http": ("http_proxy", "all_proxy"),
    "ws": ("http_proxy", "all_proxy"),
}
PROXY_VARIABLES: Final = tuple(
    spelled
    for name in ("https_proxy", "http_proxy", "all_proxy", "no_proxy")
    for spelled in (name, name.upper())
)
_NEAR: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
        *("169.254.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10"),
    )
)


class Proxy(NamedTuple):
    """A proxy, and the environment variable that names it; ``url`` may have a password in it."""

    url: str
    variable: str

    def __str__(self) -> str:
        """Name it without its password."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return f"through the proxy {printable(f'{parts.scheme}://{host}', 100)} of {self.variable}"


def proxy_for(url: str, environment: Mapping[str, str]) -> Proxy | None:
    """Choose the proxy for an HTTP or WebSocket address; ``None``: dial it directly. Pure.

    Raises:
        LinkcppError: the variable names something that cannot be used.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").partition("%")[0]
    wanted = _VARIABLES_OF.get(parts.scheme, ())
    found = (one for name in wanted if (one := _variable(name, environment)) is not None)
    named = next(found, None)
    if named is None or not host or _is_near(host):
        return None
    excluded = _variable("no_proxy", environment)
    if excluded is not None and _is_excluded(host, parts.port, excluded.url):
        return None
    return _checked(named, host)


def proxy_from_here(url: str) -> Proxy | None:
    """Choose the proxy as ``proxy_for`` does, by this process's environment.

    Where that names none, the settings of macOS or Windows count.
    """
    environment: Mapping[str, str] = os.environ
    if not any(_variable(name, environment) for name in ("http_proxy", "https_proxy", "all_proxy")):
        environment = {f"{scheme}_proxy": value for scheme, value in getproxies().items()}
    return proxy_for(url, environment)


@contextlib.contextmanager
def naming(proxy: Proxy | None) -> Iterator[None]:
    """Note on every error in the block which proxy was used, for ``in_words``."""
    try:
        yield
    except Exception as error:
        if proxy is not None:
            error.add_note(str(proxy))
        raise


class ProxiedTransport(httpx.BaseTransport):
    """Sends each request of a client by the way that its own address has, redirects included."""

    def __init__(self, verify: ssl.SSLContext | bool = True) -> None:
        self._verify = verify
        self._opened: dict[str | None, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        proxy = proxy_from_here(str(request.url))
        url = proxy.url if proxy else None
        if url not in self._opened:
            self._opened[url] = httpx.HTTPTransport(verify=self._verify, proxy=url)
        with naming(proxy):
            return self._opened[url].handle_request(request)

    def close(self) -> None:
        """Close the connections."""
        for transport in self._opened.values():
            transport.close()


class ProxiedAsyncTransport(httpx.AsyncBaseTransport):
    """The same for an asynchronous client."""

    def __init__(self, verify: ssl.SSLContext | bool = True) -> None:
        self._verify = verify
        self._opened: dict[str | None, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        proxy = proxy_from_here(str(request.url))
        url = proxy.url if proxy else None
        if url not in self._opened:
            self._opened[url] = httpx.AsyncHTTPTransport(verify=self._verify, proxy=url)
        with naming(proxy):
            return await self._opened[url].handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        for transport in self._opened.values():
            await transport.aclose()


def _variable(name: str, environment: Mapping[str, str]) -> Proxy | None:
    """Read a variable, in small letters first as other programs do; an empty one is none."""
    for spelled in (name, name.upper()):
        if value := environment.get(spelled, "").strip():
            return Proxy(value, spelled)
    return None


def _is_near(host: str) -> bool:
    if host == "localhost" or host.endswith((".localhost", ".local")):
        return True
    address = _address(host)
    return address is not None and any(address in network for network in _NEAR)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_excluded(host: str, port: int | None, listed: str) -> bool:
    address = _address(host)
    for word in listed.lower().replace(" ", ",").split(","):
        name = word.removesuffix(f":{port}").strip("[]").removeprefix("*").lstrip(".")
        if word == "*" or (name and (host == name or host.endswith(f".{name}"))):
            return True
        with contextlib.suppress(ValueError):
            if address is not None and address in ipaddress.ip_network(name, strict=False):
                return True
    return False


def _checked(named: Proxy, host: str) -> Proxy:
    url = named.url if "://" in named.url else f"http://{named.url}"
    hint = f"Set it to the address of an HTTP proxy, or add {printable(host, 100)} to NO_PROXY."
    try:
        parts = urlsplit(url)
        is_usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_usable = False
    if is_usable and parts.scheme.startswith("socks"):
        raise LinkcppError(
            f"{named.variable} names a SOCKS proxy, and linkcpp speaks to HTTP proxies only.",
            hint=hint,
        )
    if not is_usable or parts.scheme not in ("http", "https"):
        raise LinkcppError(f"{named.variable} is not the address of a proxy.", hint=hint)
    return Proxy(url, named.variable)
