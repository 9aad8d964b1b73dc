"""Sockets that listen, and how a connection's socket is set."""

import asyncio
import contextlib
import errno
import secrets
import socket

from linkcpp.common.errors import LinkcppError

_UNSENT_BYTES = 128 * 1024
_PORTS = range(20_000, 32_000)
_PORT_TRIES = 100


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


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on now; it may be taken a moment later.

    That is made unlikely: it is a random one below those that systems give to connections and to
    whoever asks for any port (32768 and up on Linux, 49152 and up elsewhere).

    Raises:
        OSError: the address is not this machine's.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket(family, kind, protocol) as probe:
            # As llama-server does: the remains of closed connections do not count as taken.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address[0], port, *address[2:]))
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise
                continue
            return port
    raise OSError(errno.EADDRINUSE, "no port was found that is free")


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
            f"Cannot listen on {host!r}, which is no address or name that is known here.",
            hint="Give an address of this machine with --host.",
        ) from error
    except OSError as error:
        if opened is not None:
            opened.close()
        if error.errno == errno.EADDRINUSE:
            raise LinkcppError(
                f"Port {port} of {host} is taken, perhaps by another linkcpp.",
                hint="Stop that one, or choose another port with --port (0 takes a free one).",
            ) from error
        raise LinkcppError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}.",
            hint="Give an address of this machine with --host, and a port above 1023.",
        ) from error
    return opened
