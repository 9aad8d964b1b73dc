"""The agent's end of a bridge: an authenticated WebSocket in front of a loopback port."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from linkcpp.common.errors import LinkcppError
from linkcpp.common.sockets import tune_transport
from linkcpp.engine.guard import LinkGuard, MemoryAccount
from linkcpp.node.link import CHUNK_BYTES, Link, LinkError
from linkcpp.node.records import BridgeCloseCode

_CONNECT_SECONDS = 10.0
# RFC 6455, section 5.5.1: what a close frame can hold besides its code.
_MAX_REASON_BYTES = 123

_log = logging.getLogger(__name__)


class Bridge:
    """One client's use of a program of this node, from the WebSocket's opening to its end.

    ``what`` names the program for people. With an ``account`` it is an rpc-server, and every
    connection that the client opens gets a guard of its own, which may cut tensors into pieces of
    ``piece_bytes``; without one, bytes are passed on as they are. Whatever goes wrong ends this
    WebSocket with a close code and a reason in words, and touches nothing else.
    """

    def __init__(
        self,
        websocket: WebSocket,
        what: str,
        port: int,
        *,
        account: MemoryAccount | None = None,
        piece_bytes: int | None = None,
    ) -> None:
        self._websocket = websocket
        self._what = what
        self._port = port
        self._account = account
        self._piece_bytes = piece_bytes
        # Not by a method of its own: what the link holds must go as soon as the bridge does.
        self._link = Link(functools.partial(_send, websocket))
        self._end: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
        self._guard: LinkGuard | None = None

    @property
    def is_owed(self) -> bool:
        """Whether the client waits for an answer of an rpc-server."""
        return self._guard is not None and self._guard.is_owed

    def end(self, code: BridgeCloseCode, reason: str) -> None:
        """Have the bridge end from outside, because its server stopped or failed."""
        if not self._end.done():
            self._end.set_result(LinkError(reason, code))

    async def run(self) -> str:
        """Serve the WebSocket until either side ends it; return why, in words."""
        await self._websocket.accept()
        receiver = asyncio.create_task(self._receive())
        server = asyncio.create_task(self._serve())
        try:
            waits: set[asyncio.Future[Any]] = {receiver, server, self._end}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (receiver, server):
                task.cancel()
            results = await asyncio.gather(receiver, server, return_exceptions=True)
        reason = self._verdict(results)
        if reason is None:
            return "the client closed it"
        await self._close(reason)
        return reason.reason

    def _verdict(self, results: Iterable[object]) -> LinkError | None:
        """Choose what to tell the client; ``None`` where it has left by itself."""
        if self._end.done():
            return self._end.result()
        for result in results:
            if isinstance(result, LinkError):
                return result
            if isinstance(result, LinkcppError):
                return LinkError(str(result), BridgeCloseCode.REFUSED)
        left = OSError | RuntimeError | WebSocketDisconnect
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, left):
                _log.error("a bridge ended by a defect", exc_info=result)
                return LinkError("the node agent met a defect of its own", 1011)
        return None

    async def _receive(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes")
            await self._link.feed(data if data is not None else message["text"])

    async def _serve(self) -> None:
        while True:
            await self._link.wait_for_open()
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", self._port, limit=CHUNK_BYTES
                    )
            except (OSError, TimeoutError):
                raise LinkError(
                    f"the {self._what} takes no connection", BridgeCloseCode.SERVER_FAILED
                ) from None
            tune_transport(writer.transport)
            if self._account is None:
                await self._link.carry(reader, writer, awaits_peer=True)
                continue
            guard = self._guard = LinkGuard(self._account, piece_bytes=self._piece_bytes)
            try:
                await self._link.carry(reader, writer, guard=guard, awaits_peer=True)
            finally:
                self._guard = None
                guard.close()

    async def _close(self, error: LinkError) -> None:
        if self._websocket.client_state is not WebSocketState.CONNECTED:
            return
        reason = error.reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
        with contextlib.suppress(RuntimeError, OSError, WebSocketDisconnect):
            await self._websocket.close(error.code, reason)


async def _send(websocket: WebSocket, message: str | bytes) -> None:
    if isinstance(message, bytes):
        await websocket.send({"type": "websocket.send", "bytes": message})
    else:
        await websocket.send({"type": "websocket.send", "text": message})
