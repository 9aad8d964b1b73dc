"""What the streams of links to this machine lead to: the API, rpc-servers, expert workers."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from linkcpp.engine.guard import LinkGuard
from linkcpp.engine.pieces import PIECE_BYTES
from linkcpp.link.acceptor import LinkUser
from linkcpp.link.handlers import StreamHandler, StreamPort, StreamRefusedError
from linkcpp.link.program import hand_over
from linkcpp.link.records import ResetCode
from linkcpp.link.stream_transport import StreamTransport
from linkcpp.link.tcp_handler import Streams, TcpHandler
from linkcpp.node.limits import RefusedError, takes_pieces
from linkcpp.node.records import API_TARGET, LEASE_TARGET, SERVER_TARGET, WORKER_TARGET
from linkcpp.node.servers import ManagedServer, ServerManager
from linkcpp.node.workers import WorkerManager

_HOST: Final = "127.0.0.1"
# Makes what speaks HTTP for a user of a link.
MakeApi = Callable[[LinkUser], asyncio.Protocol]


class Targets:
    """Opens what a peer names; whoever has a link has proved that it may."""

    def __init__(self, servers: ServerManager, workers: WorkerManager, make_api: MakeApi) -> None:
        self._servers = servers
        self._workers = workers
        self._make_api = make_api

    def serve(self, user: LinkUser, target: str, port: StreamPort) -> StreamHandler:
        """Answer a stream.

        Raises:
            StreamRefusedError: there is no such target, or it serves nobody else now.
        """
        kind, _, key = target.partition("/")
        try:
            if target == API_TARGET:
                extra = {"peername": (user.machine.node_id, 0)}
                return StreamTransport(port, lambda: self._make_api(user), extra)
            if kind == SERVER_TARGET:
                return _ServerStream(self._servers, key, user, port)
            if kind == WORKER_TARGET:
                return _WorkerStream(self._workers, key, user, port)
            if kind == LEASE_TARGET:
                return _Lease(self._workers, key, user, port)
        except RefusedError as error:
            raise StreamRefusedError(f"{error.code}: {error.message}") from None
        raise StreamRefusedError(f"unknown_target: there is no {target!r} here")


class ProgramStream(TcpHandler):
    """One connection to a program of this node, claimed from its first byte to its last."""

    def __init__(
        self,
        manager: ServerManager | WorkerManager,
        key: str,
        user: LinkUser,
        port: StreamPort,
        *,
        guard: LinkGuard | None = None,
    ) -> None:
        super().__init__(port, self._open, byte_filter=guard)
        self.user = user
        self._manager = manager
        self._stream = port
        self._program = manager.claim(key, self)
        self._key = key

    @property
    def is_owed(self) -> bool:
        """Whether the client waits for an answer of an rpc-server."""
        return False

    def end(self, reason: str) -> None:
        """Have the stream end from outside, because its program did."""
        self._stream.abort(ResetCode.REFUSED, reason)
        self.abort(reason)

    async def run(self) -> None:
        """Carry the connection."""
        try:
            await super().run()
        finally:
            self._manager.release(self._key, self)

    async def _open(self) -> Streams:
        return await asyncio.open_connection(_HOST, self._program.port)


class _WorkerStream(ProgramStream):
    """A connection to a worker's own link, which comes over the link to its machine."""

    def __init__(self, workers: WorkerManager, key: str, user: LinkUser, port: StreamPort) -> None:
        self._door = workers.get(key).link.door
        super().__init__(workers, key, user, port)

    async def _open(self) -> Streams:
        here, there = socket.socketpair()
        with there:
            hand_over(there, b"", self._door)
        return await asyncio.open_connection(sock=here)


class _Lease:
    """A stream without bytes: while it is open the program is used, and it ends with it."""

    is_owed = False

    def __init__(self, workers: WorkerManager, key: str, user: LinkUser, port: StreamPort) -> None:
        self.user = user
        self._workers = workers
        self._key = key
        self._port = port
        self._ended = asyncio.Event()
        workers.claim(key, self)

    def end(self, reason: str) -> None:
        """Tell the peer that the program ended."""
        self._port.abort(ResetCode.REFUSED, reason)
        self._ended.set()

    def deliver(self, data: memoryview) -> None:
        """End: nobody reads here."""
        self.end("a lease takes no bytes")

    def finish(self) -> None:
        """The peer gives it back."""
        self._port.finish()
        self._ended.set()

    def abort(self, reason: str, code: int) -> None:
        """The stream is gone."""
        self._ended.set()

    def writable(self) -> None:
        """Do nothing: nothing is sent."""

    async def run(self) -> None:
        """Keep the program claimed."""
        try:
            await self._ended.wait()
        finally:
            self._workers.release(self._key, self)


class _ServerStream(ProgramStream):
    """A connection to an rpc-server: guarded, and one after the other, as it serves one client."""

    def __init__(self, servers: ServerManager, key: str, user: LinkUser, port: StreamPort) -> None:
        server: ManagedServer = servers.get(key)
        piece_bytes = PIECE_BYTES if takes_pieces(server.request.device) else None
        self._guard = LinkGuard(server.account, piece_bytes=piece_bytes)
        self._turn = server.turn
        super().__init__(servers, key, user, port, guard=self._guard)

    @property
    def is_owed(self) -> bool:
        """Whether the client waits for an answer."""
        return self._guard.is_owed

    async def run(self) -> None:
        """Wait for the connections before, and carry this one."""
        try:
            async with self._turn:
                await super().run()
        finally:
            self._guard.close()
