"""Sockets that listen, and how a connection's socket is set."""

import asyncio
import contextlib
import errno
import ipaddress
import secrets
import socket
import sys
from typing import Any

from linkcpp.common.closing import Closing
from linkcpp.common.errors import LinkcppError, NotNowError, error_of_system

_UNSENT_BYTES = 128 * 1024
_PORTS = range(20_000, 32_000)
_PORT_TRIES = 100

_Found = tuple[int, int, int, str, tuple[Any, ...]]


def tune_transport(transport: asyncio.BaseTransport) -> None:
    """Send small messages at once, and keep little unsent data in the kernel.

    A ping or a close waits behind what the kernel holds: on a slow link its default of several
    megabytes would take longer than the ping's deadline.
    """
    raw = transport.get_extra_info("socket")
    if raw is None:
        return
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str | None, port: int) -> list[socket.socket]:
    """Open the listening sockets: ``host``, or all interfaces in IPv6 and IPv4 for ``None``.

    Port 0 takes a free one, the same for both.

    Raises:
        LinkcppError: the port is taken, or the address is not this machine's.
    """
    if host is not None:
        return [_bind(host, port)]
    try:
        six = _bind("::", port)
    except LinkcppError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            raise
        return [_bind("0.0.0.0", port)]  # a system without IPv6
    try:
        return [six, _bind("0.0.0.0", six.getsockname()[1])]
    except LinkcppError:
        six.close()
        raise


class HeldPort(Closing):
    """A TCP port that is kept for a server which is started later, and may be started again.

    On Linux a bound socket that does not listen keeps it: a server that sets ``SO_REUSEADDR``, as
    all do that linkcpp starts, can listen on it nevertheless, and nobody who asks for any port gets
    it. Elsewhere the server could not listen then, and the port is only likely to stay free.
    """

    def __init__(self, number: int, holder: socket.socket | None) -> None:
        self.number = number
        self._holder = holder

    def descriptors(self) -> tuple[int, ...]:
        """Return what a process has to inherit so that it keeps the port as well."""
        return () if self._holder is None else (self._holder.fileno(),)

    def close(self) -> None:
        """Keep it no longer; a server that listens on it goes on."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None


def hold_port(host: str = "127.0.0.1", port: int = 0) -> HeldPort:
    """Keep a port for a server to come; 0 takes one that nobody listens on or keeps.

    A given port may be kept twice; only one of both servers can listen then.
    That is a random one below those that systems give to connections and to whoever asks for any
    port (32768 and up on Linux, 49152 and up elsewhere).

    Raises:
        OSError: the port is taken or may not be used, or the address is not this machine's.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    if port:
        return _hold(found, port)
    for _ in range(_PORT_TRIES):
        try:
            return _hold(found, secrets.choice(_PORTS), is_any=True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, "no port was found that is free")


def free_port() -> int:
    """Return a loopback port that nobody listens on or keeps now; it may be taken a moment later.

    Raises:
        OSError: none is free.
    """
    with hold_port("127.0.0.1") as held:
        return held.number


def _hold(found: _Found, port: int, *, is_any: bool = False) -> HeldPort:
    family, kind, protocol, _, address = found
    holder = socket.socket(family, kind, protocol)
    try:
        if not is_any:
            # As servers do: the remains of closed connections do not count as taken.
            _share(holder)
        holder.bind((address[0], port, *address[2:]))
        if is_any:
            # Only now: before, it would have been given one that somebody else keeps.
            _share(holder)
    except BaseException:
        holder.close()
        raise
    if sys.platform == "linux":
        return HeldPort(port, holder)
    holder.close()
    return HeldPort(port, None)


def _share(holder: socket.socket) -> None:
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _bind(host: str, port: int) -> socket.socket:
    opened: socket.socket | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(128)
        opened.setblocking(False)
    except (socket.gaierror, UnicodeError) as error:
        raise LinkcppError(
            f"Cannot listen on {host!r}, which is not an address or name that is known here.",
            hint="Give an address of this machine with --host.",
        ) from error
    except OSError as error:
        if opened is not None:
            opened.close()
        if error.errno == errno.EADDRINUSE:
            raise NotNowError(
                f"Port {port} of {host} is taken, perhaps by another linkcpp.",
                hint="Stop that one, or choose another port with --port (0 takes a free one).",
            ) from error
        raise error_of_system(
            error,
            f"Cannot listen on {host} port {port}: {error.strerror or error}.",
            hint="Give an address of this machine with --host, and a port above 1023.",
        ) from error
    return opened
