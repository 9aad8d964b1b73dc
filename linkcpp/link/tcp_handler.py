"""One TCP connection on this machine and the stream that carries it."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from linkcpp.common.sockets import tune_transport
from linkcpp.link.handlers import StreamPort
from linkcpp.link.records import CHUNK_BYTES, ResetCode

Buffer = bytes | bytearray | memoryview
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]

CONNECT_SECONDS = 10.0
# A socket that has this much unsent is slow: then the peer gets no more room until it drains.
_SLOW_BYTES = 128 * 1024
_LINGER_FOR_NOTHING = struct.pack("ii", 1, 0)


class Passed(Protocol):
    """What a filter makes of bytes: some to pass on to each side."""

    @property
    def to_server(self) -> Sequence[Buffer]:
        """What goes to the program."""
        ...

    @property
    def to_client(self) -> Sequence[Buffer]:
        """What goes to the peer."""
        ...


class ByteFilter(Protocol):
    """Sees the bytes of a connection: the peer is its client, the program its server.

    What it raises ends the stream, and its words go to the peer.
    """

    def from_client(self, data: Buffer) -> Passed:
        """Take bytes of the peer."""
        ...

    def from_server(self, data: Buffer) -> Passed:
        """Take bytes of the program."""
        ...


class TcpHandler:
    """Passes bytes between a stream and a TCP connection, each direction with back-pressure.

    What comes from the peer before the connection is there is kept: a window at most. A
    ``byte_filter`` sees the bytes of both directions; what it raises ends the stream.
    """

    def __init__(
        self, port: StreamPort, connect: Connect, *, byte_filter: ByteFilter | None = None
    ) -> None:
        self._port = port
        self._connect = connect
        self._filter = byte_filter
        self._writer: asyncio.StreamWriter | None = None
        self._pending: list[memoryview] = []
        self._untaken_bytes = 0
        self._is_finished = False
        self._is_aborted = False
        self._broken: Exception | None = None
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()

    def deliver(self, data: memoryview) -> None:
        """Pass bytes of the peer on."""
        if self._writer is None:
            self._pending.append(data)
            return
        if self._writer.transport.is_closing():
            self._port.abort()
            self.abort("the program closed its connection")
            return
        self._untaken_bytes += len(data)
        if self._filter is None:
            self._writer.write(data)
        else:
            self._pass_filtered(self._filter, data, self._writer)
        if self._writer.transport.get_write_buffer_size() < _SLOW_BYTES:
            self._take()
        else:
            self._changed.set()

    def finish(self) -> None:
        """The peer sends no more."""
        self._is_finished = True
        self._changed.set()

    def abort(self, reason: str, code: int = ResetCode.ABORTED) -> None:
        """The stream is gone."""
        self._is_aborted = True
        self._changed.set()
        self._writable.set()
        if self._writer is not None:
            reset(self._writer)

    def writable(self) -> None:
        """The stream takes more."""
        self._writable.set()

    async def run(self) -> None:
        """Connect, and carry the connection until both directions have ended, or one broke.

        Raises:
            Exception: what the filter raised; the stream has been reset with its words.
        """
        if self._is_aborted:
            return
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await self._connect()
        except (OSError, TimeoutError) as error:
            self._port.abort(ResetCode.REFUSED, f"the program takes no connection: {error}")
            return
        tune_transport(writer.transport)
        if self._is_aborted:
            reset(writer)
            return
        self._writer = writer
        pending, self._pending = self._pending, []
        for data in pending:
            self.deliver(data)
        pumps = (asyncio.create_task(self._pump_out(reader)), asyncio.create_task(self._pump_in()))
        try:
            done, waiting = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            is_broken = bool(waiting) or any(task.exception() for task in done)
            if is_broken and not self._is_aborted:
                if self._broken is None:
                    self._port.abort()
                else:
                    self._port.abort(ResetCode.REFUSED, str(self._broken))
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            if any(task.cancelled() or task.exception() for task in pumps):
                reset(writer)
            else:
                writer.close()  # after what it still has to send
        if self._broken is not None:
            raise self._broken

    def _pass_filtered(
        self, byte_filter: ByteFilter, data: memoryview, writer: asyncio.StreamWriter
    ) -> None:
        try:
            passed = byte_filter.from_client(data)
        except Exception as error:
            self._break(error)
            return
        writer.writelines(passed.to_server)
        self._answer(passed.to_client)

    def _answer(self, parts: Sequence[Buffer]) -> None:
        if any(parts):
            self._port.write(bytes(parts[0]) if len(parts) == 1 else b"".join(parts))

    def _break(self, error: Exception) -> None:
        self._broken = error
        self._changed.set()

    async def _pump_out(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self._filter is None:
                self._port.write(data)
            else:
                try:
                    self._answer(self._filter.from_server(data).to_client)
                except Exception as error:
                    self._break(error)
                    raise
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
        if self._broken is not None:
            raise self._broken
        if self._is_aborted:
            raise ConnectionAbortedError


def reset(writer: asyncio.StreamWriter) -> None:
    """Drop a connection so that its program sees an error, and not the end of the data."""
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_FOR_NOTHING)
    writer.transport.abort()
