"""One side of an edge at the gateway: a WebSocket from its upgrade to its end.

What arrives is unmasked and written to the other side before the next read, so that there is
nothing of a message to keep. Where the other side's transport takes no more, this side is not
read until it does.
"""

import asyncio
from enum import Enum, auto
from typing import Final, Protocol

from linkcpp.common.sockets import tune_transport
from linkcpp.gateway.frames import (
    MAX_REST_BYTES,
    FrameError,
    FrameReader,
    Opcode,
    build_head,
    close_frame,
    parse_close,
    short_frame,
)
from linkcpp.gateway.liveness import Liveness
from linkcpp.registry.relay import (
    FIN,
    HELLO_DEADLINE_SECONDS,
    MAX_HELLO_BYTES,
    PAIRED,
    PAIRING_SECONDS,
    Hello,
    RelayCloseCode,
    decode_hello,
)

NORMAL_CLOSE: Final = 1000
PING_SECONDS = 30.0
CLOSING_SECONDS = 5.0
BROKEN_CLOSING_SECONDS = 0.5
# What a side's transport may hold before the other side is not read any more; one read goes into it
# and passes, also where the event loop writes only after all reads.
WRITE_LIMIT_BYTES: Final = 384 * 1024

# Numbers and not members of an enumeration, which take longer to get in the loop over frames.
_BINARY: Final = int(Opcode.BINARY)
_CONTINUATION: Final = int(Opcode.CONTINUATION)
_PAIRED_FRAME: Final = short_frame(Opcode.BINARY, PAIRED)
_FIN_FRAME: Final = short_frame(Opcode.TEXT, FIN.encode())


class ConnectionOwner(Protocol):
    """What a connection needs of the relay that it belongs to."""

    @property
    def buffer(self) -> memoryview:
        """Where reads go, behind ``MAX_REST_BYTES`` of room; the same for all connections."""

    def said_hello(self, connection: "RelayConnection", hello: Hello) -> None:
        """Take a side that told who it is."""

    def ended(self, connection: "RelayConnection", code: int, reason: str) -> None:
        """Hear that a connection takes part no more; ``code`` is for its partner."""

    def closes(self, code: int) -> None:
        """Hear that a connection is closed from here."""

    def lost(self, connection: "RelayConnection") -> None:
        """Hear that a connection's socket is closed."""


class _Phase(Enum):
    HELLO = auto()
    WAITING = auto()
    PAIRED = auto()
    CLOSING = auto()


class RelayConnection(asyncio.BufferedProtocol):
    """The protocol of a socket whose upgrade is answered already.

    The event loop must ask for the buffer only when there is something to read into it, as all
    loops do that wait for readiness: one buffer serves all connections.
    """

    _transport: asyncio.Transport

    def __init__(self, owner: ConnectionOwner) -> None:
        self.received_bytes = 0
        self._sent_bytes = 0
        self._owner = owner
        self._reader = FrameReader()
        self._phase = _Phase.HELLO
        self._partner: RelayConnection | None = None
        self._rest = b""
        self._hello = bytearray()
        self._has_finished = False
        self._is_broken = False  # after a wrong frame nobody knows where the next one begins
        self._is_full = False
        self._is_held = False
        self._liveness = Liveness()
        self._deadline: asyncio.TimerHandle | None = None
        self._ticking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first message."""
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_LIMIT_BYTES, low=0)
        tune_transport(transport)
        self._set_deadline(
            HELLO_DEADLINE_SECONDS, RelayCloseCode.HELLO_TIMEOUT, "no hello came in time"
        )
        self._ticking = asyncio.get_running_loop().call_later(PING_SECONDS, self._tick)

    # What the relay tells it.

    def wait(self) -> None:
        """Begin to wait for the other side."""
        self._phase = _Phase.WAITING
        self._set_deadline(PAIRING_SECONDS, RelayCloseCode.NO_PEER, "the other side did not come")

    def pair(self, partner: "RelayConnection") -> None:
        """Begin to relay; the partner is told separately."""
        self._partner = partner
        self._phase = _Phase.PAIRED
        self._stop_deadline()
        self._write(_PAIRED_FRAME)
        if partner._is_full:
            self.hold()

    def close(self, code: int, reason: str) -> None:
        """Say why, and close; the peer has a moment to take what is under way to it."""
        if self._phase is _Phase.CLOSING:
            return
        self._write(close_frame(code, reason))
        self._begin_closing()
        self._owner.closes(code)
        self._owner.ended(self, RelayCloseCode.PEER_GONE, "the other side was closed")

    def drop(self) -> None:
        """End at once, without a word."""
        self._transport.abort()

    # What the event loop tells it.

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where to read to."""
        return self._owner.buffer[MAX_REST_BYTES:]

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        if self._is_broken:
            return
        buffer = self._owner.buffer
        start, end = MAX_REST_BYTES - len(self._rest), MAX_REST_BYTES + nbytes
        buffer[start:MAX_REST_BYTES] = self._rest
        self._liveness.was_heard = True
        self.received_bytes += nbytes
        try:
            if self._phase is _Phase.PAIRED:
                self._relay(buffer, start, end)
            else:
                self._listen(buffer, start, end)
        except FrameError as error:
            self._is_broken = True
            self.close(error.code, error.reason)
        if not self._is_broken and not self._transport.is_closing():
            self._rest = bytes(buffer[self._reader.taken : end])

    def eof_received(self) -> None:
        """Take the end of the peer's half of the socket for the end of all; the loop closes it."""
        if self._phase is not _Phase.CLOSING:
            self._begin_closing()
            self._owner.ended(
                self, RelayCloseCode.PEER_GONE, "the other side's connection was lost"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave."""
        self._phase = _Phase.CLOSING
        self._stop_deadline()
        self._stop_ticking()
        self._partner = None
        self._owner.ended(self, RelayCloseCode.PEER_GONE, "the other side's connection was lost")
        self._owner.lost(self)

    def pause_writing(self) -> None:
        """Let the other side wait until the peer has taken more."""
        self._is_full = True
        if self._partner is not None:
            self._partner.hold()

    def resume_writing(self) -> None:
        """Go on."""
        self._is_full = False
        if self._partner is not None:
            self._partner.release()

    def hold(self) -> None:
        """Read no more for now."""
        self._is_held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """Read on."""
        self._is_held = False
        self._transport.resume_reading()

    # Frames.

    def _relay(self, buffer: memoryview, start: int, end: int) -> None:
        outgoing: list[bytes] = []
        close: bytes | None = None
        try:
            for opcode, payload, begins, ends in self._reader.read(buffer, start, end):
                if opcode == _BINARY:
                    if self._has_finished:
                        raise FrameError("data after `fin`", RelayCloseCode.MALFORMED)
                    outgoing.append(
                        build_head(
                            _BINARY if begins else _CONTINUATION, len(payload), is_final=ends
                        )
                    )
                    outgoing.append(payload)
                elif opcode == Opcode.TEXT:
                    self._finish(payload)
                    outgoing.append(_FIN_FRAME)
                elif opcode == Opcode.CLOSE:
                    close = payload
                    break
                else:
                    self._answer(opcode, payload)
        finally:
            if outgoing and self._partner is not None:
                self._partner._write(b"".join(outgoing))
        if close is not None:
            self._answer_close(close)
        elif self._has_finished and self._partner is not None and self._partner._has_finished:
            self._owner.ended(self, NORMAL_CLOSE, "both sides have finished")
            self.close(NORMAL_CLOSE, "both sides have finished")

    def _listen(self, buffer: memoryview, start: int, end: int) -> None:
        for opcode, payload, _, ends in self._reader.read(buffer, start, end):
            if opcode == Opcode.CLOSE:
                self._answer_close(payload)
                return
            if self._phase is _Phase.CLOSING:
                continue
            if opcode in (Opcode.PING, Opcode.PONG):
                self._answer(opcode, payload)
            elif opcode == Opcode.BINARY and self._phase is _Phase.HELLO:
                self._read_hello(payload, is_whole=ends)
            else:
                raise FrameError("data before the sides are paired", RelayCloseCode.MALFORMED)

    def _read_hello(self, payload: bytes, *, is_whole: bool) -> None:
        self._hello += payload
        if len(self._hello) > MAX_HELLO_BYTES:
            raise FrameError("the first message is too long", RelayCloseCode.MALFORMED)
        if not is_whole:
            return
        try:
            hello = decode_hello(bytes(self._hello))
        except ValueError as error:
            raise FrameError(str(error), RelayCloseCode.MALFORMED) from None
        finally:
            self._hello.clear()
        self._owner.said_hello(self, hello)

    def _finish(self, text: bytes) -> None:
        if text != FIN.encode() or self._has_finished:
            raise FrameError("text that is not one `fin`", RelayCloseCode.MALFORMED)
        self._has_finished = True

    def _answer(self, opcode: int, payload: bytes) -> None:
        # A peer that pings and does not read gets no more answers than its transport may hold.
        if opcode == Opcode.PING and not self._is_full:
            self._write(short_frame(Opcode.PONG, payload))

    def _answer_close(self, payload: bytes) -> None:
        code = parse_close(payload)
        if self._phase is not _Phase.CLOSING:
            self._write(close_frame(NORMAL_CLOSE, ""))
            self._begin_closing()
            is_wanted = code == NORMAL_CLOSE
            self._owner.ended(
                self,
                NORMAL_CLOSE if is_wanted else RelayCloseCode.PEER_GONE,
                f"the other side closed with code {code}",
            )
        self._transport.close()

    def _write(self, data: bytes) -> None:
        self._sent_bytes += len(data)
        self._transport.write(data)

    # Time and the end.

    def _tick(self) -> None:
        """Ping, or close where the peer did not answer the last ping."""
        is_alive = self._liveness.look(
            is_held=self._is_held,
            sent_bytes=self._sent_bytes,
            backlog_bytes=self._transport.get_write_buffer_size(),
        )
        if not is_alive:
            self.close(RelayCloseCode.STALLED, "nothing was heard since the last ping")
            return
        if not self._is_full:
            self._write(short_frame(Opcode.PING, b""))
        self._ticking = asyncio.get_running_loop().call_later(PING_SECONDS, self._tick)

    def _begin_closing(self) -> None:
        self._phase = _Phase.CLOSING
        self._partner = None
        self._stop_ticking()
        self._stop_deadline()
        self._give_up_later()
        self.release()  # to read the peer's close frame

    def _give_up_later(self) -> None:
        backlog = self._transport.get_write_buffer_size()
        # After a wrong frame the peer's close frame would not be recognized.
        seconds = BROKEN_CLOSING_SECONDS if self._is_broken else CLOSING_SECONDS
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self._give_up, backlog)

    def _give_up(self, backlog_before: int) -> None:
        # A slow peer gets what its partner had sent before it closed.
        if 0 < self._transport.get_write_buffer_size() < backlog_before:
            self._give_up_later()
        else:
            self._transport.abort()

    def _set_deadline(self, seconds: float, code: int, reason: str) -> None:
        self._stop_deadline()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(seconds, self.close, code, reason)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
