"""A program behind a node, for tests: it sends back what it gets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from linkcpp.link.tcp_handler import Streams


@dataclass
class Echo:
    """A server that sends everything back, and half-closes when its client has."""

    port: int = 0
    connection_count: int = 0
    open_count: int = 0
    received_bytes: int = 0
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.goes_on.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        self.open_count += 1
        try:
            while data := await reader.read(1 << 16):
                await self.goes_on.wait()
                self.received_bytes += len(data)
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            pass
        finally:
            self.open_count -= 1
            writer.close()


@contextlib.asynccontextmanager
async def echo_server() -> AsyncIterator[Echo]:
    """Run an echo on a free loopback port."""
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    try:
        yield echo
    finally:
        server.close()


async def pump(port: int, data: bytes) -> bytes:
    """Send all to a port of loopback, half-close, and return all that comes back."""
    return await exchange(await asyncio.open_connection("127.0.0.1", port), data)


async def exchange(streams: Streams, data: bytes, *, piece_bytes: int = 1 << 16) -> bytes:
    """Send all, half-close, and return all that comes back."""
    reader, writer = streams

    async def send() -> None:
        for start in range(0, len(data), piece_bytes):
            writer.write(data[start : start + piece_bytes])
            await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    try:
        got = await reader.read(-1)
        await sending
        return got
    finally:
        sending.cancel()
        writer.close()


async def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
