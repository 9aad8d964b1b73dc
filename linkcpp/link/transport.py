"""What carries a link's messages: a WebSocket, at the end that dialled or at the one that accepted.

A transport keeps message borders and order, and is trusted with nothing else.
"""

import asyncio
import contextlib
import os
from collections import deque
from http import HTTPStatus
from typing import Protocol, cast

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidState, InvalidStatus, WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import SERVER, State
from websockets.protocol import Protocol as WebSocket
from websockets.server import ServerProtocol

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
_READ_BYTES = 256 * 1024
_CLOSE_SECONDS = 1.0
# RFC 6455, section 5.5.1: what a close frame can hold besides its code.
_MAX_REASON_BYTES = 123


class TransportLostError(Exception):
    """The transport is gone, or never was; ``code`` is its close code where it has one."""

    def __init__(self, reason: str, code: int | None = None, *, is_refused: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.is_refused = is_refused


class Receiver(Protocol):
    """Whom a transport tells what happens on it; all calls are short."""

    def received(self, message: bytes) -> None:
        """Take a message."""
        ...

    def writable(self) -> None:
        """The transport takes messages again."""
        ...

    def lost(self, error: TransportLostError) -> None:
        """The transport is gone; nothing more comes."""
        ...


class Transport(Protocol):
    """One connection that carries binary messages: first in turns, then to a receiver."""

    async def receive(self) -> bytes:
        """Wait for the next message; not once there is a receiver.

        Raises:
            TransportLostError: the connection is gone, or sent what is not a binary message.
        """
        ...

    def deliver_to(self, receiver: Receiver) -> None:
        """Give a receiver what comes from now on, and what came and was not received."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether no message should be sent now; a receiver is told when that ends."""
        ...

    def send(self, message: bytes) -> None:
        """Send a message; dropped where the connection is gone."""
        ...

    @property
    def descriptor(self) -> int | None:
        """What ``poll`` can wait for, and ``read_now`` then reads; ``None`` where there is none."""
        ...

    def read_now(self) -> bool:
        """Take what the system has, without the event loop; tell whether there was anything."""
        ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End the connection; also fine when it is gone."""
        ...


class WebSocketTransport(asyncio.Protocol):
    """A WebSocket whose opening handshake is over; ``websocket`` does its framing.

    Messages go straight from the event loop to whoever uses them: no task and no queue lies
    between, which is most of what a message would cost.
    """

    _transport: asyncio.Transport

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._messages: deque[bytes] = deque()
        self._parts: list[bytes] = []
        self._receiver: Receiver | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._lost: TransportLostError | None = None
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_full = False
        self.descriptor: int | None = None

    @classmethod
    def accepted(cls) -> "WebSocketTransport":
        """Make the protocol of a connection whose upgrade this machine has answered."""
        return cls(WebSocket(SERVER, max_size=MAX_MESSAGE_BYTES))

    @classmethod
    def accepting(cls) -> "WebSocketTransport":
        """Make the protocol of a connection whose request for a WebSocket is still to be read."""
        return cls(ServerProtocol(max_size=MAX_MESSAGE_BYTES))

    @classmethod
    async def dial(cls, url: str, *, timeout_seconds: float) -> "WebSocketTransport":
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
                    # A link asks itself whether its peer is alive, end to end.
                    ping_interval=None,
                    max_size=MAX_MESSAGE_BYTES,
                )
        except LinkcppError as error:
            raise TransportLostError(str(error)) from error
        except (OSError, WebSocketException, ValueError) as error:
            is_refused = isinstance(error, ConnectionRefusedError) or _says_no(error)
            raise TransportLostError(in_words(error), is_refused=is_refused) from error
        # Both relay and peer are silent until they are told who dials, so nothing is under way.
        dialled = cls(connection.protocol)
        connection.transport.set_protocol(dialled)
        dialled.connection_made(connection.transport)
        return dialled

    # What the event loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection over."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_LIMIT_BYTES)
        tune_transport(transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and transport.get_extra_info("ssl_object") is None:
            self.descriptor = raw.fileno()
        if self._transport.is_closing():
            self._lose(TransportLostError("the connection was lost"))

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        websocket = self._websocket
        websocket.receive_data(data)
        for event in websocket.events_received():
            if isinstance(event, Frame):
                self._take(event)
            elif isinstance(websocket, ServerProtocol):
                websocket.send_response(websocket.accept(cast("Request", event)))
        if websocket.writes:
            self._write_all()
        if websocket.state is State.CLOSING or websocket.state is State.CLOSED:
            self._end()

    def eof_received(self) -> None:
        """The peer sends no more."""
        self._websocket.receive_eof()
        self._write_all()
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.descriptor = None
        self._lose(TransportLostError("the connection was lost"))
        if not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        """The kernel takes no more."""
        self.is_full = True

    def resume_writing(self) -> None:
        """The kernel takes data again."""
        self.is_full = False
        if self._receiver is not None:
            self._receiver.writable()

    # What its user asks for.

    async def receive(self) -> bytes:
        """Wait for the next message."""
        while not self._messages:
            if self._lost is not None:
                raise self._lost
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if len(self._messages) == _MAX_QUEUED_MESSAGES:
            self._transport.resume_reading()
        return self._messages.popleft()

    def deliver_to(self, receiver: Receiver) -> None:
        """Give a receiver what comes from now on."""
        if len(self._messages) >= _MAX_QUEUED_MESSAGES:
            self._transport.resume_reading()
        self._receiver = receiver
        while self._messages:
            receiver.received(self._messages.popleft())
        if self._lost is not None:
            receiver.lost(self._lost)

    def send(self, message: bytes) -> None:
        """Send a message."""
        with contextlib.suppress(InvalidState):
            self._websocket.send_binary(message)
            self._write_all()

    def read_now(self) -> bool:
        """Take what the system has; its end and its errors are left to the event loop."""
        if self.descriptor is None:
            return False
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except OSError:
            return False
        if data:
            self.data_received(data)
        return bool(data)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Say why, and wait a moment for the peer to do the same."""
        with contextlib.suppress(InvalidState):
            self._websocket.send_close(code, _fitting(reason))
            self._write_all()
        self._lose(TransportLostError(reason or "it was closed", code))
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.shield(self._gone)
        except TimeoutError:
            self._transport.abort()

    def _take(self, frame: Frame) -> None:
        if frame.opcode is Opcode.BINARY or frame.opcode is Opcode.CONT:
            if self._parts or not frame.fin:
                self._parts.append(bytes(frame.data))
                if frame.fin:
                    message, self._parts = b"".join(self._parts), []
                    self._pass_on(message)
            else:
                self._pass_on(bytes(frame.data))
        elif frame.opcode is Opcode.TEXT:
            self._lose(TransportLostError("the other side sends no more"))

    def _pass_on(self, message: bytes) -> None:
        if self._lost is not None:
            return
        if self._receiver is not None:
            self._receiver.received(message)
            return
        self._messages.append(message)
        if len(self._messages) == _MAX_QUEUED_MESSAGES:
            self._transport.pause_reading()
        self._wake()

    def _write_all(self) -> None:
        for data in self._websocket.data_to_send():
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()
            else:  # TLS has no half-close
                self._transport.close()

    def _end(self) -> None:
        """The WebSocket has ended: what is left is to close the connection."""
        told = self._websocket.close_rcvd
        if told is not None:
            reason = printable(told.reason, 200) or "the other side closed it"
            self._lose(TransportLostError(reason, told.code))
        else:
            error = self._websocket.parser_exc
            self._lose(TransportLostError(f"the connection was lost: {error}"))
        asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._transport.abort)

    def _lose(self, error: TransportLostError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._wake()
        if self._receiver is not None:
            self._receiver.lost(error)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _says_no(error: Exception) -> bool:
    """Whether the machine itself answers that what was asked for is not there."""
    return isinstance(error, InvalidStatus) and error.response.status_code == HTTPStatus.NOT_FOUND


def _fitting(reason: str) -> str:
    return reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
