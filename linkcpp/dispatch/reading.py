"""Reading a client's requests from its socket, into one buffer that is used again and again."""

import os
import socket

import numpy as np

from linkcpp.dispatch.memory import RequestError
from linkcpp.engine.wire import (
    REQUEST_HEADER,
    REQUEST_HEADER_BYTES,
    Command,
    Dialect,
    Limits,
    Message,
    RequestParser,
    WireError,
)

_BUFFER_BYTES = 1 << 18


class RequestReader:
    """Reads from a blocking socket.

    llama-server sends a message in three pieces and several messages in a row. Nobody waits for an
    answer to SET_TENSOR, so what follows it is waited for in the kernel, piece by piece, for as
    long as its size is certain. Waiting for a whole burst unread (``SO_RCVLOWAT``) would spare more
    wake-ups, but what is not read is not acknowledged for 40 ms, and the sender holds small pieces
    back until it is.
    """

    def __init__(self, client: socket.socket, limits: Limits) -> None:
        self._socket = client
        self._parser = RequestParser(None, limits)
        self._view = memoryview(bytearray(_BUFFER_BYTES))
        # What was read and not returned yet lies between these, and what its header says.
        self._at = self._end = 0
        self._next: tuple[Command, int] | None = None

    def speak(self, dialect: Dialect) -> None:
        """Take requests of this dialect from now on."""
        self._parser.dialect = dialect

    def read(self) -> list[Message] | None:
        """Wait for requests; ``None`` where the client has left. Payloads last until the next read.

        Raises:
            OSError: the client broke off.
            RequestError: what it sends is not a request.
        """
        view = self._view
        rest = self._end - self._at
        view[:rest] = bytes(view[self._at : self._end])
        self._at, self._end = 0, rest
        messages: list[Message] = []
        while True:
            missing = self._cut(messages)
            is_too_large = self._end + missing > _BUFFER_BYTES
            if messages and (is_too_large or messages[-1].command != Command.SET_TENSOR):
                return messages
            if is_too_large:
                return self._read_large()
            if self._end:
                os.sched_yield()
                count = self._socket.recv_into(view[self._end :], missing, socket.MSG_WAITALL)
            else:
                count = self._socket.recv_into(view)
            if not count:
                self._at = self._end
                return messages or None
            self._end += count

    def _cut(self, messages: list[Message]) -> int:
        """Add the messages that are whole; return how many bytes have to come next."""
        view, at, end = self._view, self._at, self._end
        while True:
            if self._next is None:
                if end - at < REQUEST_HEADER_BYTES:
                    break
                self._next = self._header(at)
            command, size_bytes = self._next
            after = at + REQUEST_HEADER_BYTES + size_bytes
            if after > end:
                break
            messages.append(Message(command, view[at + REQUEST_HEADER_BYTES : after]))
            self._next, at = None, after
        self._at = at
        if self._next is None:
            return at + REQUEST_HEADER_BYTES - end
        if command == Command.SET_TENSOR and after + REQUEST_HEADER_BYTES <= _BUFFER_BYTES:
            # Nothing is done for it alone, so the next header is waited for as well.
            return after + REQUEST_HEADER_BYTES - end
        return after - end

    def _header(self, at: int) -> tuple[Command, int]:
        number, size_bytes = REQUEST_HEADER.unpack_from(self._view, at)
        try:
            return self._parser.check(number, size_bytes), size_bytes
        except WireError as error:
            raise RequestError(error.message) from error

    def _read_large(self) -> list[Message] | None:
        """Read the rest of a message that is larger than the buffer, into memory of its own."""
        assert self._next is not None  # noqa: S101 - its header told its size
        command, size_bytes = self._next
        begun = self._view[self._at + REQUEST_HEADER_BYTES : self._end]
        # Not a bytearray, whose pages would all be filled before anything has come.
        payload = np.empty(size_bytes, np.uint8).data
        have = len(begun)
        payload[:have] = begun
        self._at = self._end = 0
        self._next = None
        while have < size_bytes:
            count = self._socket.recv_into(payload[have:])
            if not count:
                return None
            have += count
        return [Message(command, payload)]
