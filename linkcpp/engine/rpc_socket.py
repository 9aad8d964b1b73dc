"""A ggml-RPC client on a blocking socket, for hot paths: many requests in one write.

Requests are queued as ready bytes and leave together, at the next answer that is waited for or at
``flush``. Setting up goes through the same object, so that a connection has one owner. Not for
several threads at once.
"""

import socket
import struct
from collections.abc import Sequence

import numpy as np

from linkcpp.common.errors import LinkcppError
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.records import RpcVersion
from linkcpp.engine.wire import (
    ANSWER_SIZE,
    Buffer,
    Command,
    Dialect,
    WireError,
    dialect_of,
    encode_request,
    request_header,
)

# Linux takes at most this many buffers in one call (IOV_MAX).
_MAX_BUFFERS = 1000


class AllocationError(LinkcppError):
    """The server has too little memory; the connection is sound."""


class RpcSocket:
    """One greeted connection to a ggml-RPC server.

    Everything raises ``WireError`` where the server is gone, late, or answers out of protocol; the
    connection is of no use afterwards.
    """

    def __init__(self, host: str, port: int, *, timeout_seconds: float = 60.0) -> None:
        self._address = f"{host}:{port}"
        self._queue: list[Buffer] = []
        self.queued_bytes = 0
        try:
            self._socket = socket.create_connection((host, port), timeout_seconds)
        except OSError as error:
            raise WireError(f"Cannot connect to {self._address}: {error}.") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        block_in_kernel(self._socket, timeout_seconds)
        try:
            self.version: RpcVersion = messages.parse_hello_answer(
                self.exchange(Command.HELLO, messages.PLAIN_TCP, 4 + len(messages.PLAIN_TCP))
            )
            self.dialect: Dialect = dialect_of(self.version)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection; the server then frees the buffers of this client."""
        self._socket.close()

    def queue(self, *parts: Buffer) -> None:
        """Add bytes of requests to what leaves next."""
        self._queue.extend(parts)
        self.queued_bytes += sum(map(len, parts))

    def flush(self) -> None:
        """Send what was queued."""
        if not self._queue:
            return
        parts, self._queue, self.queued_bytes = self._queue, [], 0
        try:
            send_all(self._socket, parts)
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, size_bytes: int) -> memoryview:
        """Send what was queued and return the next answer, which must have ``size_bytes``."""
        self.flush()
        answer = self._receive_exactly(ANSWER_SIZE.size + size_bytes)
        (announced,) = ANSWER_SIZE.unpack_from(answer)
        if announced != size_bytes:
            raise WireError(
                f"{self._address} answered with {announced} bytes instead of {size_bytes}."
            )
        return answer[ANSWER_SIZE.size :]

    def exchange(self, command: Command, payload: Buffer, answer_bytes: int) -> memoryview:
        """Send one request and return its answer."""
        self.queue(encode_request(command, payload))
        return self.receive(answer_bytes)

    @property
    def connection(self) -> socket.socket:
        """For who sends and receives himself, and from then on nothing is asked here."""
        return self._socket

    def call(self, command: Command, payload: Buffer = b"") -> memoryview:
        """Send a request whose answer, if it has one, is of a fixed size; return the answer."""
        answer_bytes = self.dialect.answer_bytes.get(command)
        if answer_bytes is None:
            self.queue(encode_request(command, payload))
            return memoryview(b"")
        return self.exchange(command, payload, answer_bytes)

    def alloc_buffer(self, size_bytes: int) -> tuple[int, int]:
        """Allocate on device 0 and return the buffer and the address of its first byte.

        Raises:
            AllocationError: the server has no such memory.
        """
        request = messages.ALLOC_BUFFER.build(messages.AllocBuffer(0, size_bytes))
        buffer, _ = messages.ALLOCATED_BUFFER.parse(self.call(Command.ALLOC_BUFFER, request))
        if not buffer:
            raise AllocationError(
                f"{self._address} cannot allocate {size_bytes} bytes.",
                hint="Give it less to hold, or a device with more memory.",
            )
        return buffer, self.buffer_base(buffer)

    def buffer_base(self, buffer: int) -> int:
        """Return the address of a buffer's first byte."""
        pointer = messages.BUFFER_POINTER.build(messages.BufferPointer(buffer))
        return messages.NUMBER.parse(self.call(Command.BUFFER_GET_BASE, pointer)).value

    def free_buffer(self, buffer: int) -> None:
        """Free a buffer."""
        self.call(
            Command.FREE_BUFFER, messages.BUFFER_POINTER.build(messages.BufferPointer(buffer))
        )

    def set_tensor(self, tensor: bytes, data: Buffer, offset: int = 0) -> None:
        """Queue a write into a tensor, ``offset`` bytes from its start."""
        head = messages.build_set_tensor_head(
            self.dialect, messages.SetTensor(tensor, offset, False)
        )
        self.queue(request_header(Command.SET_TENSOR, len(head) + len(data)), head, data)

    def _receive_exactly(self, size_bytes: int) -> memoryview:
        # Not a bytearray, which is filled with zeros first: that is a third of a large answer.
        view = np.empty(size_bytes, np.uint8).data
        have = 0
        try:
            while have < size_bytes:
                # The server sends size and data apart: one call waits for both.
                count = self._socket.recv_into(view[have:], 0, socket.MSG_WAITALL)
                if not count:
                    raise WireError(f"{self._address} closed the connection.")
                have += count
        except OSError as error:
            raise self._broken(error) from error
        return view

    def _broken(self, error: OSError) -> WireError:
        if isinstance(error, BlockingIOError):
            return WireError(f"{self._address} did not answer in time.")
        return WireError(f"The connection to {self._address} broke: {error.strerror or error}.")


def block_in_kernel(connection: socket.socket, timeout_seconds: float) -> None:
    """Let reads and writes block for at most so long, each in one call of the system.

    With a timeout of Python's own every call is two: it polls first. An expired timeout is a
    ``BlockingIOError`` here.
    """
    connection.setblocking(True)
    limit = _time_limit(timeout_seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def limit_receiving(connection: socket.socket, timeout_seconds: float) -> None:
    """As ``block_in_kernel`` for reads only, on a socket that blocks already."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time_limit(timeout_seconds))


def limit_sending(connection: socket.socket, timeout_seconds: float) -> None:
    """As ``block_in_kernel``, but reads wait for ever."""
    connection.setblocking(True)
    limit = _time_limit(timeout_seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _time_limit(seconds: float) -> bytes:
    """Write a C ``struct timeval``."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))


def send_all(connection: socket.socket, parts: Sequence[Buffer]) -> None:
    """Send buffers of bytes as one stream, without joining them."""
    while parts:
        sent = connection.sendmsg(parts[:_MAX_BUFFERS])
        if sent == sum(map(len, parts)):
            return
        parts = unsent(parts, sent)


def unsent(parts: Sequence[Buffer], sent_bytes: int) -> Sequence[Buffer]:
    """Return what is left of buffers of which so many bytes were sent."""
    for number, part in enumerate(parts):
        if sent_bytes < len(part):
            return [memoryview(part)[sent_bytes:], *parts[number + 1 :]]
        sent_bytes -= len(part)
    return ()
