"""The ggml-RPC codec without a server: framing, payloads, graphs, hostile bytes."""

import itertools
import re
import struct
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.engine import wire_messages as messages
from linkcpp.engine.records import RpcVersion
from linkcpp.engine.wire import (
    DIALECT_4,
    DIALECT_7,
    TENSOR_BYTES,
    AnswerParser,
    Command,
    Dialect,
    Event,
    Limits,
    Message,
    RequestParser,
    StreamData,
    StreamStart,
    WireError,
    dialect_of,
    encode_answer,
    encode_request,
)
from linkcpp.engine.wire_tensor import (
    TENSOR_DTYPE,
    Graph,
    build_graph,
    empty_tensors,
    parse_graph,
    parse_tensors,
    tensor_names,
)

HELLO = encode_request(Command.HELLO, messages.PLAIN_TCP)
DIALECTS = st.sampled_from([DIALECT_4, DIALECT_7])
STREAMED = frozenset({Command.SET_TENSOR, Command.GRAPH_COMPUTE})


def in_pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def joined(events: Iterable[Event]) -> list[tuple[Command, bytes]]:
    """Whole messages again, whether they were streamed or not."""
    whole: list[tuple[Command, bytes]] = []
    for event in events:
        match event:
            case Message(command, payload):
                whole.append((command, bytes(payload)))
            case StreamStart(command, head, _):
                whole.append((command, bytes(head)))
            case StreamData(data):
                command, before = whole[-1]
                whole[-1] = (command, before + bytes(data))
    return whole


def set_tensor(dialect: Dialect, data: bytes) -> bytes:
    head = messages.SetTensor(bytes(TENSOR_BYTES), 7, dialect.has_cache_flag)
    return messages.build_set_tensor_head(dialect, head) + data


def test_a_tensor_record_has_296_packed_bytes() -> None:
    assert TENSOR_DTYPE.itemsize == TENSOR_BYTES
    assert TENSOR_DTYPE.fields is not None
    assert TENSOR_DTYPE.fields["data"][1] == 220


@pytest.mark.parametrize("version", ["3.6.0", "4.1.0", "5.0.0", "7.1.0", "8.0.0"])
def test_an_unknown_version_is_refused_by_name(version: str) -> None:
    major, minor, patch = map(int, version.split("."))
    with pytest.raises(WireError, match=version.replace(".", r"\.")):
        dialect_of(RpcVersion(major=major, minor=minor, patch=patch))


def test_the_patch_version_does_not_change_the_dialect() -> None:
    assert dialect_of(RpcVersion(major=4, minor=0, patch=9)) is DIALECT_4
    assert dialect_of(RpcVersion(major=7, minor=0, patch=0)) is DIALECT_7


@given(
    st.lists(st.binary(max_size=400), min_size=1, max_size=5),
    st.lists(st.integers(0, 10_000)),
    DIALECTS,
    st.booleans(),
)
def test_requests_survive_any_cutting(
    blobs: list[bytes], cuts: list[int], dialect: Dialect, streams: bool
) -> None:
    sent = [(Command.HELLO, messages.PLAIN_TCP)]
    for blob in blobs:
        sent.append((Command.SET_TENSOR, set_tensor(dialect, blob)))
        sent.append((Command.DEVICE_COUNT, b""))
        sent.append((Command.GRAPH_COMPUTE, bytes(12) + blob))
    parser = RequestParser(dialect, streamed=STREAMED if streams else frozenset())
    data = b"".join(encode_request(command, payload) for command, payload in sent)
    events = [event for piece in in_pieces(data, cuts) for event in parser.feed(piece)]
    assert joined(events) == sent
    # And nothing is left of it: the next request is whole.
    again = encode_request(Command.DEVICE_COUNT)
    assert joined(parser.feed(again)) == [(Command.DEVICE_COUNT, b"")]


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(0, 5000)))
def test_answers_survive_any_cutting(answers: list[bytes], cuts: list[int]) -> None:
    for streamed in (frozenset[Command](), frozenset({Command.GET_TENSOR})):
        parser = AnswerParser(streamed=streamed)
        for answer in answers:
            parser.expect(Command.GET_TENSOR, len(answer))
        data = b"".join(map(encode_answer, answers))
        events = [event for piece in in_pieces(data, cuts) for event in parser.feed(piece)]
        assert joined(events) == [(Command.GET_TENSOR, answer) for answer in answers]
        with pytest.raises(WireError, match="nothing asked for"):
            list(parser.feed(encode_answer(b"")))


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000)), DIALECTS, st.booleans())
def test_random_bytes_are_parsed_or_refused(
    data: bytes, cuts: list[int], dialect: Dialect, greeted: bool
) -> None:
    parser = RequestParser(dialect, streamed=STREAMED)
    answers = AnswerParser()
    for command, size in dialect.answer_bytes.items():
        answers.expect(command, size)
    try:
        for piece in in_pieces(HELLO + data if greeted else data, cuts):
            for event in parser.feed(piece):
                assert isinstance(event, Message | StreamStart | StreamData)
        for piece in in_pieces(data, cuts):
            list(answers.feed(piece))
    except WireError as error:
        assert error.message.endswith(".")


@given(st.binary(max_size=3000))
def test_random_graphs_are_parsed_or_refused(data: bytes) -> None:
    try:
        graph = parse_graph(data)
    except WireError:
        return
    assert build_graph(graph) == data


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 2**32 - 1), st.data())
def test_a_graph_is_read_as_it_was_written(
    node_count: int, tensor_count: int, device: int, data: st.DataObject
) -> None:
    raw = data.draw(st.binary(min_size=TENSOR_BYTES, max_size=TENSOR_BYTES))
    tensors = parse_tensors(raw * tensor_count)
    graph = Graph(device, np.arange(node_count, dtype=np.uint64), tensors)
    again = parse_graph(build_graph(graph))
    assert again.device == device
    assert again.node_ids.tolist() == list(range(node_count))
    assert again.tensors.tobytes() == raw * tensor_count


def test_a_name_ends_at_its_first_nul() -> None:
    tensors = empty_tensors(2)
    tensors["name"] = [b"blk.0.ffn_up.weight\0garbage", b"x" * 64]
    assert tensor_names(tensors) == [b"blk.0.ffn_up.weight", b"x" * 64]


@pytest.mark.parametrize("dialect", [DIALECT_4, DIALECT_7])
def test_set_tensor_is_read_as_it_was_written(dialect: Dialect) -> None:
    tensor = bytes(range(256)) + bytes(40)
    head = messages.SetTensor(tensor, 1 << 40, dialect.has_cache_flag)
    payload = messages.build_set_tensor_head(dialect, head)
    assert len(payload) == dialect.set_tensor_head_bytes
    assert messages.parse_set_tensor_head(dialect, payload + b"data") == head
    with pytest.raises(WireError):
        messages.parse_set_tensor_head(dialect, payload[:-1])


def test_a_payload_of_another_size_is_refused() -> None:
    assert messages.ALLOC_BUFFER.parse(messages.ALLOC_BUFFER.build(messages.AllocBuffer(1, 2))) == (
        1,
        2,
    )
    with pytest.raises(WireError, match="11 bytes instead of 12"):
        messages.ALLOC_BUFFER.parse(bytes(11))


def test_hello_answers_tell_the_version() -> None:
    version = RpcVersion(major=7, minor=0, patch=3)
    assert messages.parse_hello_answer(messages.build_hello_answer(version)) == version


REFUSED = {
    "the first command is not HELLO": (encode_request(Command.DEVICE_COUNT), "instead of HELLO"),
    "HELLO of another size": (encode_request(Command.HELLO, b""), "HELLO has 0 bytes"),
    "a second HELLO": (HELLO + HELLO, "second time"),
    "an unknown command": (HELLO + struct.pack("<BQ", 200, 0), "Command 200"),
    "a fixed command of another size": (HELLO + struct.pack("<BQ", 0, 13), "ALLOC_BUFFER has 13"),
    "a tensor beyond the limit": (HELLO + struct.pack("<BQ", 6, 1 << 62), "SET_TENSOR has"),
    "a tensor without its head": (HELLO + struct.pack("<BQ", 6, 100), "SET_TENSOR has 100"),
    "a graph beyond the limit": (HELLO + struct.pack("<BQ", 10, 1 << 62), "GRAPH_COMPUTE has"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    data, words = REFUSED[name]
    with pytest.raises(WireError, match=words):
        list(RequestParser(DIALECT_7).feed(data))


def test_memset_tensor_is_unknown_in_the_older_dialect() -> None:
    data = HELLO + encode_request(Command.MEMSET_TENSOR, bytes(313))
    assert len(list(RequestParser(DIALECT_7).feed(data))) == 2
    with pytest.raises(WireError, match=r"unknown in RPC 4\.0\.x"):
        list(RequestParser(DIALECT_4).feed(data))


def test_a_command_before_the_answer_to_hello_is_refused() -> None:
    with pytest.raises(WireError, match="before HELLO was answered"):
        list(RequestParser(None).feed(HELLO + encode_request(Command.DEVICE_COUNT)))


def test_an_answer_that_nothing_asked_for_is_refused() -> None:
    with pytest.raises(WireError, match="nothing asked for"):
        list(AnswerParser().feed(encode_answer(b"x")))


def test_an_answer_of_another_size_is_refused_before_its_bytes_come() -> None:
    parser = AnswerParser()
    parser.expect(Command.GET_TENSOR, 5)
    with pytest.raises(WireError, match="GET_TENSOR has 6 bytes instead of 5"):
        list(parser.feed(struct.pack("<Q", 6)))


def test_an_announced_size_allocates_nothing() -> None:
    parser = RequestParser(DIALECT_4, Limits(set_tensor_bytes=1 << 40))
    tracemalloc.start()
    try:
        list(parser.feed(HELLO + struct.pack("<BQ", 6, 1 << 40) + bytes(1000)))
        assert tracemalloc.get_traced_memory()[1] < 64_000
    finally:
        tracemalloc.stop()


def test_a_message_inside_one_feed_is_not_copied() -> None:
    data = HELLO + encode_request(Command.SET_TENSOR, set_tensor(DIALECT_7, bytes(5000)))
    *_, event = RequestParser(DIALECT_7).feed(data)
    assert isinstance(event, Message)
    assert event.payload.obj is data


def test_the_documented_example_is_what_is_written() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "wire.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"    [0-9a-f]{2} ", line)][:3]
    documented = [bytes.fromhex(line.replace("00 x 24", "00" * 24)) for line in lines]
    version = RpcVersion(major=7, minor=0, patch=0)
    allocation = messages.ALLOC_BUFFER.build(messages.AllocBuffer(0, 1024))
    assert documented == [
        HELLO,
        encode_answer(messages.build_hello_answer(version)),
        encode_request(Command.ALLOC_BUFFER, allocation),
    ]
