"""The coordinator's end of a bridge: a loopback port that stands for a node's rpc-server."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from linkcpp.cluster.text import printable
from linkcpp.node.client import NodeClient
from linkcpp.node.link import CHUNK_BYTES, Link, LinkError, tune_transport
from linkcpp.node.records import ServerId

_HOST = "127.0.0.1"
_MAX_WAITING = 64


class Tunnel:
    """Carries llama-server's connections to ``127.0.0.1:port`` over one WebSocket to the agent.

    One connection is carried at a time; a further one waits until the first has ended, as it would
    in the rpc-server's own accept queue. When the link is lost all local connections end at once
    and ``wait_lost`` tells why; a tunnel is not opened again, since the rpc-server has dropped the
    client's buffers with the connection.
    """

    def __init__(self, websocket: ClientConnection) -> None:
        self._websocket = websocket
        self._link = Link(websocket.send)
        self._turn = asyncio.Lock()
        self._local: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._listener: asyncio.Server | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._is_closing = False
        self.port = 0

    @classmethod
    async def open(cls, client: NodeClient, server_id: ServerId) -> Self:
        """Bridge to the server and listen on a free loopback port.

        Raises:
            NodeError: the node cannot be reached, or refuses the bridge.
        """
        tunnel = cls(await client.open_bridge(server_id))
        tunnel._listener = await asyncio.start_server(
            tunnel._accept, _HOST, 0, limit=CHUNK_BYTES, backlog=_MAX_WAITING
        )
        tunnel.port = tunnel._listener.sockets[0].getsockname()[1]
        tunnel._receiver = asyncio.create_task(tunnel._receive())
        return tunnel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def endpoint(self) -> str:
        """What to give to ``llama-server --rpc``."""
        return f"{_HOST}:{self.port}"

    @property
    def sent_bytes(self) -> int:
        """Bytes carried to the node so far."""
        return self._link.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes carried from the node so far."""
        return self._link.received_bytes

    @property
    def lost_reason(self) -> str | None:
        """Why the link was lost, in words; ``None`` while it holds or after ``aclose``."""
        return self._lost.result() if self._lost.done() and not self._lost.cancelled() else None

    async def wait_lost(self) -> str:
        """Wait until the link is lost, and say why.

        Raises:
            asyncio.CancelledError: the tunnel was closed on purpose.
        """
        return await asyncio.shield(self._lost)

    async def aclose(self) -> None:
        """End the local connections, the port and the link; also fine when it is closed already."""
        self._is_closing = True
        self._end_local()
        await self._websocket.close()
        if self._receiver is not None:
            await asyncio.gather(self._receiver, return_exceptions=True)
        if self._local:
            await asyncio.gather(*self._local, return_exceptions=True)
        if not self._lost.done():
            self._lost.cancel()

    async def _receive(self) -> None:
        reason = "the link ended"
        try:
            async for message in self._websocket:
                await self._link.feed(message)
            reason = self._describe_close()
        except ConnectionClosed:
            reason = self._describe_close()
        except LinkError as error:
            reason = f"the node broke the bridge's protocol: {error.reason}"
            self._lose(reason)
            await self._websocket.close(error.code, error.reason)
        finally:
            self._lose(reason)

    def _describe_close(self) -> str:
        received = self._websocket.protocol.close_rcvd
        if received is not None and received.reason:
            return printable(received.reason, 200)
        sent = self._websocket.protocol.close_sent
        if sent is not None and "ping timeout" in sent.reason:
            return "the node did not answer any more"
        if received is not None:
            return f"the node closed the link (code {received.code})"
        return "the connection to the node broke"

    def _lose(self, reason: str) -> None:
        if not self._lost.done() and not self._is_closing:
            self._lost.set_result(reason)
        self._end_local()

    def _end_local(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for task in self._local:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._local) >= _MAX_WAITING or not self._listener_is_open():
            writer.transport.abort()
            return
        self._local.add(task)
        tune_transport(writer.transport)
        try:
            async with self._turn:
                await self._link.open()
                await self._link.carry(reader, writer, awaits_peer=False)
        except LinkError as error:
            await self._websocket.close(error.code, error.reason)
            self._lose(f"the node broke the bridge's protocol: {error.reason}")
        except (ConnectionClosed, asyncio.CancelledError):
            # The receiver tells why; this connection only has to end.
            pass
        finally:
            self._local.discard(task)
            writer.transport.abort()
            with contextlib.suppress(Exception):
                await writer.wait_closed()

    def _listener_is_open(self) -> bool:
        return self._listener is not None and self._listener.is_serving()
