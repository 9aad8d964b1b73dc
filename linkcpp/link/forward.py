"""A loopback port that leads over a link to a target at its other end, for programs as they are."""

import asyncio
from collections.abc import Callable
from typing import Self

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.sockets import tune_transport
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.handlers import StreamPort
from linkcpp.link.records import CHUNK_BYTES, ResetCode
from linkcpp.link.tcp_handler import Streams, TcpHandler, reset

HOST = "127.0.0.1"
_BACKLOG = 64


class Forward(AsyncClosing):
    """Carries each connection to ``127.0.0.1:port`` on a stream of its own.

    The port stays while the link changes its path or is away. What the peer refuses for a reason is
    in ``refusal``, and ``wait_refused`` returns then.
    """

    def __init__(self, link: LinkEndpoint, target: str) -> None:
        self.port = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self._link = link
        self._target = target
        self._server: asyncio.Server | None = None
        self._open: set[_Forwarded] = set()
        self._refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, link: LinkEndpoint, target: str) -> Self:
        """Listen on a free loopback port; ``link`` must stay open."""
        forward = cls(link, target)
        forward._server = await asyncio.start_server(
            forward._accept, HOST, 0, limit=CHUNK_BYTES, backlog=_BACKLOG
        )
        forward.port = forward._server.sockets[0].getsockname()[1]
        return forward

    @property
    def endpoint(self) -> str:
        """Where the target seems to be: what ``llama-server --rpc`` takes."""
        return f"{HOST}:{self.port}"

    @property
    def refusal(self) -> str | None:
        """Why the peer last refused a connection, in its words."""
        return self._refused.result() if self._refused.done() else None

    async def wait_refused(self) -> str:
        """Wait until the peer refuses a connection, and return its words."""
        return await asyncio.shield(self._refused)

    def count(self, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """Count what was carried."""
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes

    def refuse(self, reason: str) -> None:
        """Take note of a refusal."""
        if not self._refused.done():
            self._refused.set_result(reason)

    async def aclose(self) -> None:
        """End the port and its connections; also fine when it is closed already."""
        if self._server is not None:
            self._server.close()
        for handler in list(self._open):
            handler.drop()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tune_transport(writer.transport)

        def make(port: StreamPort) -> _Forwarded:
            return _Forwarded(port, (reader, writer), self)

        try:
            handler = self._link.start_stream(self._target, make)
        except ConnectionError:
            reset(writer)
            return
        assert isinstance(handler, _Forwarded)  # noqa: S101 - made above
        self._open.add(handler)
        handler.on_end = lambda: self._open.discard(handler)


class _Forwarded(TcpHandler):
    def __init__(self, port: StreamPort, streams: Streams, forward: Forward) -> None:
        async def connect() -> Streams:
            return streams

        super().__init__(_CountedPort(port, forward), connect)
        self._forward = forward
        self._stream = port
        self._local = streams[1]
        self.on_end: Callable[[], None] = _do_nothing

    def deliver(self, data: memoryview) -> None:
        self._forward.count(received_bytes=len(data))
        super().deliver(data)

    def abort(self, reason: str, code: int = ResetCode.ABORTED) -> None:
        if code == ResetCode.REFUSED:
            self._forward.refuse(reason)
        super().abort(reason, code)

    def drop(self) -> None:
        """End it from this side."""
        self._stream.abort()
        self.abort("the port was closed")

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            reset(self._local) if not self._local.is_closing() else None
            self.on_end()


class Lease:
    """A stream without bytes that keeps what it leads to, and ends with it."""

    def __init__(self, port: StreamPort) -> None:
        self._port = port
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    def open(cls, link: LinkEndpoint, target: str) -> "Lease":
        """Take a lease.

        Raises:
            ConnectionError: the link has ended, or there are too many streams.
        """
        lease = link.start_stream(target, cls)
        assert isinstance(lease, cls)  # noqa: S101 - made above
        return lease

    async def wait_ended(self) -> str:
        """Wait until the peer ends it, and return its words."""
        return await asyncio.shield(self._ended)

    def close(self) -> None:
        """Give it back; also fine when it has ended."""
        self._port.abort()
        self._end("it was given back")

    def deliver(self, data: memoryview) -> None:
        """Take nothing: none comes."""
        self._port.taken(len(data))

    def finish(self) -> None:
        """The peer ends it."""
        self._end("it ended")

    def abort(self, reason: str, code: int) -> None:
        """The peer ends it, or the link did."""
        self._end(reason)

    def writable(self) -> None:
        """Do nothing: nothing is sent."""

    async def run(self) -> None:
        """Wait until it has ended."""
        await asyncio.shield(self._ended)

    def _end(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)


def _do_nothing() -> None:
    return


class _CountedPort:
    def __init__(self, port: StreamPort, forward: Forward) -> None:
        self._port = port
        self._forward = forward
        self.can_write = port.can_write
        self.finish = port.finish
        self.abort = port.abort
        self.taken = port.taken
        self.read_now = port.read_now

    @property
    def descriptor(self) -> int | None:
        return self._port.descriptor

    def write(self, data: bytes) -> None:
        self._forward.count(sent_bytes=len(data))
        self._port.write(data)
