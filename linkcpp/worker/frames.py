"""Compute frames: what a virtual device and an expert worker say to each other. Pure.

The format is described in ``docs/wire.md``, with an example in bytes. Everything is little-endian.
Sizes are checked against the limits as soon as the header is there, before anything is allocated.
"""

import functools
import hmac
import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from linkcpp.common.errors import LinkcppError
from linkcpp.common.records import WireRecord
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.chain import Chain, KeyedChain

MAGIC = b"LCFR"
VERSION = 1
HEADER = struct.Struct("<4sBBHII")
HEADER_BYTES = HEADER.size
COMPUTE = struct.Struct("<IIIIIBBH")
_ROWS = struct.Struct("<IIIBxxx")
_CHAIN_HEAD = struct.Struct("<I")
_ERROR = struct.Struct("<HH")
_SENTENCE_BYTES = 1000

Buffer = bytes | bytearray | memoryview
Rows = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int32]


class FrameType(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    CHAIN = 3
    CHAIN_READY = 4
    COMPUTE = 5
    ROWS = 6
    PING = 7
    PONG = 8
    ERROR = 9


_FRAME_TYPES = {int(kind): kind for kind in FrameType}


class ErrorCode(IntEnum):
    """Why a frame was refused. After the first three the link ends, else it lives on."""

    BAD_FRAMING = 1
    BAD_VERSION = 2
    BAD_TOKEN = 3
    TOO_LARGE = 4
    BAD_PAYLOAD = 5
    UNKNOWN_CHAIN = 6
    BAD_CHAIN = 7
    UNKNOWN_LAYER = 8
    UNKNOWN_EXPERT = 9
    WRONG_WIDTH = 10
    ENGINE_FAILED = 11
    TOO_MANY_LINKS = 12


ENDING_CODES = frozenset({ErrorCode.BAD_FRAMING, ErrorCode.BAD_VERSION, ErrorCode.BAD_TOKEN})


class DataType(IntEnum):
    """How the elements of rows travel."""

    F32 = 0
    F16 = 1


_FEW_PAIRS = 64
_DATA_TYPES = {int(kind): kind for kind in DataType}
_NUMPY_TYPES: dict[int, np.dtype[Any]] = {
    DataType.F32: np.dtype("<f4"),
    DataType.F16: np.dtype("<f2"),
}


class FrameError(LinkcppError):
    """A frame that is refused: a code for programs and a sentence for people."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Limits(WireRecord):
    """What one frame may ask for: ``rows`` and ``pairs`` are those of one COMPUTE."""

    frame_bytes: int = 256 * 2**20
    rows: int = 1 << 16
    pairs: int = 1 << 16


class Welcome(WireRecord):
    """A worker tells what it holds: ``hidden_size`` is the width of a token's row."""

    model_digest: str
    hidden_size: int
    segments: tuple[Segment, ...]
    engine: str
    limits: Limits
    name: str


class Header(NamedTuple):
    """The sixteen bytes before a payload."""

    kind: FrameType
    flags: int
    request_id: int
    payload_bytes: int


def pack_header(kind: FrameType, request_id: int, payload_bytes: int) -> bytes:
    """Write a header."""
    return HEADER.pack(MAGIC, VERSION, kind, 0, request_id, payload_bytes)


def parse_header(data: Buffer, limits: Limits, at: int = 0) -> Header:
    """Read a header of ``HEADER_BYTES``, ``at`` bytes from the start.

    Raises:
        FrameError: no frame of this version, of unknown type, with flags, or beyond the limit.
    """
    magic, version, kind, flags, request_id, payload_bytes = HEADER.unpack_from(data, at)
    if magic != MAGIC:
        raise FrameError(ErrorCode.BAD_FRAMING, "These bytes are not a compute frame.")
    if version != VERSION:
        raise FrameError(
            ErrorCode.BAD_VERSION, f"Compute frames have version {VERSION} here, not {version}."
        )
    frame_type = _FRAME_TYPES.get(kind)
    if frame_type is None:
        raise FrameError(ErrorCode.BAD_FRAMING, f"There is no frame of type {kind}.")
    if flags:
        raise FrameError(ErrorCode.BAD_FRAMING, f"Version {VERSION} has no flags, not {flags:#x}.")
    if payload_bytes > limits.frame_bytes:
        raise FrameError(
            ErrorCode.BAD_FRAMING,
            f"A frame of {payload_bytes} bytes is beyond the limit of {limits.frame_bytes}.",
        )
    return Header(frame_type, flags, request_id, payload_bytes)


def pack_hello(token: str) -> bytes:
    """Write the first frame of a connection."""
    payload = token.encode()
    return pack_header(FrameType.HELLO, 0, len(payload)) + payload


def check_hello(header: Header, payload: Buffer, token: str) -> None:
    """Hold the first frame against the token, in constant time.

    Raises:
        FrameError: it is not a HELLO, or has another token.
    """
    if header.kind != FrameType.HELLO:
        raise FrameError(ErrorCode.BAD_TOKEN, "The first frame must be HELLO with the token.")
    if not hmac.compare_digest(bytes(payload), token.encode()):
        raise FrameError(ErrorCode.BAD_TOKEN, "The token is wrong.")


def pack_welcome(welcome: Welcome) -> bytes:
    """Write the answer to HELLO."""
    payload = welcome.model_dump_json().encode()
    return pack_header(FrameType.WELCOME, 0, len(payload)) + payload


def parse_welcome(payload: Buffer) -> Welcome:
    """Read the answer to HELLO.

    Raises:
        FrameError: it is not what a worker would say.
    """
    try:
        return Welcome.model_validate_json(bytes(payload))
    except ValidationError as error:
        raise FrameError(ErrorCode.BAD_PAYLOAD, f"WELCOME is not sound: {error}.") from error


def pack_chain(request_id: int, chain_id: int, chain: Chain) -> bytes:
    """Write CHAIN: from now on ``chain_id`` means this chain on this connection."""
    payload = _CHAIN_HEAD.pack(chain_id) + chain.model_dump_json().encode()
    return pack_header(FrameType.CHAIN, request_id, len(payload)) + payload


def parse_chain(payload: Buffer) -> tuple[int, Chain]:
    """Read CHAIN.

    Raises:
        FrameError: it is none.
    """
    if len(payload) < _CHAIN_HEAD.size:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "CHAIN is too short.")
    (chain_id,) = _CHAIN_HEAD.unpack_from(payload)
    try:
        fields: Any = json.loads(bytes(payload[_CHAIN_HEAD.size :]))
        return chain_id, Chain.model_validate(fields)
    except (ValueError, RecursionError) as error:
        text = f"CHAIN is not sound: {error}"
        raise FrameError(ErrorCode.BAD_CHAIN, text[:_SENTENCE_BYTES]) from error


class Pairs(NamedTuple):
    """What to compute: pair k is row ``row_index[k]`` through expert ``expert_ids[k]`` of a layer.

    ``inputs[0]`` has (row_count, width) elements, every further input one row a pair. The same
    pair may come twice and is then answered twice. Rows that are not finite are computed like any
    other, as the engine does it.
    """

    layer: int
    row_index: Numbers
    expert_ids: Numbers
    inputs: tuple[Rows, ...]


class Compute(NamedTuple):
    """A COMPUTE frame."""

    chain_id: int
    pairs: Pairs
    answer_type: DataType = DataType.F32


def pack_compute(
    request_id: int, compute: Compute, row_type: DataType = DataType.F32
) -> list[Buffer]:
    """Write COMPUTE, as buffers to be sent one after the other."""
    layer, row_index, expert_ids, inputs = compute.pairs
    bodies: list[Buffer] = [
        np.ascontiguousarray(row_index, "<i4").data.cast("B"),
        np.ascontiguousarray(expert_ids, "<i4").data.cast("B"),
    ]
    bodies += [np.ascontiguousarray(rows, _NUMPY_TYPES[row_type]).data.cast("B") for rows in inputs]
    head = COMPUTE.pack(
        compute.chain_id,
        layer,
        inputs[0].shape[0],
        len(expert_ids),
        inputs[0].shape[1],
        row_type,
        compute.answer_type,
        len(inputs),
    )
    size = len(head) + sum(map(len, bodies))
    return [pack_header(FrameType.COMPUTE, request_id, size) + head, *bodies]


class ComputeHead(NamedTuple):
    """The fixed part of COMPUTE; ``width`` is that of input 0."""

    chain_id: int
    layer: int
    row_count: int
    pair_count: int
    width: int
    row_type: DataType
    answer_type: DataType
    input_count: int


def parse_compute_head(payload: Buffer, limits: Limits) -> ComputeHead:
    """Read the fixed part of COMPUTE.

    Raises:
        FrameError: it is too short, or asks for more than the limits.
    """
    if len(payload) < COMPUTE.size:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "COMPUTE is too short.")
    chain_id, layer, rows, pairs, width, row_type, answer_type, inputs = COMPUTE.unpack_from(
        payload
    )
    if rows > limits.rows or pairs > limits.pairs:
        raise FrameError(
            ErrorCode.TOO_LARGE,
            f"{rows} rows and {pairs} pairs are beyond the limits of {limits.rows} "
            f"and {limits.pairs}.",
        )
    types = _DATA_TYPES.get(row_type), _DATA_TYPES.get(answer_type)
    if not pairs or not rows or types[0] is None or types[1] is None:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "COMPUTE has no pairs, no rows, or unknown types.")
    return ComputeHead(chain_id, layer, rows, pairs, width, types[0], types[1], inputs)


class TokenPairs(NamedTuple):
    """The experts of one token: its row as f32 bytes, wherever those lie."""

    layer: int
    expert_ids: Sequence[int]
    row: Buffer


def parse_token(payload: memoryview, head: ComputeHead, chain: KeyedChain) -> TokenPairs | None:
    """Read COMPUTE for a single row without numpy's price for arrays of a few elements.

    ``None`` where it is anything else, or not sound: ``parse_compute`` tells.
    """
    pairs, widths = head.pair_count, chain.input_widths
    at = COMPUTE.size + 8 * pairs
    if (
        head.row_count != 1
        or pairs > _FEW_PAIRS
        or head.row_type is not DataType.F32
        or len(widths) != 1
        or head.input_count != 1
        or head.width != widths[0]
        or chain.is_per_pair
        or len(payload) != at + 4 * head.width
    ):
        return None
    numbers = _few_numbers(2 * pairs).unpack_from(payload, COMPUTE.size)
    return None if any(numbers[:pairs]) else TokenPairs(head.layer, numbers[pairs:], payload[at:])


@functools.cache
def _few_numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


def parse_compute(payload: Buffer, head: ComputeHead, chain: KeyedChain) -> Compute:
    """Read COMPUTE for the chain that it names; the arrays share the payload's memory.

    Raises:
        FrameError: widths, counts or size do not fit the chain, or an index is out of range.
    """
    widths = chain.input_widths
    if head.width != widths[0]:
        raise FrameError(
            ErrorCode.WRONG_WIDTH, f"Rows are {head.width} wide, but {widths[0]} are needed."
        )
    if head.input_count != len(widths):
        raise FrameError(
            ErrorCode.BAD_PAYLOAD, f"{head.input_count} inputs came, but {len(widths)} are needed."
        )
    rows, pairs = head.row_count, head.pair_count
    if chain.is_per_pair and rows != pairs:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "This chain needs one row for each pair.")
    kind = _NUMPY_TYPES[head.row_type]
    shapes = [(rows, widths[0])] + [(pairs, width) for width in widths[1:]]
    size = COMPUTE.size + 8 * pairs + kind.itemsize * sum(a * b for a, b in shapes)
    if len(payload) != size:
        raise FrameError(
            ErrorCode.BAD_PAYLOAD, f"COMPUTE has {len(payload)} bytes instead of {size}."
        )
    index = np.frombuffer(payload, "<i4", pairs, COMPUTE.size)
    ids = np.frombuffer(payload, "<i4", pairs, COMPUTE.size + 4 * pairs)
    # As unsigned numbers negative ones are the largest: one pass finds both.
    if index.view("<u4").max() >= rows:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "A pair names a row that did not come.")
    at = COMPUTE.size + 8 * pairs
    inputs = []
    for count, width in shapes:
        values = np.frombuffer(payload, kind, count * width, at).reshape(count, width)
        inputs.append(values.astype(np.float32, copy=False))
        at += values.nbytes
    found = Pairs(head.layer, index, ids, tuple(inputs))
    return Compute(head.chain_id, found, head.answer_type)


def pack_rows(
    rows: Buffer, shape: tuple[int, int], compute_us: int, kind: DataType
) -> list[Buffer]:
    """Write the payload of ROWS in parts; ``rows`` are f32 bytes of ``shape`` (pairs, width)."""
    data = rows
    if kind != DataType.F32:
        with np.errstate(over="ignore"):
            data = np.frombuffer(rows, "<f4").astype(_NUMPY_TYPES[kind]).tobytes()
    return [_ROWS.pack(*shape, min(compute_us, 0xFFFFFFFF), kind), data]


class RowsAnswer(NamedTuple):
    """A worker's answer: (pairs, width) elements, and the microseconds its engine needed."""

    rows: Rows
    compute_us: int


def parse_row_bytes(payload: memoryview, shape: tuple[int, int]) -> tuple[bytes | memoryview, int]:
    """As ``parse_rows``, with the rows as f32 bytes."""
    if len(payload) == _ROWS.size + 4 * shape[0] * shape[1]:
        *told, compute_us, number = _ROWS.unpack_from(payload)
        if number == DataType.F32 and told == [*shape]:
            return payload[_ROWS.size :], compute_us
    rows, compute_us = parse_rows(payload, shape)
    return rows.tobytes(), compute_us


def parse_rows(payload: Buffer, shape: tuple[int, int]) -> RowsAnswer:
    """Read ROWS, which must have ``shape``.

    Raises:
        FrameError: it has another shape or size.
    """
    if len(payload) < _ROWS.size:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "ROWS is too short.")
    pairs, width, compute_us, number = _ROWS.unpack_from(payload)
    if (pairs, width) != shape or number not in _NUMPY_TYPES:
        raise FrameError(
            ErrorCode.BAD_PAYLOAD,
            f"ROWS has {pairs} x {width} elements of type {number} instead of "
            f"{shape[0]} x {shape[1]}.",
        )
    kind = _NUMPY_TYPES[number]
    if len(payload) != _ROWS.size + pairs * width * kind.itemsize:
        raise FrameError(ErrorCode.BAD_PAYLOAD, "ROWS has another size than it tells.")
    values = np.frombuffer(payload, kind, offset=_ROWS.size).reshape(shape)
    if number != DataType.F32:
        values = values.astype(np.float32)
    return RowsAnswer(values, compute_us)


def pack_error(request_id: int, code: ErrorCode, message: str) -> bytes:
    """Write ERROR in answer to a request (0: to the connection)."""
    sentence = message.encode()[:_SENTENCE_BYTES].decode("utf-8", "ignore").encode()
    payload = _ERROR.pack(code, 0) + sentence
    return pack_header(FrameType.ERROR, request_id, len(payload)) + payload


def parse_error(payload: Buffer) -> FrameError:
    """Read ERROR; one that makes no sense becomes an error that says so."""
    if len(payload) >= _ERROR.size:
        number, _ = _ERROR.unpack_from(payload)
        text = bytes(payload[_ERROR.size : _ERROR.size + _SENTENCE_BYTES]).decode(
            "utf-8", "replace"
        )
        if number in ErrorCode.__members__.values():
            clean = "".join(sign if sign.isprintable() else " " for sign in text)
            return FrameError(ErrorCode(number), clean or "The peer gave no reason.")
    return FrameError(ErrorCode.BAD_PAYLOAD, "The peer sent an error that makes no sense.")
