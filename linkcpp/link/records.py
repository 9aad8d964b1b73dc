"""What an encrypted record and a stream frame may be; numbers are those of the wire."""

from enum import IntEnum
from typing import NamedTuple

# With the heads of record and frame it fits one Noise message.
CHUNK_BYTES = 60 * 1024
MAX_TARGET_BYTES = 128
MAX_REASON_BYTES = 400


class RecordType(IntEnum):
    """The first byte of a record."""

    ATTACH = 1
    DATA = 2
    ACK = 3
    PING = 4
    PONG = 5
    BYE = 6


class FrameType(IntEnum):
    """The first byte of a frame of a stream."""

    OPEN = 1
    DATA = 2
    WINDOW = 3
    FIN = 4
    RESET = 5


class ResetCode(IntEnum):
    """Why a stream ends before its bytes do."""

    ABORTED = 1
    REFUSED = 2
    TOO_MANY = 3


class LinkLimits(NamedTuple):
    """What one edge may cost at one end.

    ``streams`` may be open at once, each may be ``window_bytes`` ahead of its reader, and
    ``unacknowledged_bytes`` are kept for sending again. Streams and windows are part of the
    protocol: both ends must have the same.
    """

    streams: int = 64
    window_bytes: int = 2 * 2**20
    unacknowledged_bytes: int = 8 * 2**20
    control_frames: int = 4096


class LinkTimes(NamedTuple):
    """When a link asks itself whether its path is alive and whether there is a better one.

    All in seconds. A path from which nothing came for ``dead`` is given up; ``head_start`` is what
    a direct path has before the relay is tried too; a coordinator waits ``pairing`` for the node at
    a relay before it asks the hub again, which then tells the node again; retries pause from
    ``first_pause`` to ``longest_pause``; the end that was dialled forgets a link that had no path
    for ``forgotten``, or for ``left`` where the path ended as that of a machine does whose process
    ends, and not in silence; the other one gives it up after ``patience``, or after ``refused``
    where the machine answers that nobody listens there.
    """

    ping: float = 3.0
    dead: float = 10.0
    dial: float = 5.0
    pairing: float = 20.0
    head_start: float = 0.25
    first_probe: float = 3.0
    probe: float = 30.0
    first_pause: float = 0.1
    longest_pause: float = 5.0
    forgotten: float = 120.0
    left: float = 20.0
    patience: float = 90.0
    refused: float = 3.0
