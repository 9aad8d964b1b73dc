"""Where a client's tensors are on the backing server, and its SETs and GETs as requests for that.

llama-server names the same tensors with every token, so what was found is kept, by the bytes of the
record.
"""

from typing import NamedTuple

from linkcpp.dispatch.memory import RequestError, VirtualMemory, tensor_fields, with_address
from linkcpp.dispatch.program import expert_owner
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.wire import Command, Dialect, encode_request, request_header

_MAX_RECORDS = 8192


class Placed(NamedTuple):
    """A tensor of a client: its record for the backing server, its address for the client."""

    record: bytes
    data: int
    span_bytes: int


class SetHead(NamedTuple):
    """The backing server's request before the data of a SET, and the client's address."""

    request: bytes
    address: int


class GetRequest(NamedTuple):
    """The backing server's request for a GET, the answer's size, and the client's address."""

    request: bytes
    size_bytes: int
    address: int


class TensorPlaces:
    """The tensors of one client. Everything raises ``RequestError`` for what cannot be."""

    def __init__(self, memory: VirtualMemory, dialect: Dialect) -> None:
        self._memory = memory
        self._dialect = dialect
        self._records: dict[bytes, Placed | None] = {}
        self._set_heads: dict[tuple[bytes, int], SetHead] = {}
        self._gets: dict[bytes, GetRequest] = {}

    def forget(self) -> None:
        """Forget what was found: memory was freed."""
        self._records.clear()
        self._set_heads.clear()
        self._gets.clear()

    def find(self, record: bytes) -> Placed | None:
        """Look a tensor up by its record; ``None`` for an expert's weight, which is nowhere."""
        if record in self._records:
            return self._records[record]
        fields = tensor_fields(record)
        if not fields.buffer:
            raise RequestError("A tensor has no buffer.")
        placed = None
        if expert_owner(fields.name) is None:
            real = with_address(record, self._memory.locate(fields))
            placed = Placed(real, fields.data, fields.span_bytes)
        else:
            self._memory.drop(fields.buffer)
        if len(self._records) >= _MAX_RECORDS:
            self._records.clear()
        self._records[record] = placed
        return placed

    def part(self, record: bytes, offset: int, size_bytes: int) -> Placed | None:
        """Look a tensor up of which a part is used."""
        placed = self.find(record)
        if placed is not None and offset + size_bytes > placed.span_bytes:
            raise RequestError("A request reaches past the end of its tensor.")
        return placed

    def whole(self, record: bytes) -> Placed:
        """Look a tensor up that must not be an expert's weight."""
        placed = self.find(record)
        if placed is None:
            raise RequestError("The weights of experts cannot be read back or copied.")
        return placed

    def set_head(self, payload: memoryview) -> SetHead | None:
        """Return what stands before the data; ``None`` for an expert's weight, which is dropped."""
        head_bytes = self._dialect.set_tensor_head_bytes
        size_bytes = len(payload) - head_bytes
        key = bytes(payload[:head_bytes]), size_bytes
        known = self._set_heads.get(key)
        if known is None:
            known = self._bind_set(payload, size_bytes)
            if known is None:
                return None
            if len(self._set_heads) >= _MAX_RECORDS:
                self._set_heads.clear()
            self._set_heads[key] = known
        return known

    def _bind_set(self, payload: memoryview, size_bytes: int) -> SetHead | None:
        head = messages.parse_set_tensor_head(self._dialect, payload)
        placed = self.part(head.tensor, head.offset, size_bytes)
        if placed is None:
            return None
        real = messages.build_set_tensor_head(
            self._dialect, messages.SetTensor(placed.record, head.offset, False)
        )
        request = request_header(Command.SET_TENSOR, len(real) + size_bytes) + real
        return SetHead(request, placed.data + head.offset)

    def get_request(self, payload: memoryview) -> GetRequest:
        """Return what to ask the backing server for."""
        key = bytes(payload)
        known = self._gets.get(key)
        if known is None:
            if len(self._gets) >= _MAX_RECORDS:
                self._gets.clear()
            known = self._gets[key] = self._bind_get(key)
        return known

    def _bind_get(self, payload: bytes) -> GetRequest:
        request = messages.GET_TENSOR.parse(payload)
        placed = self.whole(request.tensor)
        if request.offset + request.size_bytes > placed.span_bytes:
            raise RequestError("GET_TENSOR reaches past the end of its tensor.")
        real = messages.GetTensor(placed.record, request.offset, request.size_bytes)
        wanted = encode_request(Command.GET_TENSOR, messages.GET_TENSOR.build(real))
        return GetRequest(wanted, request.size_bytes, placed.data + request.offset)
