"""Many byte streams in one session: windows, half-close, reset, and fair turns. Pure.

A stream names its target when it is opened, which costs no round trip. A sender may be one window
ahead of what the other end's reader has taken. Whoever just began to send comes before those who
send all the time, so that a small message waits for at most one chunk of a bulk transfer.
"""

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from linkcpp.link.records import (
    CHUNK_BYTES,
    MAX_REASON_BYTES,
    MAX_TARGET_BYTES,
    FrameType,
    LinkLimits,
    ResetCode,
)
from linkcpp.link.session import Frame, SessionError

_HEAD = struct.Struct("<BI")  # type, stream
_NUMBER = struct.Struct("<BII")  # type, stream, credit or code
_MAX_STREAM_ID = 2**32 - 1
# What a stream may have waiting to be sent; its writer then pauses.
_QUEUE_BYTES = 2 * CHUNK_BYTES
# Those who send all the time get a turn after this many of those who just began.
_FRESH_IN_A_ROW = 8


class Opened(NamedTuple):
    """The peer opened a stream to ``target``, a name that this end gives a meaning."""

    stream: int
    target: str


class Received(NamedTuple):
    """Bytes of a stream, in order; ``taken`` gives the peer room for more."""

    stream: int
    data: memoryview


class Finished(NamedTuple):
    """The peer sends no more on this stream."""

    stream: int


class Aborted(NamedTuple):
    """The stream is gone, both ways; ``reason`` is the peer's, for people."""

    stream: int
    code: int
    reason: str


class Writable(NamedTuple):
    """The stream takes more data to send."""

    stream: int


Event = Opened | Received | Finished | Aborted | Writable


@dataclass
class _Stream:
    credit_bytes: int
    allowance_bytes: int
    queue: deque[memoryview] = field(default_factory=deque)
    queued_bytes: int = 0
    untaken_bytes: int = 0
    ungranted_bytes: int = 0
    is_waiting: bool = False  # has its place in one of the turns
    wants_fin: bool = False
    has_sent_fin: bool = False
    has_received_fin: bool = False

    @property
    def can_send(self) -> bool:
        """Whether it has something to send now."""
        if self.queue:
            return self.credit_bytes > 0
        return self.wants_fin and not self.has_sent_fin

    @property
    def is_over(self) -> bool:
        """Whether both directions have ended and nothing waits for a reader."""
        return self.has_sent_fin and self.has_received_fin and not self.untaken_bytes


class Multiplexer:
    """One end of all streams of a session. Only the end with ``opens`` opens streams."""

    def __init__(self, *, opens: bool, limits: LinkLimits) -> None:
        self._opens = opens
        self._limits = limits
        self._streams: dict[int, _Stream] = {}
        self._last_id = 0
        self._control: deque[Frame] = deque()
        self._fresh: deque[int] = deque()
        self._busy: deque[int] = deque()
        self._fresh_in_a_row = 0
        self._events: list[Event] = []

    @property
    def stream_count(self) -> int:
        """How many streams there are."""
        return len(self._streams)

    @property
    def has_room(self) -> bool:
        """Whether a stream can be opened."""
        has_place = len(self._streams) < self._limits.streams and self._last_id < _MAX_STREAM_ID
        # Without a channel, streams that come and go leave frames behind.
        return has_place and len(self._control) < self._limits.control_frames

    def open(self, target: str) -> int | None:
        """Open a stream to ``target`` and return its number; ``None`` where there are too many."""
        if not self.has_room:
            return None
        self._last_id += 1
        self._add(self._last_id)
        self._say(Frame(_HEAD.pack(FrameType.OPEN, self._last_id), target.encode("ascii")))
        return self._last_id

    def can_write(self, stream: int) -> bool:
        """Whether ``write`` may be called; if not, ``Writable`` comes when it may."""
        known = self._streams.get(stream)
        return known is not None and known.queued_bytes < _QUEUE_BYTES

    def write(self, stream: int, data: bytes) -> None:
        """Send bytes; ignored where the stream is gone or was finished."""
        known = self._streams.get(stream)
        if known is None or known.wants_fin or not data:
            return
        # A view: what is sent chunk by chunk is not copied for each of them.
        known.queue.append(memoryview(data))
        known.queued_bytes += len(data)
        self._line_up(stream, known)

    def finish(self, stream: int) -> None:
        """Send no more on this stream."""
        known = self._streams.get(stream)
        if known is not None:
            known.wants_fin = True
            self._line_up(stream, known)

    def abort(self, stream: int, code: ResetCode = ResetCode.ABORTED, reason: str = "") -> None:
        """End a stream at once, both ways; what waits to be sent is dropped."""
        if self._streams.pop(stream, None) is not None:
            self._reset(stream, code, reason)

    def taken(self, stream: int, size_bytes: int) -> bool:
        """The reader has taken bytes: the peer may send as many more. Tells whether it is told."""
        known = self._streams.get(stream)
        if known is None:
            return False
        known.untaken_bytes -= size_bytes
        known.ungranted_bytes += size_bytes
        if known.has_received_fin:
            self._drop_if_over(stream, known)
            return False
        if known.ungranted_bytes < self._limits.window_bytes // 4:
            return False
        credit, known.ungranted_bytes = known.ungranted_bytes, 0
        known.allowance_bytes += credit
        self._say(Frame(_NUMBER.pack(FrameType.WINDOW, stream, credit), b""))
        return True

    def next_frame(self) -> Frame | None:
        """Return the frame whose turn it is, or ``None`` where nothing can be sent."""
        if self._control:
            return self._control.popleft()
        while self._fresh or self._busy:
            stream = self._turn()
            known = self._streams.get(stream)
            if known is None:
                continue
            known.is_waiting = False
            if known.can_send:
                return self._send(stream, known)
        return None

    def receive(self, frame: memoryview) -> None:
        """Take a frame of the peer; what it means comes out of ``take_events``.

        Raises:
            SessionError: it breaks the rules: unknown, beyond a window, after its end.
        """
        if len(frame) < _HEAD.size:
            raise SessionError("a frame is shorter than its head")
        if len(self._control) > 2 * self._limits.control_frames:
            raise SessionError("the peer takes nothing and causes more and more answers")
        kind, stream = _HEAD.unpack_from(frame)
        body = frame[_HEAD.size :]
        if kind == FrameType.OPEN and len(body) <= MAX_TARGET_BYTES:
            self._receive_open(stream, bytes(body))
            return
        if not 0 < stream <= self._last_id:
            raise SessionError(f"a frame of stream {stream}, which was never opened")
        known = self._streams.get(stream)
        if kind == FrameType.DATA and body:
            self._receive_data(stream, known, body)
        elif kind == FrameType.FIN and not body:
            self._receive_fin(stream, known)
        elif kind == FrameType.WINDOW and len(frame) == _NUMBER.size:
            self._receive_window(stream, known, _NUMBER.unpack(frame)[2])
        elif kind == FrameType.RESET and 0 <= len(frame) - _NUMBER.size <= MAX_REASON_BYTES:
            if self._streams.pop(stream, None) is not None:
                reason = bytes(frame[_NUMBER.size :]).decode(errors="replace")
                self._events.append(Aborted(stream, _NUMBER.unpack_from(frame)[2], reason))
        else:
            raise SessionError(f"a frame of type {kind} with {len(body)} bytes")

    def take_events(self) -> list[Event]:
        """Return what has happened since the last call."""
        events, self._events = self._events, []
        return events

    def _receive_open(self, stream: int, target: bytes) -> None:
        if self._opens or stream <= self._last_id or not target.isascii():
            raise SessionError(f"stream {stream} may not be opened")
        self._last_id = stream
        if len(self._streams) < self._limits.streams:
            self._add(stream)
            self._events.append(Opened(stream, target.decode("ascii")))
        else:
            self._reset(stream, ResetCode.TOO_MANY, "too many streams are open")

    def _receive_data(self, stream: int, known: _Stream | None, body: memoryview) -> None:
        if known is None:
            return  # sent before the peer knew that the stream is gone
        if known.has_received_fin or len(body) > known.allowance_bytes or len(body) > CHUNK_BYTES:
            raise SessionError(f"more bytes of stream {stream} than it may have")
        known.allowance_bytes -= len(body)
        known.untaken_bytes += len(body)
        self._events.append(Received(stream, body))

    def _receive_fin(self, stream: int, known: _Stream | None) -> None:
        if known is None:
            return
        if known.has_received_fin:
            raise SessionError(f"stream {stream} ends twice")
        known.has_received_fin = True
        self._events.append(Finished(stream))
        self._drop_if_over(stream, known)

    def _receive_window(self, stream: int, known: _Stream | None, credit: int) -> None:
        if known is None:
            return
        known.credit_bytes += credit
        if not credit or known.credit_bytes > self._limits.window_bytes:
            raise SessionError(f"a window of {known.credit_bytes} bytes for stream {stream}")
        self._line_up(stream, known)

    def _turn(self) -> int:
        if self._fresh and (self._fresh_in_a_row < _FRESH_IN_A_ROW or not self._busy):
            self._fresh_in_a_row += 1
            return self._fresh.popleft()
        self._fresh_in_a_row = 0
        return self._busy.popleft()

    def _send(self, stream: int, known: _Stream) -> Frame:
        if not known.queue:
            known.has_sent_fin = True
            self._drop_if_over(stream, known)
            return Frame(_HEAD.pack(FrameType.FIN, stream), b"")
        data = known.queue.popleft()
        size = min(known.credit_bytes, CHUNK_BYTES)
        if len(data) > size:
            known.queue.appendleft(data[size:])
            data = data[:size]
        known.credit_bytes -= len(data)
        was_full = known.queued_bytes >= _QUEUE_BYTES
        known.queued_bytes -= len(data)
        if was_full and known.queued_bytes < _QUEUE_BYTES:
            self._events.append(Writable(stream))
        if known.can_send:
            known.is_waiting = True
            self._busy.append(stream)
        return Frame(_HEAD.pack(FrameType.DATA, stream), data)

    def _line_up(self, stream: int, known: _Stream) -> None:
        if not known.is_waiting and known.can_send:
            known.is_waiting = True
            self._fresh.append(stream)

    def _add(self, stream: int) -> None:
        window = self._limits.window_bytes
        self._streams[stream] = _Stream(credit_bytes=window, allowance_bytes=window)

    def _drop_if_over(self, stream: int, known: _Stream) -> None:
        if known.is_over:
            del self._streams[stream]

    def _reset(self, stream: int, code: ResetCode, reason: str) -> None:
        text = reason.encode()[:MAX_REASON_BYTES]
        self._say(Frame(_NUMBER.pack(FrameType.RESET, stream, code), text))

    def _say(self, frame: Frame) -> None:
        self._control.append(frame)
