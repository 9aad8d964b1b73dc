"""WebSocket frames (RFC 6455, section 5) as a server reads and writes them. Pure.

Payload is handed out in pieces as it comes, unmasked, however long its frame is. Control frames and
text come whole: they are short, since the only text of a relay is ``fin``.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from linkcpp.gateway.masking import ReadBuffer
from linkcpp.registry.relay import RelayCloseCode

PROTOCOL_ERROR: Final = 1002
_LONGEST_SHORT_BYTES: Final = 125
_FINAL: Final = 0x80
_RESERVED: Final = 0x70
_MASKED: Final = 0x80
_SIXTEEN_BITS: Final = 126
_SIXTY_FOUR_BITS: Final = 127


class Opcode(IntEnum):
    """What a frame is."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


_CONTROL: Final = frozenset((Opcode.CLOSE, Opcode.PING, Opcode.PONG))


class FrameError(Exception):
    """The peer broke the rules of WebSockets or of the relay: what goes into the close frame."""

    def __init__(self, reason: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = int(code)


class FrameHead(NamedTuple):
    """A frame's head; ``key`` is the mask, its first byte the lowest."""

    opcode: int
    is_final: bool
    payload_bytes: int
    key: int
    head_bytes: int


class Piece(NamedTuple):
    """Payload at ``start`` to ``end`` of a buffer: of a message, or a whole short frame.

    ``opcode`` is ``BINARY`` for every piece of a message; ``begins`` and ``ends`` tell whether the
    message begins and ends with it.
    """

    opcode: int
    start: int
    end: int
    begins: bool
    ends: bool


def parse_head(data: memoryview, start: int, end: int) -> FrameHead | None:
    """Read the head of a client's frame, ``None`` while a part of it is missing.

    Raises:
        FrameError: it is not masked, or no head that RFC 6455 allows.
    """
    if end - start < 2:
        return None
    first, second = data[start], data[start + 1]
    if first & _RESERVED:
        raise FrameError("reserved bits are set, and no extension was agreed on")
    if not second & _MASKED:
        raise FrameError("the frame is not masked")
    size, at = second & 0x7F, start + 2
    key_at = at + (2 if size == _SIXTEEN_BITS else 8 if size == _SIXTY_FOUR_BITS else 0)
    if end < key_at + 4:
        return None
    if size == _SIXTEEN_BITS:
        (size,) = struct.unpack_from("!H", data, at)
        _require(size >= _SIXTEEN_BITS, "the length is not in its shortest form")
    elif size == _SIXTY_FOUR_BITS:
        (size,) = struct.unpack_from("!Q", data, at)
        _require(size >> 16 != 0, "the length is not in its shortest form")
        _require(size >> 63 == 0, "the length has its highest bit set")
    (key,) = struct.unpack_from("<I", data, key_at)
    return FrameHead(first & 0x0F, first >= _FINAL, size, key, key_at + 4 - start)


def build_head(opcode: int, payload_bytes: int, *, is_final: bool = True) -> bytes:
    """Write the head of a server's frame."""
    first = opcode | (_FINAL if is_final else 0)
    if payload_bytes < _SIXTEEN_BITS:
        return bytes((first, payload_bytes))
    if payload_bytes < 1 << 16:
        return struct.pack("!BBH", first, _SIXTEEN_BITS, payload_bytes)
    return struct.pack("!BBQ", first, _SIXTY_FOUR_BITS, payload_bytes)


def short_frame(opcode: Opcode, payload: bytes) -> bytes:
    """Write a whole frame of at most 125 bytes."""
    return build_head(opcode, len(payload)) + payload


def close_frame(code: int, reason: str) -> bytes:
    """Write a close frame; a long reason is cut."""
    text = reason.encode()[: _LONGEST_SHORT_BYTES - 2].decode(errors="ignore")
    return short_frame(Opcode.CLOSE, struct.pack("!H", code) + text.encode())


def parse_close(payload: bytes) -> int:
    """Return the code of a close frame, 1005 where it has none.

    Raises:
        FrameError: one byte, a code that may not be sent, or a reason that is no UTF-8.
    """
    if not payload:
        return 1005
    _require(len(payload) >= 2, "half a close code")
    (code,) = struct.unpack_from("!H", payload)
    _require(
        1000 <= code < 5000 and code not in {1004, 1005, 1006} and not 1015 <= code < 3000,
        "a close code that may not be sent",
    )
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        raise FrameError("the close reason is no UTF-8", 1007) from None
    return int(code)


class FrameReader:
    """Reads the frames of one client, in whatever portions they come."""

    def __init__(self) -> None:
        self._key = 0
        self._left_bytes = 0  # of the payload of a frame that has begun
        self._done_bytes = 0
        self._is_final = True
        self._is_inside_message = False
        self._is_first_piece = False
        self.taken = 0

    def read(self, buffer: ReadBuffer, start: int, end: int) -> Iterator[Piece]:
        """Unmask what is at ``start`` to ``end`` of the buffer, and hand it out in order.

        Afterwards ``taken`` is where a rest of at most ``HEADROOM_BYTES`` begins, which has to
        stand before the next portion.

        Raises:
            FrameError: the client broke a rule; the connection must end.
        """
        self.taken = start
        while True:
            if self._left_bytes == 0:
                head = parse_head(buffer.view, self.taken, end)
                if head is None:
                    return
                if head.opcode not in (Opcode.BINARY, Opcode.CONTINUATION):
                    piece = self._take_short(head, buffer, end)
                    if piece is None:
                        return
                    yield piece
                    continue
                self._begin(head)
                self.taken += head.head_bytes
                if self.taken == end and head.payload_bytes:
                    return
            elif self.taken == end:
                return
            yield self._take(buffer, end)

    def _begin(self, head: FrameHead) -> None:
        continues = head.opcode == Opcode.CONTINUATION
        _require(not continues or self._is_inside_message, "a continuation of no message")
        _require(continues or not self._is_inside_message, "a message inside another one")
        self._is_inside_message = True
        self._is_first_piece = not continues
        self._is_final = head.is_final
        self._key = head.key
        self._left_bytes = head.payload_bytes
        self._done_bytes = 0

    def _take(self, buffer: ReadBuffer, end: int) -> Piece:
        start = self.taken
        stop = min(end, start + self._left_bytes)
        buffer.unmask(start, stop, self._key, self._done_bytes)
        self._done_bytes += stop - start
        self._left_bytes -= stop - start
        self.taken = stop
        ends = self._is_final and self._left_bytes == 0
        piece = Piece(Opcode.BINARY, start, stop, self._is_first_piece, ends)
        self._is_first_piece = False
        self._is_inside_message = not ends
        return piece

    def _take_short(self, head: FrameHead, buffer: ReadBuffer, end: int) -> Piece | None:
        if head.opcode == Opcode.TEXT:
            is_short = head.is_final and head.payload_bytes <= _LONGEST_SHORT_BYTES
            if self._is_inside_message or not is_short:
                raise FrameError("text that is not `fin`", RelayCloseCode.MALFORMED)
        else:
            _require(head.opcode in _CONTROL, "an unknown opcode")
            _require(head.is_final, "a control frame in pieces")
            _require(head.payload_bytes <= _LONGEST_SHORT_BYTES, "a control frame over 125 bytes")
        start = self.taken + head.head_bytes
        stop = start + head.payload_bytes
        if stop > end:
            return None
        buffer.unmask(start, stop, head.key, 0)
        self.taken = stop
        return Piece(head.opcode, start, stop, begins=True, ends=True)


def with_head(buffer: ReadBuffer, piece: Piece) -> memoryview:
    """Put the head of a server's frame before a piece of a message, and return both.

    It overwrites the client's own head, which is longer, or headroom.
    """
    opcode = Opcode.BINARY if piece.begins else Opcode.CONTINUATION
    head = build_head(opcode, piece.end - piece.start, is_final=piece.ends)
    start = piece.start - len(head)
    buffer.view[start : piece.start] = head
    return buffer.view[start : piece.end]


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise FrameError(reason)
