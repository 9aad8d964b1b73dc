"""The header of a GGUF file: key-value pairs and tensor descriptions, without any weight.

Format: GGUF versions 2 and 3, little-endian (``docs/gguf.md`` of the ggml project). What llama.cpp
would refuse or crash on is refused here, by name.
"""

import struct
from dataclasses import dataclass
from typing import Final, NoReturn

from linkcpp.common.errors import LinkcppError
from linkcpp.model.cursor import HeaderCursor
from linkcpp.model.ggml_types import TYPES_BY_NUMBER, GgmlType
from linkcpp.model.source import ByteSource

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAXIMUM_NAME_BYTES: Final = 63  # GGML_MAX_NAME less its terminator
MAXIMUM_DIMENSIONS: Final = 4
MAXIMUM_ELEMENTS: Final = 2**63 - 1
# Longer arrays (token lists, merges) are passed over; per-layer numbers are far shorter.
MAX_KEPT_ARRAY_ITEMS: Final = 1024
MAX_KEPT_STRING_BYTES: Final = 2**16
# Far above any real model; they bound what a hostile header can make us build.
MAXIMUM_PAIRS: Final = 2**12
MAXIMUM_STRINGS: Final = 2**22
MAX_KEY_BYTES: Final = 2**16 - 1
MAXIMUM_TENSORS: Final = 2**17
SMALLEST_PAIR_BYTES: Final = 8 + 4 + 1
SMALLEST_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8

STRING_TYPE, ARRAY_TYPE = 8, 9
SCALARS: Final = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip

_OTHER_FORMATS = (
    (b"version https://git-lfs", "a Git LFS pointer: the model itself was not downloaded"),
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?)"),
    (b"\x80", "a Python pickle (a PyTorch checkpoint?)"),
    (b"<", "a web page: the download got an HTML answer"),
    (b"lmgg", "in the old GGML format"),
    (b"tjgg", "in the old GGJT format"),
    (b"fmgg", "in the old GGMF format"),
)


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """An array that was passed over: only its length is kept."""

    count: int


Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...] | SkippedArray | None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header describes it.

    ``shape`` is in ggml order (fastest dimension first); ``offset_bytes`` counts from the start of
    the file.
    """

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header; ``digest`` is the SHA-256 of its bytes up to the tensor data."""

    version: int
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset_bytes: int
    digest: bytes


def read_header(source: ByteSource) -> Header:
    """Read and check the header of one GGUF file.

    Raises:
        LinkcppError: the source is not GGUF, is cut off, or breaks the format; says how.
    """
    cursor = HeaderCursor(source)
    version = _read_preamble(cursor, source)
    tensor_count, pair_count = cursor.u64(), cursor.u64()
    if tensor_count > MAXIMUM_TENSORS or pair_count > MAXIMUM_PAIRS:
        _refuse(source, f"it claims {tensor_count} tensors and {pair_count} keys")
    cursor.check_room(tensor_count * SMALLEST_TENSOR_BYTES + pair_count * SMALLEST_PAIR_BYTES)
    metadata: dict[str, Value] = {}
    for _ in range(pair_count):
        raw_key = cursor.string()
        if len(raw_key) > MAX_KEY_BYTES:
            _refuse(source, f"a key has {len(raw_key)} bytes; GGUF allows {MAX_KEY_BYTES}")
        key = _text(raw_key, source, "a key")
        if key in metadata:
            _refuse(source, f"it has the key {key} twice")
        metadata[key] = _read_value(cursor, cursor.u32(), source)
    alignment = _alignment(metadata, source)
    described = [_read_tensor(cursor, source) for _ in range(tensor_count)]
    digest = cursor.digest()
    data_offset = _pad(cursor.position_bytes, alignment)
    tensors = tuple(
        TensorInfo(name, kind, shape, data_offset + offset, size)
        for name, kind, shape, offset, size in described
    )
    _check_layout(tensors, data_offset, alignment, source)
    return Header(version, metadata, tensors, data_offset, digest)


def _read_preamble(cursor: HeaderCursor, source: ByteSource) -> int:
    opening = source.read(0, min(source.size_bytes, 32))
    if not opening.startswith(MAGIC):
        what = next((text for start, text in _OTHER_FORMATS if opening.startswith(start)), None)
        raise LinkcppError(
            f"{source.name} is not a GGUF file" + (f"; it is {what}." if what else "."),
            hint="Give a model in GGUF format; llama.cpp's convert_hf_to_gguf.py makes one.",
        )
    cursor.skip(len(MAGIC))
    version = cursor.u32()
    if version not in VERSIONS:
        if version & 0xFFFF == 0 and version:
            _refuse(source, "it is big-endian; llama.cpp reads that on big-endian machines only")
        _refuse(source, f"it has GGUF version {version}; versions 2 and 3 are known")
    return version


def _read_value(cursor: HeaderCursor, kind: int, source: ByteSource) -> Value:
    if kind == STRING_TYPE:
        length = cursor.u64()
        if length > MAX_KEPT_STRING_BYTES:
            cursor.skip(length)
            return None
        return cursor.take(length).decode("utf-8", "replace")
    if kind == ARRAY_TYPE:
        return _read_array(cursor, source)
    scalar = SCALARS.get(kind)
    if scalar is None:
        _refuse(source, f"a value has the unknown type {kind}")
    value: Scalar = scalar.unpack(cursor.take(scalar.size))[0]
    return value


def _read_array(cursor: HeaderCursor, source: ByteSource) -> Value:
    kind, count = cursor.u32(), cursor.u64()
    if kind == STRING_TYPE:
        if count > MAXIMUM_STRINGS:
            _refuse(source, f"it has a list of {count} texts, more than any vocabulary")
        cursor.skip_strings(count)
    elif kind == ARRAY_TYPE:
        _refuse(source, "it has an array of arrays, which llama.cpp does not read")
    elif kind in SCALARS:
        size = SCALARS[kind].size
        if count <= MAX_KEPT_ARRAY_ITEMS:
            letter = SCALARS[kind].format[-1:]
            return struct.unpack(f"<{count}{letter}", cursor.take(size * count))
        cursor.skip(size * count)
    else:
        _refuse(source, f"an array has the unknown element type {kind}")
    return SkippedArray(count)


def _read_tensor(
    cursor: HeaderCursor, source: ByteSource
) -> tuple[str, GgmlType, tuple[int, ...], int, int]:
    raw_name = cursor.string()
    if len(raw_name) > MAXIMUM_NAME_BYTES:
        _refuse(source, f"a tensor's name has {len(raw_name)} bytes; ggml allows 63")
    name = _text(raw_name, source, "a tensor's name")
    dimensions = cursor.u32()
    if not 1 <= dimensions <= MAXIMUM_DIMENSIONS:
        _refuse(source, f"tensor {name} has {dimensions} dimensions; ggml allows 1 to 4")
    shape = tuple(cursor.u64() for _ in range(dimensions))
    number, offset = cursor.u32(), cursor.u64()
    kind = TYPES_BY_NUMBER.get(number)
    if kind is None:
        _refuse(source, f"tensor {name} has the unknown or withdrawn type {number}")
    return name, kind, shape, offset, _size_bytes(name, kind, shape, source)


def _size_bytes(name: str, kind: GgmlType, shape: tuple[int, ...], source: ByteSource) -> int:
    elements = 1
    for extent in shape:
        elements *= extent
        if not 0 < elements <= MAXIMUM_ELEMENTS:
            _refuse(source, f"tensor {name} has the impossible shape {_shape_text(shape)}")
    try:
        return kind.row_bytes(shape[0]) * (elements // shape[0])
    except ValueError as error:
        _refuse(source, f"tensor {name}: {error}")


def _check_layout(
    tensors: tuple[TensorInfo, ...], data_offset: int, alignment: int, source: ByteSource
) -> None:
    """Hold the tensor data to what llama.cpp accepts: packed, aligned, in order, and there."""
    names: set[str] = set()
    expected = data_offset
    for tensor in tensors:
        if tensor.name in names:
            _refuse(source, f"it has the tensor {tensor.name} twice")
        names.add(tensor.name)
        start, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
        if (start - data_offset) % alignment:
            _refuse(source, f"tensor {tensor.name} does not start at a multiple of {alignment}")
        if start < expected:
            _refuse(source, f"tensor {tensor.name} overlaps another one")
        if end > source.size_bytes:
            raise LinkcppError(
                f"{source.name} is truncated: tensor {tensor.name} ends at byte {end}, but the "
                f"file has {source.size_bytes}.",
                hint="Download or copy it again; the transfer was cut off.",
            )
        if start > expected:
            _refuse(source, f"there is a gap before tensor {tensor.name}")
        expected = _pad(end, alignment)


def _alignment(metadata: dict[str, Value], source: ByteSource) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**31 or alignment & (alignment - 1):
        _refuse(source, "general.alignment is not a power of two")
    return alignment


def _text(raw: bytes, source: ByteSource, what: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        _refuse(source, f"{what} is not printable text")
    return text


def _pad(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(str(extent) for extent in shape)


def _refuse(source: ByteSource, why: str) -> NoReturn:
    raise LinkcppError(
        f"{source.name} is not a sound GGUF file: {why}.",
        hint="Download or copy it again, or convert the model anew.",
    )
