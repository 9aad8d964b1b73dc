"""Long transfers of a tensor reach the server in pieces, and mean the same."""

import os
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.engine.guard import MemoryAccount
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import start_rpc_server
from linkcpp.engine.wire import (
    DIALECT_4,
    DIALECT_7,
    Command,
    Dialect,
    Message,
    RequestParser,
    WireError,
    encode_answer,
    encode_request,
)
from linkcpp.engine.wire_messages import (
    GET_TENSOR,
    GetTensor,
    SetTensor,
    build_set_tensor_head,
    parse_set_tensor_head,
)
from linkcpp.engine.wire_tensor import empty_tensors
from tests.engine.test_guard import holding, tensor
from tests.support.guarded_relay import guarded_relay
from tests.support.memory import peak_bytes
from tests.support.rpc_client import RpcClient

DIALECTS = st.sampled_from([DIALECT_4, DIALECT_7])


def parsed(dialect: Dialect, stream: bytes) -> list[Message]:
    parser = RequestParser(dialect)
    parser._greeted = True
    return [event for event in parser.feed(stream) if isinstance(event, Message)]


@given(DIALECTS, st.binary(max_size=500), st.integers(0, 2**64 - 1), st.integers(1, 200), st.data())
def test_the_pieces_of_a_write_put_every_byte_where_the_whole_would(
    dialect: Dialect, data: bytes, offset: int, piece_bytes: int, cuts: st.DataObject
) -> None:
    guard = holding(MemoryAccount(4096), 4096, dialect)
    guard._piece_bytes = piece_bytes
    head = build_set_tensor_head(dialect, SetTensor(tensor(5), offset, False))
    whole = encode_request(Command.SET_TENSOR, head + data)
    passed = b""
    while whole:
        size = cuts.draw(st.integers(1, len(whole)))
        passed += b"".join(guard.from_client(whole[:size]).to_server)
        whole = whole[size:]
    written = {}
    for message in parsed(dialect, passed):
        payload = bytes(message.payload)
        piece = parse_set_tensor_head(dialect, payload[: dialect.set_tensor_head_bytes])
        content = payload[dialect.set_tensor_head_bytes :]
        assert len(content) <= piece_bytes
        assert piece.tensor == tensor(5)
        for at, byte in enumerate(content):
            written[(piece.offset - offset + at) % 2**64] = byte
    assert written == dict(enumerate(data))


@given(DIALECTS, st.integers(0, 1000), st.integers(1, 300))
def test_the_answers_to_the_pieces_of_a_read_arrive_as_one(
    dialect: Dialect, size: int, piece_bytes: int
) -> None:
    guard = holding(MemoryAccount(4096), 4096, dialect)
    guard._piece_bytes = piece_bytes
    content = os.urandom(size)
    asked = GET_TENSOR.build(GetTensor(tensor(5), 7, size))
    request = encode_request(Command.GET_TENSOR, asked)
    received = b""
    for message in parsed(dialect, b"".join(guard.from_client(request).to_server)):
        piece = GET_TENSOR.parse(message.payload)
        assert piece.size_bytes <= piece_bytes
        begin = piece.offset - 7
        answer = content[begin : begin + piece.size_bytes]
        flow = guard.from_server(encode_answer(answer))
        received += b"".join(flow.to_client)
    assert received == encode_answer(content)
    with pytest.raises(WireError, match="nothing asked for"):
        guard.from_server(encode_answer(b""))


async def test_a_real_server_takes_a_tensor_in_pieces_and_stages_little(
    engine: EngineLocation, tmp_path: Path
) -> None:
    size = 96 * 2**20
    rpc = await start_rpc_server(engine, device="CPU", log_path=tmp_path / "rpc.log", threads=1)
    process = psutil.Process(rpc.process.pid)
    before = process.memory_info().rss
    async with (
        guarded_relay(rpc.port, size, piece_bytes=2**20) as relay,
        await RpcClient.connect("127.0.0.1", relay.port) as client,
    ):
        buffer = (await client.alloc_buffer(size)).buffer
        record = empty_tensors(1)
        record["buffer"], record["data"] = buffer, await client.buffer_base(buffer)
        record["ne"] = [size // 4, 1, 1, 1]
        record["nb"] = [4, size, size, size]
        content = os.urandom(size)
        await client.set_tensor(record.tobytes(), content)
        assert bytes(await client.get_tensor(record.tobytes(), size)) == content
        peak = peak_bytes(process.pid)
    await rpc.process.stop()
    assert peak - before < size + 16 * 2**20
