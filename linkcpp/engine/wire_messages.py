"""Payloads of the ggml-RPC commands, other than graphs: values to bytes and back.

Tensor records inside messages stay bytes (``wire_tensor.parse_tensors`` views them as numbers).
"""

import struct
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from linkcpp.engine.records import RpcVersion
from linkcpp.engine.wire import CAPABILITY_BYTES, TENSOR_BYTES, Buffer, Dialect, WireError

_Value = TypeVar("_Value", bound=tuple[Any, ...])


class Payload(Generic[_Value]):
    """A payload of fixed size: how a named tuple is packed."""

    def __init__(self, kind: Callable[..., _Value], layout: str) -> None:
        self._kind = kind
        self._struct = struct.Struct(layout)
        self.size_bytes = self._struct.size

    def build(self, value: _Value) -> bytes:
        """Write the payload."""
        return self._struct.pack(*value)

    def parse(self, payload: Buffer) -> _Value:
        """Read the payload.

        Raises:
            WireError: it has another size.
        """
        if len(payload) != self.size_bytes:
            raise WireError(f"A payload has {len(payload)} bytes instead of {self.size_bytes}.")
        return self._kind(*self._struct.unpack(payload))


class DeviceIndex(NamedTuple):
    """GET_ALIGNMENT, GET_MAX_SIZE, GET_DEVICE_MEMORY, GRAPH_RECOMPUTE: which device."""

    device: int


class Number(NamedTuple):
    """An answer that is one number: a size, an alignment, a base address, a device count."""

    value: int


class Result(NamedTuple):
    """SET_TENSOR_HASH and COPY_TENSOR: whether it was done."""

    done: int


class BufferPointer(NamedTuple):
    """BUFFER_GET_BASE and FREE_BUFFER: which buffer."""

    buffer: int


class AllocBuffer(NamedTuple):
    """ALLOC_BUFFER."""

    device: int
    size_bytes: int


class AllocatedBuffer(NamedTuple):
    """The answer to ALLOC_BUFFER; both are zero where the allocation failed."""

    buffer: int
    size_bytes: int


class BufferClear(NamedTuple):
    """BUFFER_CLEAR: fill a buffer with one byte."""

    buffer: int
    value: int


class TensorHash(NamedTuple):
    """SET_TENSOR_HASH: do you have data of this FNV-1a-64 hash to put there?"""

    tensor: bytes
    offset: int
    data_hash: int


class GetTensor(NamedTuple):
    """GET_TENSOR."""

    tensor: bytes
    offset: int
    size_bytes: int


class CopyTensor(NamedTuple):
    """COPY_TENSOR, both on this server."""

    source: bytes
    destination: bytes


class GetAllocSize(NamedTuple):
    """GET_ALLOC_SIZE: ``sources`` are ten tensor records."""

    device: int
    tensor: bytes
    sources: bytes


class MemsetTensor(NamedTuple):
    """MEMSET_TENSOR: fill a part of a tensor with one byte."""

    tensor: bytes
    offset: int
    size_bytes: int
    value: int


class DeviceMemory(NamedTuple):
    """The answer to GET_DEVICE_MEMORY."""

    free_bytes: int
    total_bytes: int


class _HelloAnswer(NamedTuple):
    major: int
    minor: int
    patch: int
    capabilities: bytes


_TENSOR = f"{TENSOR_BYTES}s"
DEVICE_INDEX = Payload(DeviceIndex, "<I")
DEVICE_COUNT_ANSWER = Payload(Number, "<I")
NUMBER = Payload(Number, "<Q")
RESULT = Payload(Result, "<B")
BUFFER_POINTER = Payload(BufferPointer, "<Q")
ALLOC_BUFFER = Payload(AllocBuffer, "<IQ")
ALLOCATED_BUFFER = Payload(AllocatedBuffer, "<QQ")
BUFFER_CLEAR = Payload(BufferClear, "<QB")
TENSOR_HASH = Payload(TensorHash, f"<{_TENSOR}QQ")
GET_TENSOR = Payload(GetTensor, f"<{_TENSOR}QQ")
COPY_TENSOR = Payload(CopyTensor, f"<{_TENSOR}{_TENSOR}")
GET_ALLOC_SIZE = Payload(GetAllocSize, f"<I{_TENSOR}{10 * TENSOR_BYTES}s")
MEMSET_TENSOR = Payload(MemsetTensor, f"<{_TENSOR}QQB")
DEVICE_MEMORY = Payload(DeviceMemory, "<QQ")
_HELLO_ANSWER = Payload(_HelloAnswer, f"<BBBx{CAPABILITY_BYTES}s")

PLAIN_TCP = bytes(CAPABILITY_BYTES)
"""The capabilities of HELLO that ask for nothing beyond TCP."""


def build_hello_answer(version: RpcVersion, capabilities: bytes = PLAIN_TCP) -> bytes:
    """Write a server's answer to HELLO."""
    return _HELLO_ANSWER.build(
        _HelloAnswer(version.major, version.minor, version.patch, capabilities)
    )


def parse_hello_answer(payload: Buffer) -> RpcVersion:
    """Read the version out of a server's answer to HELLO.

    Raises:
        WireError: the answer has another size.
    """
    hello = _HELLO_ANSWER.parse(payload)
    return RpcVersion(major=hello.major, minor=hello.minor, patch=hello.patch)


class SetTensor(NamedTuple):
    """The head of a SET_TENSOR payload. ``may_cache`` is the flag byte of 7.x."""

    tensor: bytes
    offset: int
    may_cache: bool


_SET_TENSOR_4 = struct.Struct(f"<{_TENSOR}Q")
_SET_TENSOR_7 = struct.Struct(f"<{_TENSOR}BQ")


def build_set_tensor_head(dialect: Dialect, head: SetTensor) -> bytes:
    """Write what stands before the data in a SET_TENSOR payload."""
    if dialect.has_cache_flag:
        return _SET_TENSOR_7.pack(head.tensor, head.may_cache, head.offset)
    return _SET_TENSOR_4.pack(head.tensor, head.offset)


def parse_set_tensor_head(dialect: Dialect, payload: Buffer) -> SetTensor:
    """Read the head of a SET_TENSOR payload; the data begin at ``set_tensor_head_bytes``.

    Raises:
        WireError: the payload is shorter than the head.
    """
    if len(payload) < dialect.set_tensor_head_bytes:
        raise WireError(f"SET_TENSOR has {len(payload)} bytes, less than its fixed part.")
    if dialect.has_cache_flag:
        tensor, flag, offset = _SET_TENSOR_7.unpack_from(payload)
        return SetTensor(tensor, offset, bool(flag))
    tensor, offset = _SET_TENSOR_4.unpack_from(payload)
    return SetTensor(tensor, offset, False)
