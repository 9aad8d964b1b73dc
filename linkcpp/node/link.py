"""One end of a bridge's WebSocket: short TCP connections carried inside it, one after the other.

Both ends run the same code: the agent's towards its rpc-server, the coordinator's tunnel towards
llama-server. ``docs/wire.md`` has the rules.

The receiving side always reads its WebSocket, so that pings are answered and a close is seen also
while the TCP side is busy (an rpc-server reads nothing while it computes a graph, which may take
minutes). What may pile up meanwhile is bounded by a window that the receiver acknowledges.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from linkcpp.engine.guard import LinkGuard
from linkcpp.engine.wire import Buffer
from linkcpp.node.records import (
    BRIDGE_ACK,
    BRIDGE_CLOSE,
    BRIDGE_OPEN,
    BRIDGE_WINDOW_BYTES,
    BridgeCloseCode,
)

# Smaller than what a receiver accepts: on a slow link a ping waits behind one message.
CHUNK_BYTES = 256 * 1024
_MAX_QUEUED_MESSAGES = 1024
_MAX_ACK_DIGITS = 19

Send = Callable[[str | bytes], Awaitable[None]]


class LinkError(Exception):
    """The peer broke the rules of the bridge: ``code`` and ``reason`` go into the close frame."""

    def __init__(self, reason: str, code: int = BridgeCloseCode.MALFORMED) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = int(code)


class SendWindow:
    """How far a sender is ahead of its peer's acknowledgements, in bytes."""

    def __init__(self, size_bytes: int = BRIDGE_WINDOW_BYTES) -> None:
        self._size = size_bytes
        self.sent_bytes = 0
        self.acknowledged_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether a further chunk may be sent."""
        # Twice: a guard may hold a few bytes back and add them to the next chunk.
        return self.sent_bytes - self.acknowledged_bytes + 2 * CHUNK_BYTES <= self._size

    def acknowledge(self, total_bytes: int) -> None:
        """Take the peer's word that it passed on ``total_bytes`` since the link began.

        Raises:
            LinkError: more than was sent, or less than it said before.
        """
        if not self.acknowledged_bytes <= total_bytes <= self.sent_bytes:
            raise LinkError(f"acknowledged {total_bytes} of {self.sent_bytes} bytes")
        self.acknowledged_bytes = total_bytes


class ReceiveWindow:
    """What was received and what of it was passed on, in bytes."""

    def __init__(self, size_bytes: int = BRIDGE_WINDOW_BYTES) -> None:
        self._size = size_bytes
        self._told = 0
        self.received_bytes = 0
        self.taken_bytes = 0

    def receive(self, size_bytes: int) -> None:
        """Count a message that came in.

        Raises:
            LinkError: the peer sent more than the window allows.
        """
        self.received_bytes += size_bytes
        if self.received_bytes - self.taken_bytes > self._size:
            raise LinkError(f"more than {self._size} bytes ahead of the acknowledgements")

    def take(self, size_bytes: int) -> None:
        """Count bytes that were passed on or dropped."""
        self.taken_bytes += size_bytes

    def due_acknowledgement(self) -> str | None:
        """Return the frame to send, or ``None`` while too little was taken since the last one."""
        if self.taken_bytes - self._told < self._size // 4:
            return None
        self._told = self.taken_bytes
        return f"{BRIDGE_ACK} {self.taken_bytes}"


class Link:
    """Carries TCP connections over one WebSocket.

    ``send`` writes one WebSocket message (text for ``str``); it must not write a part of one when
    it is cancelled. The owner feeds every message that it receives into ``feed``.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events: asyncio.Queue[str | bytes] = asyncio.Queue(_MAX_QUEUED_MESSAGES)
        self._outgoing = SendWindow()
        self._incoming = ReceiveWindow()
        self._room = asyncio.Event()
        self._sending = asyncio.Lock()
        self._unanswered_closes = 0

    @property
    def sent_bytes(self) -> int:
        """Payload bytes sent since the link began."""
        return self._outgoing.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Payload bytes received since the link began."""
        return self._incoming.received_bytes

    async def feed(self, message: str | bytes) -> None:
        """Take one message of the peer.

        Raises:
            LinkError: it is none of the protocol's, or breaks the window.
        """
        if isinstance(message, bytes):
            self._incoming.receive(len(message))
        elif message not in {BRIDGE_OPEN, BRIDGE_CLOSE}:
            self._outgoing.acknowledge(_parse_acknowledgement(message))
            self._room.set()
            return
        await self._events.put(message)

    async def wait_for_open(self) -> None:
        """Wait until the peer opens a connection (the agent's end).

        Raises:
            LinkError: it sent something else first.
        """
        event = await self._next_event()
        if event != BRIDGE_OPEN:
            raise LinkError("data or close without an open connection")

    async def open(self) -> None:
        """Open a connection towards the peer (the tunnel's end)."""
        await self._send(BRIDGE_OPEN)

    async def carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        guard: LinkGuard | None = None,
        awaits_peer: bool,
    ) -> None:
        """Carry one open connection until both sides have closed it.

        A ``guard`` sees the bytes of both directions, the peer as client and TCP as server, and
        decides what passes. With ``awaits_peer`` the peer's ``close`` is awaited before this
        returns; without, the next connection may be opened at once, and what still arrives of this
        one is dropped then.

        Raises:
            LinkError: the peer sent an ``open``.
            GuardError: the guard refused.
        """
        out = asyncio.create_task(self._pump_out(reader, guard))
        into = asyncio.create_task(self._pump_in(writer, guard))
        try:
            await asyncio.wait({out, into}, return_when=asyncio.FIRST_COMPLETED)
            if into.done():
                into.result()
                await _flush_and_close(writer)
                await out
            else:
                out.result()
                writer.transport.abort()
                if awaits_peer:
                    await into
                else:
                    self._unanswered_closes += 1
        finally:
            writer.transport.abort()
            out.cancel()
            into.cancel()
            await asyncio.gather(out, into, return_exceptions=True)

    async def _pump_out(self, reader: asyncio.StreamReader, guard: LinkGuard | None) -> None:
        # Ends by itself when the TCP side is closed, and is not cancelled before: a message that is
        # counted but never sent would shrink the window for good.
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                async with self._sending:
                    await self._send_bytes(guard.from_server(data).to_client if guard else (data,))
        await self._send(BRIDGE_CLOSE)

    async def _pump_in(self, writer: asyncio.StreamWriter, guard: LinkGuard | None) -> None:
        while (event := await self._next_event()) != BRIDGE_CLOSE:
            if not isinstance(event, bytes):
                raise LinkError("open while a connection is open")
            try:
                if not writer.is_closing():
                    await self._pass_on(event, writer, guard)
            except ConnectionError:
                # The TCP side is gone, which the other pump reports; what still comes is dropped.
                pass
            finally:
                self._incoming.take(len(event))
            await self._acknowledge()

    async def _pass_on(
        self, data: bytes, writer: asyncio.StreamWriter, guard: LinkGuard | None
    ) -> None:
        if guard is None:
            writer.write(data)
        else:
            flow = guard.from_client(data)
            writer.writelines(flow.to_server)
            if flow.to_client:
                # The guard's own answer; what the server answered before it is sent before it.
                async with self._sending:
                    await self._send_bytes(flow.to_client)
        await writer.drain()

    async def _send_bytes(self, parts: Sequence[Buffer]) -> None:
        message = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        if not message:
            return
        while not self._outgoing.has_room:
            self._room.clear()
            await self._room.wait()
        self._outgoing.sent_bytes += len(message)
        await self._send(message)

    async def _next_event(self) -> str | bytes:
        while True:
            event = await self._events.get()
            if not self._unanswered_closes:
                return event
            # Left over from a connection that this side has closed.
            if isinstance(event, bytes):
                self._incoming.take(len(event))
                await self._acknowledge()
            elif event == BRIDGE_CLOSE:
                self._unanswered_closes -= 1
            else:
                raise LinkError("open where a close was due")

    async def _acknowledge(self) -> None:
        if frame := self._incoming.due_acknowledgement():
            await self._send(frame)


def _parse_acknowledgement(message: str) -> int:
    word, _, number = message.partition(" ")
    if word != BRIDGE_ACK or not number.isascii() or not number.isdecimal():
        raise LinkError("unknown text frame")
    if len(number) > _MAX_ACK_DIGITS:
        raise LinkError("unknown text frame")
    return int(number)


async def _flush_and_close(writer: asyncio.StreamWriter) -> None:
    """Close the TCP side after what was written; the transport sends it before it closes."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
