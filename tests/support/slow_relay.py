"""A TCP relay that makes a network of loopback: delay, loss, silence and cuts.

The kernel here cannot delay packets. So every piece of a connection waits for half a round trip in
each direction, in order. A lost packet of TCP comes late and holds up all that follows: that is
what ``loss`` does, by adding ``retransmission_seconds`` to a piece with that probability.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_PIECE_BYTES = 64 * 1024
# What may be on its way in one direction: enough for 1 Gbit/s at 80 ms.
_MAX_PIECES = 256


@dataclass
class SlowRelay:
    """Where it listens, and what may be changed while it runs."""

    port: int
    target_port: int
    rtt_seconds: float
    loss: float = 0.0
    retransmission_seconds: float = 0.2
    dice: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311
    is_silent: bool = False
    refuses: bool = False
    connection_count: int = 0
    passed_bytes: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def cut(self) -> int:
        """Reset every connection, and return how many there were; new ones are taken."""
        writers = tuple(self._writers)
        for writer in writers:
            writer.transport.abort()
        return len(writers) // 2

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        self.connection_count += 1
        if self.refuses:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._writers -= both
            self._tasks.difference_update(pumps)
            for end in both:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_PIECES)
        delivering = asyncio.create_task(self._deliver(pieces, writer))
        clock = asyncio.get_running_loop().time
        try:
            while True:
                piece = await reader.read(_PIECE_BYTES)
                late = self.retransmission_seconds if self.dice.random() < self.loss else 0.0
                await pieces.put((clock() + self.rtt_seconds / 2 + late, piece))
                if not piece:
                    await delivering
                    return
        except OSError:
            writer.transport.abort()
        finally:
            delivering.cancel()

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, piece = await pieces.get()
            await asyncio.sleep(due - clock())
            if self.is_silent:
                continue
            if not piece:
                writer.write_eof()
                return
            writer.write(piece)
            self.passed_bytes += len(piece)
            await writer.drain()

    async def aclose(self) -> None:
        """End all connections."""
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def slow_relay(
    target_port: int, *, port: int = 0, rtt_seconds: float = 0.0, loss: float = 0.0
) -> AsyncIterator[SlowRelay]:
    """Relay from a loopback port, by default a free one, to ``target_port``."""
    relay = SlowRelay(0, target_port, rtt_seconds, loss)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", port)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.aclose()
        await server.wait_closed()
