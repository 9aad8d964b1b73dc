"""Writing a GGUF header (version 3, ``docs/gguf.md`` of the ggml project)."""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from linkcpp.model.ggml_types import GgmlType
from linkcpp.model.header import (
    ARRAY_TYPE,
    DEFAULT_ALIGNMENT,
    MAGIC,
    SCALARS,
    STRING_TYPE,
)

U32_TYPE: Final = 4
VERSION: Final = 3

Pair = tuple[str, int | str | tuple[int, ...]]


class NewTensor(NamedTuple):
    """A tensor of a file to be written; ``shape`` is in ggml order."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    size_bytes: int


def encode_header(pairs: Iterable[Pair], tensors: Iterable[NewTensor]) -> tuple[bytes, list[int]]:
    """Write a header up to the first tensor's data.

    Whole numbers are written as u32, tuples as arrays of u32. Returns the header and where in the
    file each tensor starts.
    """
    pairs, tensors = list(pairs), list(tensors)
    head = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(pairs)))
    for key, value in pairs:
        head += _string(key) + _value(value)
    offsets = []
    offset = 0
    for tensor in tensors:
        head += _string(tensor.name)
        head += struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        head += struct.pack("<IQ", tensor.kind.number, offset)
        offsets.append(offset)
        offset += padded(tensor.size_bytes)
    head += bytes(-len(head) % DEFAULT_ALIGNMENT)
    return bytes(head), [len(head) + start for start in offsets]


def padded(size_bytes: int) -> int:
    """A size with what follows it up to the next multiple of the alignment."""
    return -(-size_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: int | str | tuple[int, ...]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING_TYPE) + _string(value)
    if isinstance(value, tuple):
        head = struct.pack("<IIQ", ARRAY_TYPE, U32_TYPE, len(value))
        return head + struct.pack(f"<{len(value)}I", *value)
    return struct.pack("<I", U32_TYPE) + SCALARS[U32_TYPE].pack(value)
