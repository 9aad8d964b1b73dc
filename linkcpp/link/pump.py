"""A session of an edge with its local TCP connections, whatever path carries it. Both ends use it.

The coordinator's end opens a stream for every connection that it is given; the node's end opens a
connection for every stream.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from linkcpp.common.sockets import tune_transport
from linkcpp.link.channel import SecureChannel
from linkcpp.link.core import EdgeCore
from linkcpp.link.local import LocalEnd, reset
from linkcpp.link.records import CHUNK_BYTES, ResetCode
from linkcpp.link.session import SessionError
from linkcpp.link.streams import Aborted, Event, Finished, Opened, Received, Writable

_CONNECT_SECONDS = 10.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


class StreamPump:
    """One session. ``connect`` opens what a stream of the peer leads to (the node's end)."""

    def __init__(self, core: EdgeCore, *, connect: Connect | None = None) -> None:
        self.core = core
        self.channel: SecureChannel | None = None
        self.is_broken = False
        self.sent_bytes = 0
        self.received_bytes = 0
        self._connect = connect
        self._ends: dict[int, LocalEnd] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def carried_by(self, channel: SecureChannel, peer_wanted: int) -> SecureChannel | None:
        """Go on over a new channel; return the one before, which carries nothing any more.

        Raises:
            SessionError: the peer claims to have what was never sent.
        """
        older = self.uncarried()
        self.core.attach(peer_wanted)
        self.channel = channel
        return older

    def uncarried(self) -> SecureChannel | None:
        """Be without a channel; return the one before."""
        older, self.channel = self.channel, None
        self.core.detach()
        if older is not None:
            older.leave()
        return older

    def next_record(self) -> bytes | None:
        """Return the next record to send."""
        record = self.core.next_record()
        self._dispatch()
        return record

    def receive(self, record: bytes) -> None:
        """Take a record of the peer."""
        try:
            self.core.receive(record)
        except SessionError:
            self.is_broken = True
            raise
        self._dispatch()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection to the peer until it ends; one too many is dropped at once."""
        stream = self.core.streams.open()
        if stream is None:
            reset(writer)
            return
        await self._run(stream, self._add(stream), reader, writer)

    async def aclose(self) -> None:
        """End all streams and their connections at once."""
        self.uncarried()
        for end in self._ends.values():
            end.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """There is something to send."""
        if self.channel is not None:
            self.channel.wake()

    def _dispatch(self) -> None:
        for event in self.core.streams.take_events():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Opened):
            self._spawn(self._serve(event.stream, self._add(event.stream)))
            return
        end = self._ends.get(event.stream)
        if isinstance(event, Received):
            self.received_bytes += len(event.data)
            if end is not None:
                end.deliver(event.data)
            else:  # its connection is gone, and the peer does not know it yet
                self.core.streams.taken(event.stream, len(event.data))
        elif end is None:
            return
        elif isinstance(event, Finished):
            end.finish()
        elif isinstance(event, Aborted):
            end.abort()
        elif isinstance(event, Writable):
            end.writable()

    async def _serve(self, stream: int, end: LocalEnd) -> None:
        assert self._connect is not None  # noqa: S101 - only the other end opens streams
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await self._connect()
        except (OSError, TimeoutError):
            self._ends.pop(stream, None)
            self.core.streams.abort(stream, ResetCode.REFUSED)
            self.wake()
            return
        await self._run(stream, end, reader, writer)

    async def _run(
        self,
        stream: int,
        end: LocalEnd,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        tune_transport(writer.transport)
        self.wake()
        try:
            await end.run(reader, writer)
        finally:
            self._ends.pop(stream, None)

    def _add(self, stream: int) -> LocalEnd:
        end = self._ends[stream] = LocalEnd(_Port(self, stream))
        return end

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Port:
    """One stream of a session, as its local end sees it."""

    def __init__(self, pump: StreamPump, stream: int) -> None:
        self._pump = pump
        self._streams = pump.core.streams
        self._stream = stream

    def can_write(self) -> bool:
        return self._streams.can_write(self._stream)

    def write(self, data: bytes) -> None:
        self._pump.sent_bytes += len(data)
        self._streams.write(self._stream, data)
        self._pump.wake()

    def finish(self) -> None:
        self._streams.finish(self._stream)
        self._pump.wake()

    def abort(self) -> None:
        self._streams.abort(self._stream)
        self._pump.wake()

    def taken(self, size_bytes: int) -> None:
        self._streams.taken(self._stream, size_bytes)
        self._pump.wake()


async def open_loopback(host: str, port: int) -> Streams:
    """Connect to a program on this machine."""
    return await asyncio.open_connection(host, port, limit=CHUNK_BYTES)
