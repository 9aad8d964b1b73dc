"""Frames as clients send them, checked against the ``websockets`` library."""

import itertools
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame
from websockets.frames import Opcode as TheirOpcode

from linkcpp.gateway.frames import (
    MAX_REST_BYTES,
    MIN_PIECE_BYTES,
    FrameError,
    FrameReader,
    Opcode,
    Piece,
    build_head,
    close_frame,
    parse_close,
)

EDGES = (0, 1, 124, 125, 126, 127, 65_534, 65_535, 65_536, 65_537)


def client_frame(opcode: int, payload: bytes, *, fin: bool = True) -> bytes:
    return Frame(TheirOpcode(opcode), payload, fin).serialize(mask=True)


def read_in_portions(stream: bytes, cuts: Sequence[int]) -> list[Piece]:
    """Read as a connection does: a rest stands before the next portion."""
    reader, rest, pieces = FrameReader(), b"", list[Piece]()
    borders = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(borders):
        data = memoryview(rest + stream[start:end])
        pieces += reader.read(data, 0, len(data))
        rest = bytes(data[reader.taken :])
        assert len(rest) <= MAX_REST_BYTES
    assert rest == b""
    return pieces


def messages_of(pieces: Sequence[Piece]) -> list[bytes]:
    messages, open_message = list[bytes](), None
    for piece in pieces:
        if piece.opcode != Opcode.BINARY:
            continue
        assert piece.begins == (open_message is None)
        open_message = (open_message or b"") + piece.payload
        if piece.ends:
            messages.append(open_message)
            open_message = None
    assert open_message is None
    return messages


@given(
    lengths=st.lists(st.sampled_from(EDGES) | st.integers(0, 400), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 2**20), max_size=12),
)
@settings(deadline=None)
def test_messages_are_read_whole_however_the_stream_is_cut(
    lengths: list[int], cuts: list[int]
) -> None:
    messages = [bytes((index + at) % 251 for at in range(n)) for index, n in enumerate(lengths)]
    stream = b"".join(client_frame(Opcode.BINARY, message) for message in messages)
    assert messages_of(read_in_portions(stream, cuts)) == messages


@given(
    parts=st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 4000), max_size=12),
)
def test_fragments_with_pings_between_them_are_one_message(
    parts: list[bytes], cuts: list[int]
) -> None:
    stream = b""
    for index, part in enumerate(parts):
        opcode = Opcode.CONTINUATION if index else Opcode.BINARY
        stream += client_frame(opcode, part, fin=index == len(parts) - 1)
        stream += client_frame(Opcode.PING, b"ping %d" % index)
    pieces = read_in_portions(stream, cuts)
    assert messages_of(pieces) == [b"".join(parts)]
    pings = [piece.payload for piece in pieces if piece.opcode == Opcode.PING]
    assert pings == [b"ping %d" % index for index in range(len(parts))]


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("fin", [True, False])
def test_heads_are_those_that_the_library_writes(length: int, fin: bool) -> None:
    theirs = Frame(TheirOpcode.BINARY, bytes(length), fin).serialize(mask=False)
    assert build_head(Opcode.BINARY, length, is_final=fin) + bytes(length) == theirs


def test_a_length_of_more_than_32_bits_is_read_as_it_is() -> None:
    head = struct.pack("!BBQ4s", 0x82, 0xFF, 2**40, b"\0\0\0\0")
    begin = bytes(MIN_PIECE_BYTES)
    data = memoryview(head + begin)
    (piece,) = FrameReader().read(data, 0, len(data))
    assert piece == Piece(Opcode.BINARY, begin, begins=True, ends=False)


def test_a_message_that_drips_comes_in_few_pieces() -> None:
    message = bytes(at % 251 for at in range(5 * MIN_PIECE_BYTES + 1))
    stream = client_frame(Opcode.BINARY, message)
    pieces = read_in_portions(stream, range(0, len(stream), 1403))
    assert messages_of(pieces) == [message]
    assert len(pieces) <= 6


BROKEN = {
    "not masked": Frame(TheirOpcode.BINARY, b"x").serialize(mask=False),
    "a reserved bit": bytes((0xC2, 0x80)) + bytes(4),
    "an unknown opcode": bytes((0x83, 0x80)) + bytes(4),
    "an unknown control opcode": bytes((0x8B, 0x80)) + bytes(4),
    "a continuation of nothing": client_frame(Opcode.CONTINUATION, b"x"),
    "a message in a message": client_frame(Opcode.BINARY, b"x", fin=False)
    + client_frame(Opcode.BINARY, b"y"),
    "a fragmented ping": bytes((0x09, 0x80)) + bytes(4),
    "a long ping": struct.pack("!BBH", 0x89, 0xFE, 126) + bytes(4 + 126),
    "a close frame of 64 bits": struct.pack("!BBQ", 0x88, 0xFF, 2**63 - 1) + bytes(4),
    "a length that fits 7 bits in 16": struct.pack("!BBH", 0x82, 0xFE, 125) + bytes(4),
    "a length that fits 16 bits in 64": struct.pack("!BBQ", 0x82, 0xFF, 65_535) + bytes(4),
    "the highest bit of 64": struct.pack("!BBQ", 0x82, 0xFF, 2**63) + bytes(4),
    "a long text": struct.pack("!BBH", 0x81, 0xFE, 126) + bytes(4 + 126),
    "a fragmented text": client_frame(Opcode.TEXT, b"fi", fin=False),
}


@pytest.mark.parametrize("stream", BROKEN.values(), ids=BROKEN.keys())
def test_broken_frames_are_refused(stream: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameReader().read(memoryview(stream), 0, len(stream)))


@pytest.mark.parametrize(
    "payload", [b"\x03", b"\x03\xed", b"\x03\xee", b"\x00\x00", b"\x13\x88", b"\x03\xe8\xff"]
)
def test_close_frames_that_may_not_be_sent_are_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        parse_close(payload)


def test_close_codes_are_read() -> None:
    assert parse_close(b"") == 1005
    assert parse_close(b"\x03\xe8bye") == 1000
    assert parse_close(struct.pack("!H", 4410)) == 4410


def test_a_long_close_reason_is_cut_between_characters() -> None:
    frame = close_frame(4400, "ü" * 100)
    assert len(frame) <= 127
    assert frame[4:].decode() == "ü" * 61
