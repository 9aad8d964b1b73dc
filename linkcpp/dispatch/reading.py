"""Reading a client's requests from its socket, into one buffer that is used again and again."""

import socket

from linkcpp.dispatch.memory import RequestError
from linkcpp.engine.wire import Dialect, Limits, Message, RequestParser, WireError

_BUFFER_BYTES = 1 << 18


class RequestReader:
    """Reads from a blocking socket.

    It reads at once whatever there is. Waiting until a whole burst of llama-server's messages has
    arrived (``SO_RCVLOWAT``) spares wake-ups, but what is not read is not acknowledged for 40 ms,
    and the sender holds small pieces back until it is.
    """

    def __init__(self, client: socket.socket, limits: Limits) -> None:
        self._socket = client
        self._parser = RequestParser(None, limits)
        self._view = memoryview(bytearray(_BUFFER_BYTES))

    def speak(self, dialect: Dialect) -> None:
        """Take requests of this dialect from now on."""
        self._parser.dialect = dialect

    def read(self) -> list[Message] | None:
        """Wait for requests; ``None`` where the client has left. Payloads last until the next read.

        Raises:
            OSError: the client broke off.
            RequestError: what it sends is no request.
        """
        count = self._socket.recv_into(self._view)
        if not count:
            return None
        try:
            return self._parser.feed_whole(self._view[:count])
        except WireError as error:
            raise RequestError(error.message) from error
