"""What carries an edge's messages: a WebSocket that this machine dialled, or one that it accepted.

A transport keeps message borders and order, and is trusted with nothing else.
"""

import contextlib
from typing import Protocol

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from linkcpp.common.errors import LinkcppError
from linkcpp.common.network_errors import in_words
from linkcpp.common.proxies import naming, proxy_from_here
from linkcpp.common.sockets import tune_transport
from linkcpp.common.text import printable
from linkcpp.link.noise import MAX_MESSAGE_BYTES
from linkcpp.registry.trust import tls_context

# One chunk at most waits in this process behind what the kernel holds.
_WRITE_LIMIT_BYTES = 16 * 1024
_MAX_QUEUED_MESSAGES = 16
# RFC 6455, section 5.5.1: what a close frame can hold besides its code.
_MAX_REASON_BYTES = 123


class TransportLostError(Exception):
    """The transport is gone, or never was; ``code`` is its close code where it has one."""

    def __init__(self, reason: str, code: int | None = None, *, is_refused: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.is_refused = is_refused


class Transport(Protocol):
    """One connection that carries binary messages."""

    async def send(self, message: bytes) -> None:
        """Send a message; returns when there is room for another.

        Raises:
            TransportLostError: the connection is gone.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for the next message.

        Raises:
            TransportLostError: the connection is gone, or sent what is no binary message.
        """
        ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End the connection; also fine when it is gone."""
        ...


class DialledTransport:
    """A WebSocket that this machine opened."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def dial(cls, url: str, *, timeout_seconds: float) -> "DialledTransport":
        """Open a WebSocket.

        Raises:
            TransportLostError: nothing answers at the address, or something else.
        """
        try:
            proxy = proxy_from_here(url)
            with naming(proxy):
                connection = await connect(
                    url,
                    compression=None,
                    proxy=proxy.url if proxy else None,
                    ssl=tls_context() if url.startswith("wss:") else None,
                    open_timeout=timeout_seconds,
                    # The edge asks itself whether its peer is alive, end to end.
                    ping_interval=None,
                    close_timeout=1.0,
                    max_size=MAX_MESSAGE_BYTES,
                    max_queue=_MAX_QUEUED_MESSAGES,
                    write_limit=_WRITE_LIMIT_BYTES,
                )
        except LinkcppError as error:
            raise TransportLostError(str(error)) from error
        except (OSError, WebSocketException, ValueError) as error:
            is_refused = isinstance(error, ConnectionRefusedError)
            raise TransportLostError(in_words(error), is_refused=is_refused) from error
        tune_transport(connection.transport)
        return cls(connection)

    async def send(self, message: bytes) -> None:
        """Send a message."""
        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise _closed(error) from None

    async def receive(self) -> bytes:
        """Wait for the next message."""
        try:
            message = await self._connection.recv()
        except ConnectionClosed as error:
            raise _closed(error) from None
        if isinstance(message, str):
            raise TransportLostError("the other side sends no more")
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End the connection."""
        with contextlib.suppress(OSError, WebSocketException):
            await self._connection.close(code, _fitting(reason))


class AcceptedTransport:
    """A WebSocket that somebody opened to this machine's agent."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def send(self, message: bytes) -> None:
        """Send a message."""
        try:
            await self._websocket.send({"type": "websocket.send", "bytes": message})
        except (OSError, RuntimeError, WebSocketDisconnect):
            raise TransportLostError("the other side closed it") from None

    async def receive(self) -> bytes:
        """Wait for the next message."""
        try:
            message = await self._websocket.receive()
        except RuntimeError:
            raise TransportLostError("it is closed") from None
        if message["type"] == "websocket.disconnect":
            raise TransportLostError(
                message.get("reason") or "the other side closed it", message.get("code")
            )
        data = message.get("bytes")
        if data is None:
            raise TransportLostError("the other side sends no more")
        return bytes(data)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End the connection."""
        if self._websocket.application_state is not WebSocketState.CONNECTED:
            return
        with contextlib.suppress(OSError, RuntimeError, WebSocketDisconnect):
            await self._websocket.close(code, _fitting(reason))


def _closed(error: ConnectionClosed) -> TransportLostError:
    if error.rcvd is None:
        return TransportLostError("the connection was lost")
    return TransportLostError(
        printable(error.rcvd.reason, 200) or "the other side closed it", error.rcvd.code
    )


def _fitting(reason: str) -> str:
    return reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
