"""The ggml-RPC protocol: commands, dialects and framing, as pure functions over bytes.

A request is command u8, size u64, payload; an answer is size u64, payload; all little-endian and
packed. Two dialects are known, 4.0.x and 7.0.x (``docs/wire.md`` lists what differs). Payloads are
in ``wire_messages``, tensors and graphs in ``wire_tensor``. The parsers here serve both ends: a
server or relay reads requests, a client or relay reads answers. They never allocate more than they
were fed: a message that announces a terabyte costs nothing until its bytes arrive, and is refused
by its size before.
"""

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.records import RpcVersion

TENSOR_BYTES = 296
CAPABILITY_BYTES = 24

REQUEST_HEADER = struct.Struct("<BQ")
ANSWER_SIZE = struct.Struct("<Q")
REQUEST_HEADER_BYTES = REQUEST_HEADER.size
ANSWER_HEADER_BYTES = ANSWER_SIZE.size

Buffer = bytes | bytearray | memoryview


class WireError(LinkcppError):
    """Bytes that are not ggml-RPC as this side expects it, named."""


class Command(IntEnum):
    """The first byte of a request."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17


_COMMANDS = {int(command): command for command in Command}
# Exact payload sizes of requests; SET_TENSOR and GRAPH_COMPUTE vary.
_REQUEST_BYTES = {
    Command.ALLOC_BUFFER: 12,
    Command.GET_ALIGNMENT: 4,
    Command.GET_MAX_SIZE: 4,
    Command.BUFFER_GET_BASE: 8,
    Command.FREE_BUFFER: 8,
    Command.BUFFER_CLEAR: 9,
    Command.SET_TENSOR_HASH: TENSOR_BYTES + 16,
    Command.GET_TENSOR: TENSOR_BYTES + 16,
    Command.COPY_TENSOR: 2 * TENSOR_BYTES,
    Command.GET_DEVICE_MEMORY: 4,
    Command.INIT_TENSOR: TENSOR_BYTES,
    Command.GET_ALLOC_SIZE: 4 + 11 * TENSOR_BYTES,
    Command.HELLO: CAPABILITY_BYTES,
    Command.DEVICE_COUNT: 0,
    Command.GRAPH_RECOMPUTE: 4,
    Command.MEMSET_TENSOR: TENSOR_BYTES + 17,
}
# Exact payload sizes of answers; GET_TENSOR's is what the request asked for.
_ANSWER_BYTES = {
    Command.ALLOC_BUFFER: 16,
    Command.GET_ALIGNMENT: 8,
    Command.GET_MAX_SIZE: 8,
    Command.BUFFER_GET_BASE: 8,
    Command.SET_TENSOR_HASH: 1,
    Command.COPY_TENSOR: 1,
    Command.GET_DEVICE_MEMORY: 16,
    Command.GET_ALLOC_SIZE: 8,
    Command.HELLO: 4 + CAPABILITY_BYTES,
    Command.DEVICE_COUNT: 4,
}
_EMPTY_ANSWERS_OF_4 = {
    Command.FREE_BUFFER: 0,
    Command.BUFFER_CLEAR: 0,
    Command.INIT_TENSOR: 0,
}


@dataclass(frozen=True)
class Dialect:
    """What differs between protocol versions.

    ``answer_bytes`` has the exact size of every fixed answer: a command in neither it nor
    GET_TENSOR gets no answer at all. ``has_cache_flag``: SET_TENSOR carries one byte between the
    tensor and the offset.
    """

    name: str
    major: int
    minor: int
    commands: frozenset[Command]
    answer_bytes: dict[Command, int]
    has_cache_flag: bool

    @property
    def set_tensor_head_bytes(self) -> int:
        """How many bytes of a SET_TENSOR payload stand before the data."""
        return TENSOR_BYTES + 8 + self.has_cache_flag

    def is_answered(self, command: Command) -> bool:
        """Whether the server sends anything back."""
        return command == Command.GET_TENSOR or command in self.answer_bytes


DIALECT_4 = Dialect(
    name="4.0.x",
    major=4,
    minor=0,
    commands=frozenset(Command) - {Command.MEMSET_TENSOR},
    answer_bytes=_ANSWER_BYTES | _EMPTY_ANSWERS_OF_4,
    has_cache_flag=False,
)
DIALECT_7 = Dialect(
    name="7.0.x",
    major=7,
    minor=0,
    commands=frozenset(Command),
    answer_bytes=_ANSWER_BYTES,
    has_cache_flag=True,
)
_DIALECTS = {(dialect.major, dialect.minor): dialect for dialect in (DIALECT_4, DIALECT_7)}


def dialect_of(version: RpcVersion) -> Dialect:
    """Return the dialect that a server of ``version`` speaks.

    Raises:
        WireError: linkcpp does not know it.
    """
    dialect = _DIALECTS.get((version.major, version.minor))
    if dialect is None:
        known = " and ".join(dialect.name for dialect in _DIALECTS.values())
        raise WireError(
            f"RPC version {version} is not one that linkcpp speaks ({known}).",
            hint="See `linkcpp engine install` for builds that it does.",
        )
    return dialect


@dataclass(frozen=True)
class Limits:
    """The most payload that one request may announce, for the two commands without a fixed size."""

    set_tensor_bytes: int = 1 << 34
    graph_bytes: int = 1 << 26


class Message(NamedTuple):
    """A whole request or answer. ``payload`` may be a view of what was fed last."""

    command: Command
    payload: memoryview


class StreamStart(NamedTuple):
    """The head of a message passed on in pieces; ``data_bytes`` follow in ``StreamData``."""

    command: Command
    head: memoryview
    data_bytes: int


class StreamData(NamedTuple):
    """A piece of a streamed message: a view of what was fed last."""

    data: memoryview


Event = Message | StreamStart | StreamData


def encode_request(command: Command, payload: Buffer = b"") -> bytes:
    """Frame one request."""
    return REQUEST_HEADER.pack(command, len(payload)) + payload


def request_header(command: Command, payload_bytes: int) -> bytes:
    """Return the nine bytes before a payload, for payloads that are sent in pieces."""
    return REQUEST_HEADER.pack(command, payload_bytes)


def encode_answer(payload: Buffer = b"") -> bytes:
    """Frame one answer."""
    return ANSWER_SIZE.pack(len(payload)) + payload


def answer_header(payload_bytes: int) -> bytes:
    """Return the eight bytes before an answer's payload."""
    return ANSWER_SIZE.pack(payload_bytes)


class _Assembler:
    """Cuts a byte stream into items of known size, without a copy where one feed holds the item."""

    def __init__(self) -> None:
        self._view = memoryview(b"")
        self._partial = bytearray()

    def feed(self, data: Buffer) -> None:
        self._view = memoryview(data).cast("B")

    def take(self, size_bytes: int) -> memoryview | None:
        """Return the next ``size_bytes``, or ``None`` when they have not all arrived."""
        missing = size_bytes - len(self._partial)
        piece = self._view[:missing]
        self._view = self._view[len(piece) :]
        if not self._partial and len(piece) == size_bytes:
            return piece
        self._partial += piece
        if len(self._partial) < size_bytes:
            return None
        whole, self._partial = self._partial, bytearray()
        return memoryview(whole)

    def take_available(self, max_bytes: int) -> memoryview:
        """Return what there is, at most ``max_bytes``; only between items."""
        piece = self._view[:max_bytes]
        self._view = self._view[len(piece) :]
        return piece

    @property
    def is_empty(self) -> bool:
        """Whether everything fed was taken and no item is half complete."""
        return not self._view and not self._partial


class _Parser:
    """Reads a stream of messages; what a message begins with is for the two kinds to say."""

    def __init__(self, streamed: frozenset[Command]) -> None:
        self._streamed = streamed
        self._assembler = _Assembler()
        self._stream_bytes = 0

    def feed(self, data: Buffer) -> Iterator[Event]:
        """Yield what ``data`` completes; exhaust the iterator before the next feed.

        Raises:
            WireError: a message that is not one of this dialect, that nothing asked for, or of
                another size than it can have here.
        """
        self._assembler.feed(data)
        while (event := self._next()) is not None:
            yield event

    def _next(self) -> Event | None:
        if not self._stream_bytes:
            return self._begin()
        piece = self._assembler.take_available(self._stream_bytes)
        self._stream_bytes -= len(piece)
        return StreamData(piece) if piece else None

    def _begin(self) -> Event | None:
        raise NotImplementedError


class RequestParser(_Parser):
    """Reads a stream of requests: the server's side of a connection.

    Without a dialect only HELLO is understood; ``dialect`` may be set between messages, when the
    answer to HELLO told it. Commands in ``streamed`` (SET_TENSOR, GRAPH_COMPUTE) are not gathered
    but passed on in pieces.
    """

    def __init__(
        self,
        dialect: Dialect | None,
        limits: Limits | None = None,
        *,
        streamed: frozenset[Command] = frozenset(),
    ) -> None:
        super().__init__(streamed)
        self.dialect = dialect
        self._limits = limits or Limits()
        self._command: Command | None = None
        self._size_bytes = 0
        self._greeted = False

    def _begin(self) -> Event | None:
        if self._command is None:
            header = self._assembler.take(REQUEST_HEADER_BYTES)
            if header is None:
                return None
            number, self._size_bytes = REQUEST_HEADER.unpack(header)
            self._command = self.check(number, self._size_bytes)
        command = self._command
        head_bytes = self._head_bytes(command) if command in self._streamed else self._size_bytes
        head = self._assembler.take(head_bytes)
        if head is None:
            return None
        self._command = None
        if command not in self._streamed:
            return Message(command, head)
        self._stream_bytes = self._size_bytes - head_bytes
        return StreamStart(command, head, self._stream_bytes)

    def _head_bytes(self, command: Command) -> int:
        if command == Command.SET_TENSOR and self.dialect is not None:
            return self.dialect.set_tensor_head_bytes
        return 8

    def check(self, number: int, size_bytes: int) -> Command:
        """Judge the header of the next message, for readers that cut the stream themselves.

        Raises:
            WireError: as ``feed``.
        """
        if not self._greeted:
            if number != Command.HELLO:
                raise WireError(f"The first command is number {number} instead of HELLO.")
            self._greeted = True
        elif number == Command.HELLO:
            raise WireError("HELLO came a second time.")
        elif self.dialect is None:
            raise WireError("A command came before HELLO was answered.")
        elif number not in self.dialect.commands:
            raise WireError(f"Command {number} is unknown in RPC {self.dialect.name}.")
        command = _COMMANDS[number]
        expected = _REQUEST_BYTES.get(command)
        if expected is not None:
            if size_bytes != expected:
                raise WireError(f"{command.name} has {size_bytes} bytes instead of {expected}.")
            return command
        is_graph = command == Command.GRAPH_COMPUTE
        least = 12 if is_graph else self._head_bytes(command)
        most = self._limits.graph_bytes if is_graph else self._limits.set_tensor_bytes
        if not least <= size_bytes <= most:
            raise WireError(f"{command.name} has {size_bytes} bytes, outside of {least} to {most}.")
        return command


class AnswerParser(_Parser):
    """Reads a stream of answers: the client's side of a connection.

    The caller tells with ``expect`` which answers are due, in the order of the requests. Every
    answer's size is known beforehand, so any other size is refused.
    """

    def __init__(self, *, streamed: frozenset[Command] = frozenset()) -> None:
        super().__init__(streamed)
        self._due: deque[tuple[Command, int]] = deque()
        self._has_header = False

    def expect(self, command: Command, payload_bytes: int) -> None:
        """Announce an answer of exactly ``payload_bytes``."""
        self._due.append((command, payload_bytes))

    def _begin(self) -> Event | None:
        if not self._due:
            if not self._assembler.is_empty:
                raise WireError("The server sent bytes that nothing asked for.")
            return None
        command, expected = self._due[0]
        if not self._has_header:
            header = self._assembler.take(ANSWER_HEADER_BYTES)
            if header is None:
                return None
            (size_bytes,) = ANSWER_SIZE.unpack(header)
            if size_bytes != expected:
                raise WireError(
                    f"The answer to {command.name} has {size_bytes} bytes instead of {expected}."
                )
            self._has_header = True
        is_streamed = command in self._streamed
        head = self._assembler.take(0 if is_streamed else expected)
        if head is None:
            return None
        self._has_header = False
        self._due.popleft()
        if not is_streamed:
            return Message(command, head)
        self._stream_bytes = expected
        return StreamStart(command, head, expected)
