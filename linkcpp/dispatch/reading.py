"""Reading a client's requests, waking as seldom as possible.

llama-server sends each message in three pieces and five messages a layer, then waits for one
answer. A reader that wakes for each piece costs both sides more than the work in between.
"""

import contextlib
import select
import socket

from linkcpp.dispatch.memory import RequestError
from linkcpp.engine.wire import (
    REQUEST_HEADER_BYTES,
    Dialect,
    Limits,
    Message,
    RequestParser,
    WireError,
)

_BUFFER_BYTES = 1 << 18
# Far longer than a burst takes, and not long where one is shorter than expected.
_BURST_MS = 2


class RequestReader:
    """Reads from a blocking socket. ``burst_bytes`` counts what came since ``end_burst``."""

    def __init__(self, client: socket.socket, limits: Limits) -> None:
        self._socket = client
        self._parser = RequestParser(None, limits)
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        self._poll = select.poll()
        self._poll.register(client, select.POLLIN)
        self.burst_bytes = 0

    def speak(self, dialect: Dialect) -> None:
        """Take requests of this dialect from now on."""
        self._parser.dialect = dialect

    def end_burst(self) -> int:
        """Return how many bytes came since the last time."""
        size_bytes, self.burst_bytes = self.burst_bytes, 0
        return size_bytes

    def read(self, expected_bytes: int) -> list[Message] | None:
        """Wait for requests; ``None`` where the client has left.

        ``expected_bytes`` is how much will probably come before the client waits for an answer:
        once the first of it is there, the rest is given a moment to arrive.

        Raises:
            OSError: the client broke off.
            RequestError: what it sends is no request.
        """
        count = self._socket.recv_into(self._view)
        if not count:
            return None
        self.burst_bytes += count
        missing = min(expected_bytes - self.burst_bytes, _BUFFER_BYTES - count)
        if missing > 0:
            count += self._read_rest(count, missing)
        try:
            return self._parser.feed_whole(self._view[:count])
        except WireError as error:
            raise RequestError(error.message) from error

    def _read_rest(self, have: int, missing: int) -> int:
        self._set_low_water(missing)
        self._poll.poll(_BURST_MS)
        # A whole message needs at least its header, whatever comes next.
        self._set_low_water(REQUEST_HEADER_BYTES)
        with contextlib.suppress(BlockingIOError):
            count = self._socket.recv_into(self._view[have:], 0, socket.MSG_DONTWAIT)
            self.burst_bytes += count
            return count
        return 0

    def _set_low_water(self, size_bytes: int) -> None:
        # Where the system does not have it, every piece wakes.
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
