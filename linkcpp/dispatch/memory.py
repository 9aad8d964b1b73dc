"""What llama-server allocates, and what of it exists on the backing server.

llama-server gets addresses of a space of its own. A buffer is allocated on the backing server when
something is first put there. One that holds experts is never allocated as a whole: what else is in
it (a scale, for instance) gets a buffer for itself, so the experts' size is only a number.
"""

import re
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.engine.rpc_socket import RpcSocket
from linkcpp.engine.wire_tensor import Tensors
from linkcpp.model.ggml_types import TYPES_BY_NUMBER

# Where user space never has anything on 64-bit systems, so a mix-up is noticed.
_FIRST_ADDRESS = 1 << 48
_PAGE_BYTES = 1 << 16
_ISLAND_PADDING_BYTES = 256
MAX_BUFFER_BYTES = 1 << 44
MAX_BUFFERS = 4096
_EXPERT_NAME = re.compile(rb"blk\.\d{1,6}\.ffn_\w*_exps\.")


class RequestError(LinkcppError):
    """A request of llama-server that cannot be: it breaks bounds or names what is not there."""


class Place(NamedTuple):
    """A buffer of the backing server and the address of its first byte."""

    buffer: int
    base: int


class Address(NamedTuple):
    """Where a tensor is: ``buffer`` and ``data`` of its record."""

    buffer: int
    data: int


@dataclass(slots=True)
class _Buffer:
    """A buffer of llama-server. ``islands`` are keyed by their offset."""

    size_bytes: int
    place: Place | None = None
    holds_experts: bool = False
    islands: dict[int, tuple[int, Place]] = field(default_factory=dict)


class TensorFields(NamedTuple):
    """What matters of a tensor record in bytes."""

    buffer: int
    data: int
    span_bytes: int
    name: bytes


_FIELDS = struct.Struct("<8xIQ4I4I168xQ64s4x")


def tensor_fields(record: bytes | memoryview) -> TensorFields:
    """Read a tensor record of 296 bytes.

    Raises:
        RequestError: its type is unknown.
    """
    number, buffer, n0, n1, n2, n3, b0, b1, b2, b3, data, name = _FIELDS.unpack(record)
    kind = TYPES_BY_NUMBER.get(number)
    if kind is None:
        raise RequestError(f"A tensor has the unknown type {number}.")
    blocks = -(-n0 // kind.block_elements)
    steps = ((blocks, b0), (n1, b1), (n2, b2), (n3, b3))
    span = kind.block_bytes + sum(max(count - 1, 0) * step for count, step in steps)
    return TensorFields(buffer, data, span, name.partition(b"\0")[0])


class VirtualMemory:
    """The buffers of one client. Not for several threads at once."""

    def __init__(self, backing: RpcSocket) -> None:
        self._backing = backing
        self._buffers: dict[int, _Buffer] = {}
        self._next = _FIRST_ADDRESS

    def allocate(self, size_bytes: int) -> int:
        """Return a new buffer, which is also the address of its first byte.

        Raises:
            RequestError: beyond any sensible size or number.
        """
        if size_bytes > MAX_BUFFER_BYTES or len(self._buffers) >= MAX_BUFFERS:
            raise RequestError(f"A buffer of {size_bytes} bytes is beyond what can be allocated.")
        handle = self._next
        self._next += -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES + _PAGE_BYTES
        self._buffers[handle] = _Buffer(size_bytes)
        return handle

    def free(self, handle: int) -> None:
        """Free a buffer and what exists of it.

        Raises:
            RequestError: there is none.
        """
        buffer = self._get(handle)
        del self._buffers[handle]
        places = [place for _, place in buffer.islands.values()]
        for place in [*places, *([buffer.place] if buffer.place else [])]:
            self._backing.free_buffer(place.buffer)

    def free_all(self) -> None:
        """Free every buffer."""
        for handle in list(self._buffers):
            self.free(handle)

    def check(self, handle: int) -> None:
        """Make sure that a buffer is there; raises as ``free``."""
        self._get(handle)

    def real(self, handle: int) -> Place:
        """Return the whole buffer on the backing server, allocating it now if need be.

        Raises:
            RequestError: there is no such buffer, or it holds experts.
            AllocationError: the backing server has too little memory.
        """
        buffer = self._get(handle)
        if buffer.holds_experts:
            raise RequestError("A buffer of expert weights cannot be used as a whole.")
        if buffer.place is None:
            buffer.place = Place(*self._backing.alloc_buffer(buffer.size_bytes))
        return buffer.place

    def drop(self, handle: int) -> None:
        """Take note that an expert's weights were sent; they go nowhere.

        Raises:
            RequestError: there is no such buffer.
        """
        self._get(handle).holds_experts = True

    def locate(self, fields: TensorFields, size_bytes: int | None = None) -> Address:
        """Return where a tensor is on the backing server, after checking its bounds.

        ``size_bytes`` is how far from its start it is used, its own span if not given.

        Raises:
            RequestError: it lies outside of its buffer.
        """
        if not fields.buffer:
            return Address(0, 0)
        buffer = self._get(fields.buffer)
        offset = fields.data - fields.buffer
        size = fields.span_bytes if size_bytes is None else size_bytes
        if offset < 0 or offset + size > buffer.size_bytes:
            raise RequestError(f"A tensor reaches outside of its buffer: {_show(fields.name)}.")
        if buffer.place is None and _EXPERT_NAME.match(fields.name):
            buffer.holds_experts = True
        if not buffer.holds_experts or buffer.place is not None:
            place = self.real(fields.buffer) if buffer.place is None else buffer.place
            return Address(place.buffer, place.base + offset)
        if offset not in buffer.islands:
            wanted = max(size, fields.span_bytes) + _ISLAND_PADDING_BYTES
            buffer.islands[offset] = (wanted, Place(*self._backing.alloc_buffer(wanted)))
        island_bytes, place = buffer.islands[offset]
        if size > island_bytes:
            raise RequestError(f"A tensor grew since it was first used: {_show(fields.name)}.")
        return Address(place.buffer, place.base)

    def translate(self, tensors: Tensors) -> Tensors:
        """Return the records with the backing server's buffers and addresses.

        Raises:
            RequestError: one lies outside of its buffer.
        """
        result = tensors.copy()
        for record in result.reshape(-1):
            address = self.locate(tensor_fields(record.tobytes()))
            record["buffer"], record["data"] = address
        return result

    def _get(self, handle: int) -> _Buffer:
        buffer = self._buffers.get(handle)
        if buffer is None:
            raise RequestError(f"There is no buffer {handle:#x}.")
        return buffer


def with_address(record: bytes | memoryview, address: Address) -> bytes:
    """Return a tensor record with another buffer and address."""
    return b"".join(
        (
            record[:12],
            address.buffer.to_bytes(8, "little"),
            record[20:220],
            address.data.to_bytes(8, "little"),
            record[228:],
        )
    )


def without_address(records: bytes | memoryview) -> bytes:
    """Return tensor records that are nowhere: only types and shapes matter."""
    fields = np.frombuffer(records, np.uint8).reshape(-1, 296).copy()
    fields[:, 12:20] = 0
    fields[:, 220:228] = 0
    return fields.tobytes()


def _show(name: bytes) -> str:
    return printable(name.decode("utf-8", "replace")) or "no name"
