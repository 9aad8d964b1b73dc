"""Loopback ports at the coordinator that stand for a program on a node."""

import asyncio
from typing import Self

from linkcpp.common.closing import AsyncClosing
from linkcpp.common.sockets import tune_transport
from linkcpp.node.client import NodeClient
from linkcpp.node.link import CHUNK_BYTES
from linkcpp.node.records import ServerId
from linkcpp.node.session import BridgeSession

HOST = "127.0.0.1"
_MAX_WAITING = 64


class Listener:
    """A free loopback port whose connections are carried by a session, while there is one."""

    def __init__(self) -> None:
        self.session: BridgeSession | None = None
        self.port = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(
            self._accept, HOST, 0, limit=CHUNK_BYTES, backlog=_MAX_WAITING
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Take no more connections; may be called twice."""
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = self.session
        is_open = self._server is not None and self._server.is_serving()
        if session is None or not is_open or session.connection_count >= _MAX_WAITING:
            writer.transport.abort()
            return
        tune_transport(writer.transport)
        await session.carry(reader, writer)


class Tunnel(AsyncClosing):
    """Carries llama-server's connections to ``127.0.0.1:port`` over one WebSocket to the agent.

    One connection is carried at a time; a further one waits until the first has ended, as it would
    in the rpc-server's own accept queue. When the link is lost all local connections and the port
    end at once and ``wait_lost`` tells why; a tunnel is not opened again, since the rpc-server has
    dropped the client's buffers with the connection.
    """

    def __init__(self, session: BridgeSession, listener: Listener) -> None:
        self._session = session
        self._listener = listener
        self._ending = asyncio.create_task(self._close_when_lost())

    @classmethod
    async def open(cls, client: NodeClient, server_id: ServerId) -> Self:
        """Bridge to the server and listen on a free loopback port.

        Raises:
            NodeError: the node cannot be reached, or refuses the bridge.
        """
        listener = Listener()
        listener.session = BridgeSession(await client.open_bridge(server_id))
        await listener.open()
        return cls(listener.session, listener)

    @property
    def port(self) -> int:
        """The loopback port."""
        return self._listener.port

    @property
    def endpoint(self) -> str:
        """What to give to ``llama-server --rpc``."""
        return f"{HOST}:{self.port}"

    @property
    def sent_bytes(self) -> int:
        """Bytes carried to the node so far."""
        return self._session.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes carried from the node so far."""
        return self._session.received_bytes

    @property
    def lost_reason(self) -> str | None:
        """Why the link was lost, in words; ``None`` while it holds or after ``aclose``."""
        return self._session.lost_reason

    async def wait_lost(self) -> str:
        """Wait until the link is lost, and say why.

        Raises:
            asyncio.CancelledError: the tunnel was closed on purpose.
        """
        return await self._session.wait_lost()

    async def aclose(self) -> None:
        """End the local connections, the port and the link; also fine when it is closed already."""
        self._listener.close()
        await self._session.aclose()
        self._ending.cancel()
        await asyncio.gather(self._ending, return_exceptions=True)

    async def _close_when_lost(self) -> None:
        await self._session.wait_lost()
        self._listener.close()
