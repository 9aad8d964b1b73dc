"""The HTTP server under the agent: uvicorn with deadlines and bounds for strangers.

uvicorn gives a client any time to send its headers; here a connection that does not bring a whole
request head in time is dropped, and so are connections beyond a bound.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import ErrorBody
from linkcpp.node.connection import PING_INTERVAL_SECONDS, PING_TIMEOUT_SECONDS
from linkcpp.node.link import tune_transport
from linkcpp.node.records import BRIDGE_MAX_MESSAGE_BYTES

HEAD_DEADLINE_SECONDS = 10.0
MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 512


class BoundedHttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for each request head, and a bound on connections."""

    _head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or drop it where there are too many."""
        super().connection_made(transport)
        tune_transport(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Read a piece of a request."""
        # Set before the base class looks at the data: it may hand the connection to a WebSocket.
        self._start_deadline()
        super().data_received(data)
        is_upgraded = self.transport.get_protocol() is not self
        if is_upgraded or (self.cycle is not None and not self.cycle.response_complete):
            self._stop_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_deadline()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request with the API's kind of error."""
        body = ErrorBody(code="not_http", message=msg).model_dump_json().encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        with suppress(h11.LocalProtocolError):
            answer = (
                h11.Response(status_code=400, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in answer))
        self.transport.close()

    def _start_deadline(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(
                HEAD_DEADLINE_SECONDS, self._drop_slow_client
            )

    def _stop_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _drop_slow_client(self) -> None:
        self._head_deadline = None
        self.transport.abort()


class AgentServer(uvicorn.Server):
    """uvicorn that leaves the signals to the agent, which has more to stop than connections."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield


def _is_news(record: logging.LogRecord) -> bool:
    # uvicorn 0.54 says this of every WebSocket that is refused with a response.
    return "without completing handshake" not in record.msg


def make_server(app: ASGIApp) -> AgentServer:
    """Configure the server; ``serve(sockets=…)`` runs it until ``should_exit``."""
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=BoundedHttpProtocol,
        ws="websockets-sansio",
        ws_max_size=BRIDGE_MAX_MESSAGE_BYTES,
        ws_ping_interval=PING_INTERVAL_SECONDS,
        ws_ping_timeout=PING_TIMEOUT_SECONDS,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        # A forged X-Forwarded-For would otherwise change whom a local caller seems to be.
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=3,
    )
    return AgentServer(config)


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
                f"Port {port} of {host} is taken, perhaps by another `linkcpp node`.",
                hint="Stop that one, or choose another port with --port (0 takes a free one).",
            ) from error
        raise LinkcppError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}.",
            hint="Give an address of this machine with --host, and a port above 1023.",
        ) from error
    return opened
