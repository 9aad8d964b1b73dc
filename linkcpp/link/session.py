"""A session: numbered frames in both directions that survive the loss of the channel below.

Every frame has a number and is kept until the peer has acknowledged it. On a new channel, frames
that were not acknowledged are sent again, and what arrives twice is dropped. Pure.
"""

import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from linkcpp.link.records import RecordType

_DATA = struct.Struct("<BQQ")  # type, number of the frame, next number wanted
_ACK = struct.Struct("<BQ")
# What an empty frame costs in memory, so that many small ones are bounded too.
_FRAME_COST_BYTES = 64
_ACK_EVERY_FRAMES = 64

DATA_HEAD_BYTES = _DATA.size


class SessionError(Exception):
    """The peer broke the rules of the session; it cannot go on."""


class Frame(NamedTuple):
    """A frame in two parts, so that a payload is copied only once, into its record."""

    head: bytes
    body: bytes | memoryview

    @property
    def cost_bytes(self) -> int:
        """What keeping it costs."""
        return len(self.head) + len(self.body) + _FRAME_COST_BYTES


class Session:
    """One end. ``next_frame`` is asked for a new frame whenever one may be sent."""

    def __init__(
        self, next_frame: Callable[[], Frame | None], *, unacknowledged_bytes: int
    ) -> None:
        self._next_frame = next_frame
        self._max_bytes = unacknowledged_bytes
        self._ack_every_bytes = unacknowledged_bytes // 16
        self._kept: deque[Frame] = deque()
        self._kept_bytes = 0
        self._first = 0  # number of the oldest frame kept
        self._cursor = 0  # number of the next frame to send on this channel
        self._wanted = 0
        self._is_attached = False
        self._is_ack_due = False
        self._untold_frames = 0
        self._untold_bytes = 0

    @property
    def wanted(self) -> int:
        """The number of the next frame that this end has not received."""
        return self._wanted

    @property
    def kept_bytes(self) -> int:
        """What the frames cost that the peer has not acknowledged."""
        return self._kept_bytes

    def attach(self, peer_wanted: int) -> None:
        """Go on over a new channel; ``peer_wanted`` is the next number the peer has not received.

        Raises:
            SessionError: the peer claims to have what was never sent.
        """
        self._acknowledge(peer_wanted)
        self._cursor = self._first
        self._is_attached = True
        # The peer may only have the number of an older channel.
        self._is_ack_due = True

    def detach(self) -> None:
        """The channel is lost; frames are kept until there is another one."""
        self._is_attached = False

    def next_record(self) -> bytes | None:
        """Return what to send now, or ``None`` while there is nothing to send."""
        if not self._is_attached:
            return None
        frame = self._frame_to_send()
        if frame is None:
            return self._due_acknowledgement()
        head = _DATA.pack(RecordType.DATA, self._cursor, self._wanted)
        self._cursor += 1
        self._told()
        return b"".join((head, frame.head, frame.body))

    def receive(self, record: bytes) -> memoryview | None:
        """Take a record of the peer; return its frame, ``None`` where it brings no new one.

        Raises:
            SessionError: it is none of a session, or numbers do not fit.
        """
        if len(record) == _ACK.size and record[0] == RecordType.ACK:
            self._acknowledge(_ACK.unpack(record)[1])
            return None
        if len(record) <= DATA_HEAD_BYTES or record[0] != RecordType.DATA:
            raise SessionError("a record is none that a session has")
        _, number, peer_wanted = _DATA.unpack_from(record)
        self._acknowledge(peer_wanted)
        if number > self._wanted:
            raise SessionError(f"frame {number} came where {self._wanted} was due")
        self._untold_frames += 1
        self._untold_bytes += len(record)
        if number < self._wanted:
            return None
        self._wanted += 1
        return memoryview(record)[DATA_HEAD_BYTES:]

    def _frame_to_send(self) -> Frame | None:
        index = self._cursor - self._first
        if index < len(self._kept):
            return self._kept[index]
        if self._kept_bytes >= self._max_bytes:
            return None
        frame = self._next_frame()
        if frame is not None:
            self._kept.append(frame)
            self._kept_bytes += frame.cost_bytes
        return frame

    def _due_acknowledgement(self) -> bytes | None:
        is_much = self._untold_bytes >= self._ack_every_bytes
        if not (self._is_ack_due or is_much or self._untold_frames >= _ACK_EVERY_FRAMES):
            return None
        self._told()
        return _ACK.pack(RecordType.ACK, self._wanted)

    def _told(self) -> None:
        self._is_ack_due = False
        self._untold_frames = self._untold_bytes = 0

    def _acknowledge(self, peer_wanted: int) -> None:
        if peer_wanted > self._first + len(self._kept):
            raise SessionError(f"frame {peer_wanted} is wanted, which is not the next one")
        while self._first < peer_wanted:
            self._kept_bytes -= self._kept.popleft().cost_bytes
            self._first += 1
        self._cursor = max(self._cursor, self._first)
