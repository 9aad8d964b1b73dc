"""Open events WebSockets: what the hub pushes to machines, and how it cuts them off."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from linkcpp.registry.edges import HubEvent, RevokedEvent
from linkcpp.registry.relay import RelayCloseCode

_MAX_QUEUED = 256
_SEND_SECONDS = 3.0


class _Listener:
    """One connection: a bounded queue, and the close code once it shall end."""

    def __init__(self) -> None:
        self.queue: deque[str] = deque()
        self.closing: tuple[int, str] | None = None
        self.wake = asyncio.Event()

    def push(self, text: str) -> None:
        if len(self.queue) >= _MAX_QUEUED:
            self.close(RelayCloseCode.STALLED, "it does not read what is pushed")
            return
        self.queue.append(text)
        self.wake.set()

    def close(self, code: RelayCloseCode, reason: str) -> None:
        self.closing = self.closing or (int(code), reason)
        self.wake.set()


class EventSockets:
    """All connections by machine; a newer one replaces an older one of the same machine."""

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}
        # Called with the id of a machine whose last connection has ended.
        self.on_end: Callable[[str], None] = lambda _: None

    @property
    def count(self) -> int:
        """How many machines listen."""
        return len(self._listeners)

    def push(self, node_id: str, event: HubEvent) -> None:
        """Tell a machine, if it listens."""
        if listener := self._listeners.get(node_id):
            listener.push(event.model_dump_json())

    def revoke(self, node_id: str) -> None:
        """Tell a machine that it is not wanted any more, and cut it off."""
        self.push(node_id, RevokedEvent())
        if listener := self._listeners.get(node_id):
            listener.close(RelayCloseCode.REVOKED, "this machine was revoked")

    def close_all(self) -> None:
        """End all connections: the hub stops. Machines come back by themselves."""
        for listener in self._listeners.values():
            listener.close(RelayCloseCode.STOPPING, "the hub is stopping")

    async def serve(self, websocket: WebSocket, node_id: str) -> None:
        """Push to one connection until it ends."""
        listener = _Listener()
        if earlier := self._listeners.get(node_id):
            earlier.close(RelayCloseCode.REPLACED, "a newer connection took its place")
        self._listeners[node_id] = listener
        reading = asyncio.create_task(_read_to_the_end(websocket))
        sending = asyncio.create_task(_send(websocket, listener))
        try:
            await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._listeners.get(node_id) is listener:
                del self._listeners[node_id]
                self.on_end(node_id)
            reading.cancel()
            sending.cancel()
            await asyncio.gather(reading, sending, return_exceptions=True)


async def _send(websocket: WebSocket, listener: _Listener) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
        while True:
            await listener.wake.wait()
            listener.wake.clear()
            async with asyncio.timeout(_SEND_SECONDS):
                while listener.queue:
                    await websocket.send_text(listener.queue.popleft())
                if listener.closing:
                    await websocket.close(*listener.closing)
                    return


async def _read_to_the_end(websocket: WebSocket) -> None:
    """Take in what a client sends, which means nothing, so that its close is seen."""
    message: Any = {}
    while message.get("type") != "websocket.disconnect":
        message = await websocket.receive()
