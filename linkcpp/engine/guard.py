"""Stands between an authenticated but untrusted client and a loopback rpc-server.

Sans-io: it is fed the bytes of both directions and returns what to pass on. It keeps the owner's
memory limit, counts weights, and lets nothing through that is not ggml-RPC. Bulk data is passed on
as views of what was fed, never gathered or copied.
"""

import struct
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from linkcpp.engine import wire_messages as messages
from linkcpp.engine.pieces import SetTensorPieces, get_tensor_pieces
from linkcpp.engine.wire import (
    TENSOR_BYTES,
    AnswerParser,
    Buffer,
    Command,
    Dialect,
    Limits,
    Message,
    RequestParser,
    StreamData,
    StreamStart,
    WireError,
    answer_header,
    dialect_of,
    encode_answer,
    encode_request,
    request_header,
)
from linkcpp.engine.wire_tensor import parse_tensors

# Some 50,000 tensors; the server holds a graph about three times over while it takes it in.
_GRAPH_BYTES = 1 << 24
_MAX_BUFFERS = 1 << 16
_MAX_UNANSWERED = 1 << 10
_BUFFER_OF_TENSOR = struct.Struct("<12xQ")
_NAME_AT = 228
_NODE_COUNT = struct.Struct("<4xI")
_NO_BUFFER = encode_answer(messages.ALLOCATED_BUFFER.build(messages.AllocatedBuffer(0, 0)))


class GuardError(WireError):
    """The link carries what it must not; it is to be closed, and nothing else."""


@dataclass
class MemoryAccount:
    """What the clients of one rpc-server hold of the ``memory_bytes`` that they may.

    ``allocated_bytes`` counts buffers. ``tensor_bytes`` counts what was written into buffers that
    are still held, before the link's first graph: the weights, not the inputs of each token.
    """

    memory_bytes: int
    allocated_bytes: int = 0
    tensor_bytes: int = 0


class Flow(NamedTuple):
    """What to pass on. Views stay valid as long as the buffer that was fed."""

    to_server: list[Buffer]
    to_client: list[Buffer]


@dataclass
class _HeldBuffer:
    size_bytes: int
    tensor_bytes: int = 0


@dataclass
class _Owed:
    """An answer that the client waits for: the server's, or one that the guard gives itself.

    ``whole_bytes`` is what the client asked of a tensor, on the first piece of its answer.
    """

    command: Command
    own_answer: bytes | None = None
    size_bytes: int = 0
    reserved_bytes: int = 0
    tensor: bytes = b""
    whole_bytes: int | None = None


class LinkGuard:
    """Guards one connection of a client to an rpc-server; ``close`` it with the connection.

    With ``piece_bytes``, longer transfers of a tensor reach the server in pieces of that size
    (``pieces``), which the client does not notice.
    """

    def __init__(self, account: MemoryAccount, *, piece_bytes: int | None = None) -> None:
        self._account = account
        self._piece_bytes = piece_bytes
        self._pieces: SetTensorPieces | None = None
        limits = Limits(
            set_tensor_bytes=account.memory_bytes + TENSOR_BYTES + 16, graph_bytes=_GRAPH_BYTES
        )
        self._requests = RequestParser(
            None, limits, streamed=frozenset({Command.SET_TENSOR, Command.GRAPH_COMPUTE})
        )
        self._answers = AnswerParser(streamed=frozenset({Command.GET_TENSOR}))
        self._owed: deque[_Owed] = deque()
        self._answer_bytes_left = 0
        self._buffers: dict[int, _HeldBuffer] = {}
        self._reserved_bytes = 0
        self._is_loading = True

    def from_client(self, data: Buffer) -> Flow:
        """Take bytes of the client.

        Raises:
            GuardError: they are malformed, or concern what the client does not hold.
        """
        flow = Flow([], [])
        try:
            for event in self._requests.feed(data):
                match event:
                    case StreamData() if self._pieces is not None:
                        flow.to_server.extend(self._pieces.data(event.data))
                    case StreamData():
                        flow.to_server.append(event.data)
                    case StreamStart():
                        flow.to_server.extend(self._begin_stream(event))
                    case Message():
                        self._pass_request(event, flow)
        except WireError as error:
            raise GuardError(f"From the client: {error.message}") from error
        return flow

    def from_server(self, data: Buffer) -> Flow:
        """Take bytes of the server.

        Raises:
            GuardError: they are not answers to what was asked.
        """
        flow = Flow([], [])
        try:
            for event in self._answers.feed(data):
                match event:
                    case StreamData():
                        flow.to_client.append(event.data)
                        self._answer_bytes_left -= len(event.data)
                    case StreamStart():
                        if (whole_bytes := self._owed[0].whole_bytes) is not None:
                            flow.to_client.append(answer_header(whole_bytes))
                        self._answer_bytes_left = event.data_bytes
                    case Message():
                        answer = self._take_answer(self._owed[0], event.payload)
                        flow.to_client.append(encode_answer(answer))
                if not self._answer_bytes_left:
                    self._owed.popleft()
                    self._give_own_answers(flow)
        except WireError as error:
            raise GuardError(f"From the server: {error.message}") from error
        return flow

    @property
    def is_owed(self) -> bool:
        """Whether the client waits for an answer of the server."""
        return bool(self._owed)

    def close(self) -> None:
        """Give back what the connection held: the server frees it when the connection ends."""
        for held in self._buffers.values():
            self._release(held)
        self._buffers.clear()
        self._account.allocated_bytes -= self._reserved_bytes
        self._reserved_bytes = 0

    def _release(self, held: _HeldBuffer) -> None:
        self._account.allocated_bytes -= held.size_bytes
        self._account.tensor_bytes -= held.tensor_bytes

    def _dialect(self) -> Dialect:
        if self._requests.dialect is None:
            raise WireError("HELLO was not answered.")
        return self._requests.dialect

    def _begin_stream(self, start: StreamStart) -> list[Buffer]:
        self._pieces = None
        if start.command == Command.GRAPH_COMPUTE:
            self._is_loading = False
            (node_count,) = _NODE_COUNT.unpack(start.head)
            tensors_bytes = start.data_bytes - 4 - 8 * node_count
            if tensors_bytes < 0 or tensors_bytes % TENSOR_BYTES:
                raise WireError(f"A graph of {node_count} nodes cannot have its size.")
        else:
            held = self._held(start.head, start.data_bytes)
            self._count_tensor(held, start.head, start.data_bytes)
            if self._piece_bytes is not None:
                self._pieces = SetTensorPieces(self._dialect(), self._piece_bytes)
                return self._pieces.begin(start.head, start.data_bytes)
        size = len(start.head) + start.data_bytes
        return [request_header(start.command, size), start.head]

    def _held(self, tensor: Buffer, data_bytes: int = 0) -> _HeldBuffer:
        """Return the buffer of a tensor, which must have room for ``data_bytes``."""
        (pointer,) = _BUFFER_OF_TENSOR.unpack_from(tensor)
        held = self._buffers.get(pointer)
        if held is None:
            raise WireError("A tensor names a buffer that the client does not hold.")
        if data_bytes > held.size_bytes:
            raise WireError(
                f"{data_bytes} bytes of a tensor cannot lie in {held.size_bytes} bytes of buffer."
            )
        return held

    def _count_tensor(self, held: _HeldBuffer, tensor: Buffer, data_bytes: int) -> None:
        # The scheduler names its copies "<backend>#<tensor>#<number>"; no weight has a "#".
        if self._is_loading and b"#" not in bytes(tensor[_NAME_AT : _NAME_AT + 64]):
            counted = min(data_bytes, held.size_bytes - held.tensor_bytes)
            held.tensor_bytes += counted
            self._account.tensor_bytes += counted

    def _pass_request(self, message: Message, flow: Flow) -> None:
        command, payload = message
        if command == Command.GET_TENSOR:
            self._pass_get_tensor(messages.GET_TENSOR.parse(payload), flow)
            return
        owed = self._owed_for(command, payload)
        if command == Command.HELLO:
            # A transport other than TCP would not pass through here.
            payload = memoryview(messages.PLAIN_TCP)
        if owed is None or owed.own_answer is None:
            flow.to_server.append(encode_request(command, payload))
        if owed is None:
            return
        self._check_waiting()
        if owed.own_answer is None:
            self._answers.expect(command, owed.size_bytes)
        self._owed.append(owed)
        self._give_own_answers(flow)

    def _pass_get_tensor(self, request: messages.GetTensor, flow: Flow) -> None:
        self._held(request.tensor, request.size_bytes)
        self._check_waiting()
        whole_bytes: int | None = request.size_bytes
        for piece in get_tensor_pieces(request, self._piece_bytes or max(1, request.size_bytes)):
            flow.to_server.append(
                encode_request(Command.GET_TENSOR, messages.GET_TENSOR.build(piece))
            )
            self._answers.expect(Command.GET_TENSOR, piece.size_bytes)
            self._owed.append(
                _Owed(Command.GET_TENSOR, size_bytes=piece.size_bytes, whole_bytes=whole_bytes)
            )
            whole_bytes = None

    def _check_waiting(self) -> None:
        if len(self._owed) >= _MAX_UNANSWERED:
            raise WireError(f"More than {_MAX_UNANSWERED} requests wait for answers.")

    def _owed_for(self, command: Command, payload: memoryview) -> _Owed | None:
        """Check a request and return the answer that it will get, if any."""
        if command == Command.HELLO:
            return _Owed(command, size_bytes=4 + len(messages.PLAIN_TCP))
        if command == Command.ALLOC_BUFFER:
            return self._reserve(messages.ALLOC_BUFFER.parse(payload).size_bytes)
        answer_bytes = self._dialect().answer_bytes.get(command)
        owed = None if answer_bytes is None else _Owed(command, size_bytes=answer_bytes)
        match command:
            case Command.FREE_BUFFER:
                self._release(self._take_buffer(payload))
            case Command.BUFFER_CLEAR | Command.BUFFER_GET_BASE:
                self._known(payload)
            case Command.INIT_TENSOR | Command.MEMSET_TENSOR:
                self._held(payload)
            case Command.COPY_TENSOR:
                self._held(payload)
                self._held(payload[TENSOR_BYTES:])
            case Command.SET_TENSOR_HASH if owed is not None:
                self._held(payload)
                owed.tensor = bytes(payload[:TENSOR_BYTES])
            case Command.GRAPH_RECOMPUTE:
                self._is_loading = False
        return owed

    def _known(self, payload: memoryview) -> int:
        pointer = int.from_bytes(payload[:8], "little")
        if pointer not in self._buffers:
            raise WireError("A command names a buffer that the client does not hold.")
        return pointer

    def _take_buffer(self, payload: memoryview) -> _HeldBuffer:
        return self._buffers.pop(self._known(payload))

    def _reserve(self, size_bytes: int) -> _Owed:
        account = self._account
        fits = account.allocated_bytes + size_bytes <= account.memory_bytes
        if not fits or len(self._buffers) >= _MAX_BUFFERS:
            return _Owed(Command.ALLOC_BUFFER, own_answer=_NO_BUFFER)
        account.allocated_bytes += size_bytes
        self._reserved_bytes += size_bytes
        return _Owed(
            Command.ALLOC_BUFFER,
            size_bytes=messages.ALLOCATED_BUFFER.size_bytes,
            reserved_bytes=size_bytes,
        )

    def _give_own_answers(self, flow: Flow) -> None:
        """Answer what is next in turn, as far as the guard itself has the answer."""
        while self._owed and (answer := self._owed[0].own_answer) is not None:
            self._owed.popleft()
            flow.to_client.append(answer)

    def _take_answer(self, owed: _Owed, payload: memoryview) -> Buffer:
        """Learn from an answer of the server; return what the client is to see."""
        match owed.command:
            case Command.HELLO:
                version = messages.parse_hello_answer(payload)
                self._requests.dialect = dialect_of(version)
                return messages.build_hello_answer(version)
            case Command.ALLOC_BUFFER:
                self._settle(owed, messages.ALLOCATED_BUFFER.parse(payload))
            case Command.SET_TENSOR_HASH if messages.RESULT.parse(payload).done:
                self._count_hash_hit(owed.tensor)
            case Command.GET_DEVICE_MEMORY:
                return self._cap(messages.DEVICE_MEMORY.parse(payload))
        return payload

    def _settle(self, owed: _Owed, allocated: messages.AllocatedBuffer) -> None:
        """Turn a reservation into a buffer, of the size that the server really took."""
        account = self._account
        account.allocated_bytes -= owed.reserved_bytes
        self._reserved_bytes -= owed.reserved_bytes
        if allocated.buffer:
            size_bytes = max(allocated.size_bytes, owed.reserved_bytes)
            account.allocated_bytes += size_bytes
            self._buffers[allocated.buffer] = _HeldBuffer(size_bytes)

    def _count_hash_hit(self, tensor: bytes) -> None:
        record = parse_tensors(tensor)[0]
        # The outermost stride times its count spans any contiguous tensor, quantized or not.
        size_bytes = int(record["nb"][3]) * int(record["ne"][3])
        self._count_tensor(self._held(tensor), tensor, size_bytes)

    def _cap(self, memory: messages.DeviceMemory) -> bytes:
        account = self._account
        left_bytes = max(0, account.memory_bytes - account.allocated_bytes)
        capped = messages.DeviceMemory(
            free_bytes=min(memory.free_bytes, left_bytes),
            total_bytes=min(memory.total_bytes, account.memory_bytes),
        )
        return messages.DEVICE_MEMORY.build(capped)
