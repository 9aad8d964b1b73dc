"""One end of an edge without its I/O: a session that carries streams, and how two ends find each
other's session again. Pure: records in, records and events out.
"""

import struct
from typing import NamedTuple

from linkcpp.link.records import LinkLimits
from linkcpp.link.session import Session, SessionError
from linkcpp.link.streams import Multiplexer

EPOCH_BYTES = 16
NO_EPOCH = bytes(EPOCH_BYTES)

_RESUME = struct.Struct("<16s16sQ")
RESUME_BYTES = _RESUME.size


class Resume(NamedTuple):
    """What each side of a handshake says of its session.

    An epoch names one life of one end: 16 random bytes. ``peer_epoch`` is what this side knows of
    the other, zeros for nothing; ``wanted`` is the number of the next frame it has not received.
    """

    epoch: bytes
    peer_epoch: bytes
    wanted: int

    def encode(self) -> bytes:
        """Write the payload of a handshake message."""
        return _RESUME.pack(self.epoch, self.peer_epoch, self.wanted)

    @classmethod
    def decode(cls, payload: bytes) -> "Resume":
        """Read the payload of a handshake message.

        Raises:
            SessionError: it is none.
        """
        if len(payload) != _RESUME.size:
            raise SessionError("a handshake does not tell its session")
        return cls(*_RESUME.unpack(payload))


class LinkCore:
    """A session with its streams, of one pair of epochs.

    ``opens`` is the end that opens streams, and whose handshakes begin.
    """

    def __init__(self, *, epoch: bytes, peer_epoch: bytes, opens: bool, limits: LinkLimits) -> None:
        self.epoch = epoch
        self.peer_epoch = peer_epoch
        self.streams = Multiplexer(opens=opens, limits=limits)
        self._session = Session(
            self.streams.next_frame, unacknowledged_bytes=limits.unacknowledged_bytes
        )

    @property
    def resume(self) -> Resume:
        """What to say of this session in a handshake."""
        return Resume(self.epoch, self.peer_epoch, self._session.wanted)

    @property
    def kept_bytes(self) -> int:
        """What is kept for sending again."""
        return self._session.kept_bytes

    def attach(self, peer_wanted: int) -> None:
        """Go on over a new channel; see ``Session.attach``."""
        self._session.attach(peer_wanted)

    def detach(self) -> None:
        """The channel is lost."""
        self._session.detach()

    def next_record(self) -> bytes | None:
        """Return the next record to send, or ``None`` while there is none."""
        return self._session.next_record()

    def receive(self, record: bytes) -> None:
        """Take a record of the peer; ``streams.take_events`` tells what came of it.

        Raises:
            SessionError: the peer broke the rules. The session cannot go on.
        """
        frame = self._session.receive(record)
        if frame is not None:
            self.streams.receive(frame)
