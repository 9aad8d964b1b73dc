"""WebSocket frames (RFC 6455, section 5) as a server reads and writes them. Pure.

Payload is handed out unmasked in pieces as it comes, however long its frame is; what of a frame is
less than ``MIN_PIECE_BYTES`` comes whole. So do control frames and text, which are short: the
only text of a relay is ``fin``.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from linkcpp.registry.relay import RelayCloseCode

try:
    from websockets.speedups import apply_mask
except ImportError:  # a platform for which websockets has no compiled part
    from websockets.utils import apply_mask

PROTOCOL_ERROR: Final = 1002
MAX_SHORT_BYTES: Final = 125
# Of a frame that is not whole less than this waits for more: clients bound how many fragments a
# message may come in (``websockets``: 4,096), and of a record nobody can use a part.
MIN_PIECE_BYTES: Final = 64 * 1024
MAX_REST_BYTES: Final = MIN_PIECE_BYTES
_FINAL: Final = 0x80
_RESERVED: Final = 0x70
_MASKED: Final = 0x80
_SIXTEEN_BITS: Final = 126
_SIXTY_FOUR_BITS: Final = 127
_SHORT: Final = struct.Struct("!4s")
_MEDIUM: Final = struct.Struct("!H4s")
_LONG: Final = struct.Struct("!Q4s")
_MEDIUM_OUT: Final = struct.Struct("!BBH")
_LONG_OUT: Final = struct.Struct("!BBQ")


class Opcode(IntEnum):
    """What a frame is."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


_CONTROL: Final = frozenset((Opcode.CLOSE, Opcode.PING, Opcode.PONG))
_DATA: Final = frozenset((int(Opcode.CONTINUATION), int(Opcode.BINARY)))
_BINARY: Final = int(Opcode.BINARY)


class FrameError(Exception):
    """The peer broke the rules of WebSockets or of the relay: what goes into the close frame."""

    def __init__(self, reason: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = int(code)


class Piece(NamedTuple):
    """Payload, unmasked: of a message, or of a whole short frame.

    ``opcode`` is ``BINARY`` for every piece of a message; ``begins`` and ``ends`` tell whether the
    message begins and ends with it.
    """

    opcode: int
    payload: bytes
    begins: bool
    ends: bool


class FrameHead(NamedTuple):
    """A frame's head."""

    opcode: int
    is_final: bool
    payload_bytes: int
    key: bytes
    head_bytes: int


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
    if second < _MASKED:
        raise FrameError("the frame is not masked")
    size = second - _MASKED
    head_bytes = 8 if size == _SIXTEEN_BITS else 14 if size == _SIXTY_FOUR_BITS else 6
    if end - start < head_bytes:
        return None
    if head_bytes == 6:
        (key,) = _SHORT.unpack_from(data, start + 2)
    elif head_bytes == 8:
        size, key = _MEDIUM.unpack_from(data, start + 2)
        _require(size >= _SIXTEEN_BITS, "the length is not in its shortest form")
    else:
        size, key = _LONG.unpack_from(data, start + 2)
        _require(size >> 16 != 0, "the length is not in its shortest form")
        _require(size >> 63 == 0, "the length has its highest bit set")
    return FrameHead(first & 0x0F, first >= _FINAL, size, key, head_bytes)


def build_head(opcode: int, payload_bytes: int, *, is_final: bool = True) -> bytes:
    """Write the head of a server's frame."""
    first = opcode | _FINAL if is_final else opcode
    if payload_bytes < _SIXTEEN_BITS:
        return bytes((first, payload_bytes))
    if payload_bytes < 1 << 16:
        return _MEDIUM_OUT.pack(first, _SIXTEEN_BITS, payload_bytes)
    return _LONG_OUT.pack(first, _SIXTY_FOUR_BITS, payload_bytes)


def short_frame(opcode: Opcode, payload: bytes) -> bytes:
    """Write a whole frame of at most 125 bytes."""
    return build_head(opcode, len(payload)) + payload


def close_frame(code: int, reason: str) -> bytes:
    """Write a close frame; a long reason is cut."""
    text = reason.encode()[: MAX_SHORT_BYTES - 2].decode(errors="ignore")
    return short_frame(Opcode.CLOSE, struct.pack("!H", code) + text.encode())


def parse_close(payload: bytes) -> int:
    """Return the code of a close frame, 1005 where it has none.

    Raises:
        FrameError: one byte, a code that may not be sent, or a reason that is not UTF-8.
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
        raise FrameError("the close reason is not UTF-8", 1007) from None
    return int(code)


class FrameReader:
    """Reads the frames of one client, in whatever portions they come."""

    def __init__(self) -> None:
        self._key = b""
        self._left_bytes = 0  # of the payload of a frame that has begun
        self._is_final = True
        self._is_inside_message = False
        self._begins = False
        self.taken = 0

    def read(self, data: memoryview, start: int, end: int) -> Iterator[Piece]:
        """Hand out what is at ``start`` to ``end``, in order.

        Afterwards ``taken`` is where a rest of at most ``MAX_REST_BYTES`` begins, which has to
        stand before the next portion.

        Raises:
            FrameError: the client broke a rule; the connection must end.
        """
        self.taken = start
        while True:
            if self._left_bytes:
                if end - self.taken < min(self._left_bytes, MIN_PIECE_BYTES):
                    return
                yield self._take(data, end)
                continue
            head = parse_head(data, self.taken, end)
            if head is None:
                return
            opcode, is_final, payload_bytes, key, head_bytes = head
            if opcode not in _DATA:
                piece = self._take_short(head, data, end)
                if piece is None:
                    return
                yield piece
                continue
            begins = opcode == _BINARY
            self._check_turn(begins=begins)
            first = self.taken + head_bytes
            beyond = first + payload_bytes
            if beyond <= end:  # whole, as most frames are
                self.taken = beyond
                self._is_inside_message = not is_final
                yield Piece(_BINARY, apply_mask(data[first:beyond], key), begins, is_final)
            else:
                self.taken = first
                self._begin(head, begins=begins)

    def _check_turn(self, *, begins: bool) -> None:
        if begins == self._is_inside_message:
            raise FrameError(
                "a message inside another one" if begins else "a continuation of no message"
            )

    def _begin(self, head: FrameHead, *, begins: bool) -> None:
        self._is_inside_message = True
        self._begins = begins
        self._is_final = head.is_final
        self._key = head.key
        self._left_bytes = head.payload_bytes

    def _take(self, data: memoryview, end: int) -> Piece:
        start = self.taken
        stop = min(end, start + self._left_bytes)
        payload = apply_mask(data[start:stop], self._key)
        self.taken = stop
        self._left_bytes -= stop - start
        if self._left_bytes:
            turn = (stop - start) % 4
            self._key = self._key[turn:] + self._key[:turn]
            ends = False
        else:
            ends = self._is_final
            self._is_inside_message = not ends
        piece = Piece(_BINARY, payload, self._begins, ends)
        self._begins = False
        return piece

    def _take_short(self, head: FrameHead, data: memoryview, end: int) -> Piece | None:
        if head.opcode == Opcode.TEXT:
            is_short = head.is_final and head.payload_bytes <= MAX_SHORT_BYTES
            if self._is_inside_message or not is_short:
                raise FrameError("text that is not `fin`", RelayCloseCode.MALFORMED)
        else:
            _require(head.opcode in _CONTROL, "an unknown opcode")
            _require(head.is_final, "a control frame in pieces")
            _require(head.payload_bytes <= MAX_SHORT_BYTES, "a control frame over 125 bytes")
        start = self.taken + head.head_bytes
        stop = start + head.payload_bytes
        if stop > end:
            return None
        self.taken = stop
        return Piece(head.opcode, apply_mask(data[start:stop], head.key), begins=True, ends=True)


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise FrameError(reason)
