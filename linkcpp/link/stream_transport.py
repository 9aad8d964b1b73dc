"""A stream as a transport of asyncio's, so that any protocol of asyncio runs over it unchanged.

No socket and no loopback connection lies between: uvicorn's HTTP and httpx use streams with it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from linkcpp.link.handlers import StreamPort


class StreamTransport(asyncio.Transport):
    """One stream; ``make_protocol`` makes what uses it. ``extra`` is for ``get_extra_info``."""

    def __init__(
        self,
        port: StreamPort,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        extra: dict[str, Any],
    ) -> None:
        super().__init__(extra)
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._received: deque[memoryview] = deque()
        self._has_received_all = False
        self._is_reading = True
        self._is_writing_paused = False
        self._is_closing = False
        self._is_lost = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._protocol = make_protocol()
        self._protocol.connection_made(self)

    # What the session tells.

    def deliver(self, data: memoryview) -> None:
        """Pass bytes of the peer to the protocol, or keep them while it does not read."""
        self._received.append(data)
        self._pass_on()

    def finish(self) -> None:
        """The peer sends no more."""
        self._has_received_all = True
        self._pass_on()

    def abort(self, reason: str = "", code: int | None = None) -> None:
        """The stream is gone; without a ``code`` it is the protocol that wants it gone."""
        if code is None:
            self._port.abort()
        if not self._is_lost:
            self._lose(ConnectionResetError(reason or "the stream was reset"))

    def writable(self) -> None:
        """The stream takes more."""
        if self._is_writing_paused:
            self._is_writing_paused = False
            self._protocol.resume_writing()

    async def run(self) -> None:
        """Wait until the stream is over."""
        try:
            await asyncio.shield(self._over)
        finally:
            if not self._is_lost:
                self._port.abort()
                self._lose(ConnectionResetError("the link was closed"))

    # What the protocol asks for.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes."""
        if self._is_closing or not data:
            return
        self._port.write(bytes(data))
        if not self._is_writing_paused and not self._port.can_write():
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        """A stream ends in each direction by itself."""
        return True

    def write_eof(self) -> None:
        """Send no more."""
        self._port.finish()

    def close(self) -> None:
        """Send what was written, and be done."""
        if self._is_closing:
            return
        self._is_closing = True
        self._port.finish()
        self._loop.call_soon(self._lose, None)

    def is_closing(self) -> bool:
        """Whether it was closed or lost."""
        return self._is_closing

    def pause_reading(self) -> None:
        """Keep what arrives; the peer is told nothing, and stops at the stream's window."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """Pass on again."""
        if not self._is_reading:
            self._is_reading = True
            self._loop.call_soon(self._pass_on)

    def is_reading(self) -> bool:
        """Whether bytes are passed on."""
        return self._is_reading and not self._is_closing

    def get_write_buffer_size(self) -> int:
        """Tell that nothing waits here: what is written is the session's."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Change nothing: the session has its own limits."""

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return what uses it."""
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol use it."""
        self._protocol = protocol

    def _pass_on(self) -> None:
        while self._received and self._is_reading and not self._is_closing:
            data = self._received.popleft()
            protocol = self._protocol
            assert isinstance(protocol, asyncio.Protocol)  # noqa: S101 - no datagrams here
            protocol.data_received(bytes(data))
            self._port.taken(len(data))
        if self._is_closing:
            while self._received:
                self._port.taken(len(self._received.popleft()))
        elif self._has_received_all and not self._received and self._is_reading:
            self._has_received_all = False  # told once
            protocol = self._protocol
            assert isinstance(protocol, asyncio.Protocol)  # noqa: S101 - as above
            if not protocol.eof_received():
                self.close()

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._pass_on()
        self._protocol.connection_lost(error)
        if not self._over.done():
            self._over.set_result(None)
