"""Compute frames: what is written can be read, and what is not sound is refused by code."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linkcpp.worker.chain import Chain, ChainInput, ChainSource, ChainStep, KeyedChain, SourceKind
from linkcpp.worker.frames import (
    HEADER_BYTES,
    Compute,
    DataType,
    ErrorCode,
    FrameError,
    FrameType,
    Limits,
    Pairs,
    check_hello,
    pack_chain,
    pack_compute,
    pack_error,
    pack_header,
    pack_hello,
    pack_rows,
    parse_chain,
    parse_compute,
    parse_compute_head,
    parse_error,
    parse_header,
    parse_row_bytes,
    parse_rows,
    parse_token,
)
from linkcpp.worker.link import FrameBuffer

SQUARE = Chain(
    inputs=(ChainInput(width=2, per_pair=False),),
    steps=(ChainStep(op="SQR", width=2, sources=(ChainSource(kind=SourceKind.INPUT),)),),
)


KEYED = KeyedChain.of("square", SQUARE)


def compute_payload(compute: Compute, row_type: DataType = DataType.F32) -> bytes:
    return b"".join(bytes(part) for part in pack_compute(7, compute, row_type))[HEADER_BYTES:]


def example() -> Compute:
    rows = np.array([[1.0, -2.0]], np.float32)
    return Compute(1, Pairs(3, np.zeros(2, np.int32), np.array([5, 9], np.int32), (rows,)))


def refusal(payload: bytes, limits: Limits | None = None) -> ErrorCode:
    with pytest.raises(FrameError) as caught:
        parse_compute(payload, parse_compute_head(payload, limits or Limits()), KEYED)
    return caught.value.code


def test_the_documented_example_is_what_is_written() -> None:
    frame = b"".join(bytes(part) for part in pack_compute(7, example()))
    assert frame.hex() == (
        "4c434652010500000700000030000000"
        "01000000030000000100000002000000"
        "0200000000000100"
        "00000000000000000500000009000000"
        "0000803f000000c0"
    )
    parts = pack_rows(np.array([[0.5, 0.25], [1, 2]], "<f4").tobytes(), (2, 2), 180, DataType.F32)
    frame = pack_header(FrameType.ROWS, 7, 32) + b"".join(bytes(part) for part in parts)
    assert frame.hex() == (
        "4c434652010600000700000020000000"
        "0200000002000000b400000000000000"
        "0000003f0000803e0000803f00000040"
    )


@given(rows=st.integers(1, 5), pairs=st.integers(1, 9), seed=st.integers(0, 99), half=st.booleans())
def test_a_compute_frame_is_read_as_it_was_written(
    rows: int, pairs: int, seed: int, half: bool
) -> None:
    random = np.random.default_rng(seed)
    kind = DataType.F16 if half else DataType.F32
    values = random.standard_normal((rows, 2)).astype(np.float16).astype(np.float32)
    sent = Compute(
        9,
        Pairs(
            4,
            random.integers(0, rows, pairs).astype(np.int32),
            random.integers(0, 100, pairs).astype(np.int32),
            (values,),
        ),
        kind,
    )
    payload = compute_payload(sent, kind)
    found = parse_compute(payload, parse_compute_head(payload, Limits()), KEYED)
    assert (found.chain_id, found.pairs.layer, found.answer_type) == (9, 4, kind)
    assert (found.pairs.row_index == sent.pairs.row_index).all()
    assert (found.pairs.expert_ids == sent.pairs.expert_ids).all()
    assert (found.pairs.inputs[0] == values).all()


@given(
    row=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2),
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=70),
    spoil=st.none() | st.tuples(st.integers(0, 60), st.integers(1, 255)),
)
def test_a_single_token_is_read_as_by_the_general_way_or_left_to_it(
    row: list[float], ids: list[int], spoil: tuple[int, int] | None
) -> None:
    rows = np.array([row], np.float32)
    pairs = Pairs(3, np.zeros(len(ids), np.int32), np.array(ids, np.int32), (rows,))
    payload = bytearray(compute_payload(Compute(1, pairs)))
    if spoil is not None:
        payload[min(spoil[0], len(payload) - 1)] ^= spoil[1]
    try:
        head = parse_compute_head(payload, Limits())
    except FrameError:
        return
    token = parse_token(memoryview(payload), head, KEYED)
    if token is None:
        assert spoil is not None or len(ids) > 64
        return
    read = parse_compute(payload, head, KEYED).pairs
    assert token.layer == read.layer
    assert list(token.expert_ids) == read.expert_ids.tolist()
    assert bytes(token.row) == read.inputs[0].tobytes()


def test_more_rows_or_pairs_than_the_limits_are_refused_before_they_are_read() -> None:
    payload = compute_payload(example())
    assert refusal(payload, Limits(pairs=1)) == ErrorCode.TOO_LARGE
    # A head that announces four thousand million pairs costs nothing.
    huge = payload[:8] + struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF) + payload[16:24]
    assert refusal(huge) == ErrorCode.TOO_LARGE


def test_what_does_not_fit_the_chain_is_refused_by_code() -> None:
    payload = compute_payload(example())
    wide = payload[:16] + struct.pack("<I", 3) + payload[20:]
    assert refusal(wide) == ErrorCode.WRONG_WIDTH
    assert refusal(payload[:-4]) == ErrorCode.BAD_PAYLOAD
    assert refusal(payload + b"\0") == ErrorCode.BAD_PAYLOAD
    assert refusal(payload[:10]) == ErrorCode.BAD_PAYLOAD
    outside = payload[:24] + struct.pack("<i", 1) + payload[28:]
    assert refusal(outside) == ErrorCode.BAD_PAYLOAD
    below = payload[:24] + struct.pack("<i", -1) + payload[28:]
    assert refusal(below) == ErrorCode.BAD_PAYLOAD
    unknown_type = payload[:20] + b"\7" + payload[21:]
    assert refusal(unknown_type) == ErrorCode.BAD_PAYLOAD


def test_a_header_that_is_no_frame_of_this_version_is_refused_by_code() -> None:
    good = bytearray(pack_header(FrameType.PING, 1, 0))
    for at, value, code in (
        (0, 0, ErrorCode.BAD_FRAMING),
        (4, 2, ErrorCode.BAD_VERSION),
        (5, 99, ErrorCode.BAD_FRAMING),
        (6, 1, ErrorCode.BAD_FRAMING),
        (15, 0xFF, ErrorCode.BAD_FRAMING),
    ):
        bad = bytearray(good)
        bad[at] = value
        with pytest.raises(FrameError) as caught:
            parse_header(bad, Limits())
        assert caught.value.code == code


def test_only_the_token_opens() -> None:
    hello = pack_hello("secret")
    header = parse_header(hello[:HEADER_BYTES], Limits())
    check_hello(header, hello[HEADER_BYTES:], "secret")
    for token in ("", "secre", "secrets", "Secret"):
        with pytest.raises(FrameError) as caught:
            check_hello(header, hello[HEADER_BYTES:], token)
        assert caught.value.code == ErrorCode.BAD_TOKEN


def test_a_chain_survives_its_frame_and_nonsense_is_refused() -> None:
    payload = pack_chain(1, 5, SQUARE)[HEADER_BYTES:]
    assert parse_chain(payload) == (5, SQUARE)
    for bad in (payload[:3], payload[:-1], payload[:4] + b"[" * 100_000, payload[:4] + b"{}"):
        with pytest.raises(FrameError):
            parse_chain(bad)


def test_rows_as_bytes_are_the_rows() -> None:
    rows = np.array([[1.5, -2.0], [0.25, 8.0]], np.float32)
    for kind in DataType:
        parts = pack_rows(rows.data.cast("B"), (2, 2), 9, kind)
        payload = memoryview(b"".join(bytes(part) for part in parts))
        data, compute_us = parse_row_bytes(payload, (2, 2))
        assert bytes(data) == rows.tobytes()
        assert compute_us == 9
        with pytest.raises(FrameError):
            parse_row_bytes(payload, (1, 4))


def test_rows_of_another_shape_are_refused() -> None:
    payload = b"".join(bytes(part) for part in pack_rows(bytes(16), (2, 2), 5, DataType.F32))
    assert parse_rows(payload, (2, 2)).compute_us == 5
    for bad, shape in ((payload, (2, 3)), (payload[:-4], (2, 2)), (payload[:9], (2, 2))):
        with pytest.raises(FrameError):
            parse_rows(bad, shape)


def test_an_error_tells_code_and_sentence_and_never_breaks_the_reader() -> None:
    frame = pack_error(8, ErrorCode.UNKNOWN_EXPERT, "Expert 9 is not held here.")
    error = parse_error(frame[HEADER_BYTES:])
    assert (error.code, error.message) == (ErrorCode.UNKNOWN_EXPERT, "Expert 9 is not held here.")
    assert parse_error(b"").code == ErrorCode.BAD_PAYLOAD
    assert parse_error(b"\xff\xff\0\0x").code == ErrorCode.BAD_PAYLOAD
    assert len(pack_error(1, ErrorCode.BAD_CHAIN, "\u00e4" * 9999)) < 1100


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 100, 300_000]), max_size=6),
    cuts=st.lists(st.integers(900, 400_000), max_size=8),
)
def test_frames_come_out_whole_however_the_stream_is_cut(sizes: list[int], cuts: list[int]) -> None:
    payloads = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    stream = b"".join(
        pack_header(FrameType.COMPUTE, number, len(payload)) + payload
        for number, payload in enumerate(payloads)
    )
    buffer = FrameBuffer(Limits())
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(stream):
        wanted = cuts[len(found) % len(cuts)] if cuts else len(stream)
        space = buffer.space()
        count = min(wanted, len(space), len(stream) - at)
        space[:count] = stream[at : at + count]
        buffer.received(count)
        at += count
        while (frame := buffer.next()) is not None:
            found.append((frame[0].request_id, bytes(frame[1])))
    assert found == list(enumerate(payloads))
    assert buffer.is_between_frames
