"""The coordinator's end of a bridge: one WebSocket, from its opening to its loss."""

import asyncio
import contextlib

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from linkcpp.common.text import printable
from linkcpp.node.link import Link, LinkError


class BridgeSession:
    """Carries local connections over one WebSocket, one at a time; further ones wait their turn.

    When the link is lost all local connections end at once and ``wait_lost`` tells why. Needs a
    running event loop.
    """

    def __init__(self, websocket: ClientConnection) -> None:
        self._websocket = websocket
        self._link = Link(websocket.send)
        self._turn = asyncio.Lock()
        self._local: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_closing = False
        self._receiver = asyncio.create_task(self._receive())

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

    @property
    def connection_count(self) -> int:
        """Local connections, those that wait included."""
        return len(self._local)

    async def wait_lost(self) -> str:
        """Wait until the link is lost, and say why.

        Raises:
            asyncio.CancelledError: the session was closed on purpose.
        """
        return await asyncio.shield(self._lost)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one local connection to its end; for a task of its own."""
        task = asyncio.current_task()
        if task is None or self._is_closing or self._lost.done():
            writer.transport.abort()
            return
        self._local.add(task)
        try:
            async with self._turn:
                await self._link.open()
                await self._link.carry(reader, writer, awaits_peer=False)
        except LinkError as error:
            await self._break(error)
        except (ConnectionClosed, asyncio.CancelledError):
            # The receiver tells why; this connection only has to end.
            pass
        finally:
            self._local.discard(task)
            writer.transport.abort()
            with contextlib.suppress(Exception):
                await writer.wait_closed()

    async def aclose(self) -> None:
        """End the local connections and the link; also fine when it is closed already."""
        self._is_closing = True
        self._end_local()
        await self._websocket.close()
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
            await self._break(error)
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

    async def _break(self, error: LinkError) -> None:
        self._lose(f"the node broke the bridge's protocol: {error.reason}")
        await self._websocket.close(error.code, error.reason)

    def _lose(self, reason: str) -> None:
        if not self._lost.done() and not self._is_closing:
            self._lost.set_result(reason)
        self._end_local()

    def _end_local(self) -> None:
        current = asyncio.current_task()
        for task in self._local:
            if task is not current:
                task.cancel()
