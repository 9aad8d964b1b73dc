"""One TCP connection on this machine's loopback and the stream that carries it."""

import asyncio
import contextlib
import socket
import struct
from typing import Protocol

from linkcpp.link.records import CHUNK_BYTES

# A socket that has this much unsent is slow: then the peer gets no more room until it drains.
_SLOW_BYTES = 128 * 1024
_LINGER_FOR_NOTHING = struct.pack("ii", 1, 0)


class StreamPort(Protocol):
    """What a local end needs of the session, for its own stream."""

    def can_write(self) -> bool:
        """Whether ``write`` may be called."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes to the peer."""
        ...

    def finish(self) -> None:
        """Send no more."""
        ...

    def abort(self) -> None:
        """End the stream at once."""
        ...

    def taken(self, size_bytes: int) -> None:
        """Tell that bytes of the peer were passed on."""
        ...


class LocalEnd:
    """Passes bytes between a stream and a TCP connection, each direction with back-pressure.

    What comes from the peer before the connection is there is kept: a window at most.
    """

    def __init__(self, port: StreamPort) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None
        self._pending: list[memoryview] = []
        self._untaken_bytes = 0
        self._is_finished = False
        self._is_aborted = False
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()

    def deliver(self, data: memoryview) -> None:
        """Pass bytes of the peer on."""
        if self._writer is None:
            self._pending.append(data)
            return
        if self._writer.transport.is_closing():
            self._port.abort()
            self.abort()
            return
        self._writer.write(data)
        self._untaken_bytes += len(data)
        if self._writer.transport.get_write_buffer_size() < _SLOW_BYTES:
            self._take()
        else:
            self._changed.set()

    def finish(self) -> None:
        """The peer sends no more."""
        self._is_finished = True
        self._changed.set()

    def abort(self) -> None:
        """The stream is gone."""
        self._is_aborted = True
        self._changed.set()
        self._writable.set()
        if self._writer is not None:
            reset(self._writer)

    def writable(self) -> None:
        """The stream takes more."""
        self._writable.set()

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry the connection until both directions have ended, or one of them broke."""
        self._writer = writer
        pending, self._pending = self._pending, []
        for data in pending:
            self.deliver(data)
        pumps = (asyncio.create_task(self._pump_out(reader)), asyncio.create_task(self._pump_in()))
        try:
            done, waiting = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            is_broken = bool(waiting) or any(task.exception() for task in done)
            if is_broken and not self._is_aborted:
                self._port.abort()
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            if any(task.cancelled() or task.exception() for task in pumps):
                reset(writer)
            else:
                writer.close()  # after what it still has to send

    async def _pump_out(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK_BYTES):
            self._port.write(data)
            while not self._port.can_write():
                self._check()
                self._writable.clear()
                await self._writable.wait()
        self._check()
        self._port.finish()

    async def _pump_in(self) -> None:
        assert self._writer is not None  # noqa: S101 - run sets it
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._check()
            await self._writer.drain()
            self._take()
            if self._is_finished:
                if self._writer.can_write_eof():
                    self._writer.write_eof()
                return

    def _take(self) -> None:
        size, self._untaken_bytes = self._untaken_bytes, 0
        if size:
            self._port.taken(size)

    def _check(self) -> None:
        if self._is_aborted:
            raise ConnectionAbortedError


def reset(writer: asyncio.StreamWriter) -> None:
    """Drop a connection so that its program sees an error, and not the end of the data."""
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_FOR_NOTHING)
    writer.transport.abort()
