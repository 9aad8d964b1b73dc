"""The guard: by itself, and between the real programs of both builds."""

import asyncio
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.common.errors import LinkcppError
from linkcpp.engine import wire_messages as messages
from linkcpp.engine.guard import GuardError, LinkGuard, MemoryAccount
from linkcpp.engine.process import SupervisedProcess
from linkcpp.engine.process_spec import ProcessSpec, ProcessState
from linkcpp.engine.records import EngineLocation, RpcVersion
from linkcpp.engine.rpc_server import start_rpc_server
from linkcpp.engine.tiny_model import tiny_model
from linkcpp.engine.wire import (
    DIALECT_4,
    DIALECT_7,
    Command,
    Dialect,
    encode_answer,
    encode_request,
)
from linkcpp.engine.wire_tensor import Graph, build_graph, empty_tensors
from tests.support.guarded_relay import guarded_relay
from tests.support.ports import free_port
from tests.support.rpc_client import RpcClient

DIALECTS = st.sampled_from([DIALECT_4, DIALECT_7])
HELLO = encode_request(Command.HELLO, b"\7" * 24)


def hello_answer(dialect: Dialect) -> bytes:
    version = RpcVersion(major=dialect.major, minor=0, patch=3)
    return encode_answer(messages.build_hello_answer(version, b"\1" * 24))


def greeted(account: MemoryAccount, dialect: Dialect = DIALECT_7) -> LinkGuard:
    guard = LinkGuard(account)
    guard.from_client(HELLO)
    guard.from_server(hello_answer(dialect))
    return guard


def allocation(size_bytes: int) -> bytes:
    payload = messages.ALLOC_BUFFER.build(messages.AllocBuffer(0, size_bytes))
    return encode_request(Command.ALLOC_BUFFER, payload)


def allocated(buffer: int, size_bytes: int) -> bytes:
    payload = messages.ALLOCATED_BUFFER.build(messages.AllocatedBuffer(buffer, size_bytes))
    return encode_answer(payload)


def tensor(buffer: int, name: bytes = b"blk.0.ffn_up.weight") -> bytes:
    record = empty_tensors(1)
    record["buffer"] = buffer
    record["name"] = name
    record["ne"] = [10, 1, 1, 1]
    record["nb"] = [4, 40, 40, 40]
    return record.tobytes()


def set_tensor(dialect: Dialect, data: bytes, record: bytes) -> bytes:
    head = messages.build_set_tensor_head(dialect, messages.SetTensor(record, 0, False))
    return encode_request(Command.SET_TENSOR, head + data)


def holding(account: MemoryAccount, size_bytes: int, dialect: Dialect = DIALECT_7) -> LinkGuard:
    """A guard whose client holds buffer 5."""
    guard = greeted(account, dialect)
    guard.from_client(allocation(size_bytes))
    guard.from_server(allocated(5, size_bytes))
    return guard


def test_hello_passes_without_the_wish_for_another_transport() -> None:
    guard = LinkGuard(MemoryAccount(100))
    flow = guard.from_client(HELLO)
    assert b"".join(flow.to_server) == encode_request(Command.HELLO, bytes(24))
    flow = guard.from_server(hello_answer(DIALECT_7))
    version = RpcVersion(major=7, minor=0, patch=3)
    assert b"".join(flow.to_client) == encode_answer(messages.build_hello_answer(version))


def test_a_dialect_that_linkcpp_does_not_speak_is_refused() -> None:
    guard = LinkGuard(MemoryAccount(100))
    guard.from_client(HELLO)
    other = RpcVersion(major=5, minor=1, patch=0)
    with pytest.raises(GuardError, match=r"From the server: RPC version 5\.1\.0"):
        guard.from_server(encode_answer(messages.build_hello_answer(other)))


def test_an_allocation_within_the_limit_passes_and_is_counted() -> None:
    account = MemoryAccount(100)
    guard = greeted(account)
    assert b"".join(guard.from_client(allocation(60)).to_server) == allocation(60)
    assert account.allocated_bytes == 60
    assert b"".join(guard.from_server(allocated(5, 64)).to_client) == allocated(5, 64)
    assert account.allocated_bytes == 64


def test_an_allocation_beyond_the_limit_is_answered_as_failed() -> None:
    account = MemoryAccount(100)
    guard = holding(account, 60)
    flow = guard.from_client(allocation(41))
    assert not flow.to_server
    assert b"".join(flow.to_client) == allocated(0, 0)
    assert account.allocated_bytes == 60


def test_a_refusal_waits_for_its_turn() -> None:
    guard = greeted(MemoryAccount(100))
    flow = guard.from_client(encode_request(Command.DEVICE_COUNT) + allocation(101))
    assert not flow.to_client
    count = encode_answer(struct.pack("<I", 1))
    assert b"".join(guard.from_server(count).to_client) == count + allocated(0, 0)


def test_two_allocations_at_once_do_not_pass_the_limit_together() -> None:
    account = MemoryAccount(100)
    guard = greeted(account)
    flow = guard.from_client(allocation(60) + allocation(60))
    assert b"".join(flow.to_server) == allocation(60)


def test_two_links_share_one_limit() -> None:
    account = MemoryAccount(100)
    first = holding(account, 60)
    second = greeted(account)
    assert not second.from_client(allocation(60)).to_server
    first.close()
    assert account.allocated_bytes == 0
    assert second.from_client(allocation(60)).to_server


def test_what_the_server_could_not_allocate_is_not_held() -> None:
    account = MemoryAccount(100)
    guard = greeted(account)
    guard.from_client(allocation(60))
    guard.from_server(allocated(0, 0))
    assert account.allocated_bytes == 0


def test_freed_memory_can_be_allocated_again() -> None:
    account = MemoryAccount(100)
    guard = holding(account, 60)
    free = encode_request(Command.FREE_BUFFER, struct.pack("<Q", 5))
    assert b"".join(guard.from_client(free).to_server) == free
    assert account.allocated_bytes == 0
    with pytest.raises(GuardError, match="does not hold"):
        guard.from_client(free)


def test_a_closed_link_with_an_open_request_gives_everything_back() -> None:
    account = MemoryAccount(100)
    guard = holding(account, 60)
    guard.from_client(allocation(30))
    assert account.allocated_bytes == 90
    guard.close()
    guard.close()
    assert account == MemoryAccount(100)


def test_device_memory_is_told_within_the_limit() -> None:
    guard = holding(MemoryAccount(100), 60)
    question = encode_request(Command.GET_DEVICE_MEMORY, bytes(4))
    for real, told in (((1000, 2000), (40, 100)), ((30, 50), (30, 50))):
        guard.from_client(question)
        flow = guard.from_server(encode_answer(struct.pack("<QQ", *real)))
        assert b"".join(flow.to_client) == encode_answer(struct.pack("<QQ", *told))


def test_weights_are_counted_and_inputs_are_not() -> None:
    account = MemoryAccount(100)
    guard = holding(account, 60)
    guard.from_client(set_tensor(DIALECT_7, bytes(20), tensor(5)))
    guard.from_client(set_tensor(DIALECT_7, bytes(10), tensor(5, b"RPC0[x]#embd#0")))
    assert account.tensor_bytes == 20
    graph = build_graph(Graph(0, empty_tensors(1)["id"], empty_tensors(1)))
    guard.from_client(encode_request(Command.GRAPH_COMPUTE, graph))
    guard.from_client(set_tensor(DIALECT_7, bytes(20), tensor(5)))
    assert account.tensor_bytes == 20
    guard.from_client(encode_request(Command.FREE_BUFFER, struct.pack("<Q", 5)))
    assert account.tensor_bytes == 0


def test_no_more_weights_are_counted_than_a_buffer_holds() -> None:
    account = MemoryAccount(100)
    guard = holding(account, 30)
    for _ in range(3):
        guard.from_client(set_tensor(DIALECT_7, bytes(20), tensor(5)))
    assert account.tensor_bytes == 30


def test_a_hit_in_the_servers_cache_counts_as_its_tensor() -> None:
    account = MemoryAccount(100)
    guard = holding(account, 60)
    question = encode_request(
        Command.SET_TENSOR_HASH, messages.TENSOR_HASH.build(messages.TensorHash(tensor(5), 0, 9))
    )
    for hit in (0, 1):
        guard.from_client(question)
        guard.from_server(encode_answer(bytes([hit])))
    assert account.tensor_bytes == 40


REFUSED = {
    "not HELLO first": (allocation(1), "instead of HELLO"),
    "a command before HELLO's answer": (HELLO + allocation(1), "before HELLO was answered"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_start(name: str) -> None:
    data, words = REFUSED[name]
    with pytest.raises(GuardError, match=words):
        LinkGuard(MemoryAccount(100)).from_client(data)


LATER_REFUSED = {
    "a tensor in no buffer": (set_tensor(DIALECT_7, b"x", tensor(6)), "does not hold"),
    "a tensor larger than its buffer": (
        set_tensor(DIALECT_7, bytes(61), tensor(5)),
        "61 bytes of a tensor cannot lie in 60",
    ),
    "a read beyond the buffer": (
        encode_request(
            Command.GET_TENSOR, messages.GET_TENSOR.build(messages.GetTensor(tensor(5), 0, 1 << 60))
        ),
        "cannot lie in 60",
    ),
    "a tensor beyond the limit": (struct.pack("<BQ", 6, 1 << 40), "SET_TENSOR has"),
    "a graph beyond the limit": (struct.pack("<BQ", 10, 1 << 40), "GRAPH_COMPUTE has"),
    "a graph that cannot be": (
        encode_request(Command.GRAPH_COMPUTE, struct.pack("<II", 0, 1000) + bytes(40)),
        "graph of 1000 nodes",
    ),
    "clearing a foreign buffer": (
        encode_request(Command.BUFFER_CLEAR, struct.pack("<QB", 77, 0)),
        "does not hold",
    ),
    "copying from a foreign buffer": (
        encode_request(Command.COPY_TENSOR, tensor(9) + tensor(5)),
        "does not hold",
    ),
    "copying to a foreign buffer": (
        encode_request(Command.COPY_TENSOR, tensor(5) + tensor(9)),
        "does not hold",
    ),
    "too many questions at once": (encode_request(Command.DEVICE_COUNT) * 1025, "wait for answers"),
}


@pytest.mark.parametrize("name", LATER_REFUSED)
def test_refused_later(name: str) -> None:
    data, words = LATER_REFUSED[name]
    with pytest.raises(GuardError, match=words):
        holding(MemoryAccount(100), 60).from_client(data)


def test_a_server_that_talks_unasked_is_refused() -> None:
    with pytest.raises(GuardError, match=r"From the server: .*nothing asked for"):
        greeted(MemoryAccount(100)).from_server(encode_answer(b"x"))


def test_bulk_data_are_passed_on_without_a_copy() -> None:
    guard = holding(MemoryAccount(1 << 20), 1 << 20)
    data = set_tensor(DIALECT_7, bytes(1 << 19), tensor(5))
    flow = guard.from_client(data)
    bulk = flow.to_server[-1]
    assert isinstance(bulk, memoryview)
    assert bulk.obj is data
    assert b"".join(flow.to_server) == data


def session(dialect: Dialect, blobs: list[bytes]) -> tuple[bytes, bytes]:
    """All requests after HELLO of a client that loads and reads, and the server's answers."""
    requests, answers = [allocation(4096)], [allocated(5, 4096)]
    for blob in blobs:
        requests.append(set_tensor(dialect, blob, tensor(5)))
        read = messages.GET_TENSOR.build(messages.GetTensor(tensor(5), 0, len(blob)))
        requests.append(encode_request(Command.GET_TENSOR, read))
        answers.append(encode_answer(blob))
    requests.append(allocation(1 << 30))
    requests.append(encode_request(Command.DEVICE_COUNT))
    answers.append(encode_answer(bytes(4)))
    return b"".join(requests), b"".join(answers)


def pieces(data: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    while data:
        size = next(sizes)
        yield data[:size]
        data = data[size:]


@given(
    DIALECTS,
    st.lists(st.binary(max_size=600), max_size=6),
    st.lists(st.integers(1, 400), min_size=1, max_size=20),
)
def test_any_cutting_gives_the_same(dialect: Dialect, blobs: list[bytes], cuts: list[int]) -> None:
    requests, answers = session(dialect, blobs)
    # The client allocates first and goes on when it has the answer; the rest is cut at will.
    first = len(allocation(0))
    account = MemoryAccount(8192)
    guard = greeted(account, dialect)
    to_server = b"".join(guard.from_client(requests[:first]).to_server)
    to_client = b"".join(guard.from_server(answers[:24]).to_client)
    sizes = (cuts[number % len(cuts)] for number in range(1 << 30))
    for piece in pieces(requests[first:], sizes):
        flow = guard.from_client(piece)
        to_server += b"".join(flow.to_server)
        to_client += b"".join(flow.to_client)
    for piece in pieces(answers[24:], sizes):
        to_client += b"".join(guard.from_server(piece).to_client)
    assert to_server == requests.replace(allocation(1 << 30), b"")
    assert to_client == answers[:-12] + allocated(0, 0) + answers[-12:]
    assert account.tensor_bytes == sum(map(len, blobs))


@given(st.binary(max_size=1500), st.booleans(), DIALECTS)
def test_random_bytes_pass_or_are_refused(data: bytes, held: bool, dialect: Dialect) -> None:
    account = MemoryAccount(1000)
    guard = holding(account, 600, dialect) if held else LinkGuard(account)
    for feed in (guard.from_client, guard.from_server):
        try:
            flow = feed(data)
        except GuardError as error:
            assert error.message.startswith("From the ")
        else:
            assert sum(map(len, flow.to_server + flow.to_client)) <= len(data) + 64
    guard.close()
    assert (account.allocated_bytes, account.tensor_bytes) == (0, 0)


@given(st.data(), DIALECTS)
def test_wrong_frames_of_right_sizes_pass_or_are_refused(
    data: st.DataObject, dialect: Dialect
) -> None:
    guard = holding(MemoryAccount(1000), 600, dialect)
    command = data.draw(st.sampled_from(sorted(dialect.commands)))
    size = data.draw(st.sampled_from([0, 4, 8, 9, 12, 296, 312, 313, 320, 592, 3260]))
    payload = data.draw(st.binary(min_size=size, max_size=size))
    try:
        guard.from_client(encode_request(command, payload))
    except GuardError:
        return
    assert guard._account.allocated_bytes <= 1000


def llama_server(
    engine: EngineLocation, folder: Path, rpc_port: int
) -> tuple[SupervisedProcess, int]:
    port = free_port()
    options = (
        *("-m", str(tiny_model()), "--port", str(port), "--rpc", f"127.0.0.1:{rpc_port}"),
        *("--device", "RPC0", "-ngl", "99", "-t", "1", "-c", "256", "-np", "1", "--fit", "off"),
        *("-lv", "4"),
    )
    spec = ProcessSpec(
        name="llama-server",
        argv=(str(engine.llama_server), *options),
        log_path=folder / "llama.log",
        library_folders=engine.library_folders,
        ready_pattern="server is listening|all slots are idle",
        ready_port=port,
    )
    return SupervisedProcess(spec), port


def logged_bytes(lines: list[str], what: str) -> int:
    """What llama-server logged of a buffer on RPC0; it rounds to hundredths of a MiB."""
    pattern = re.compile(rf"RPC0\S* +{what} buffer size = +([0-9.]+) MiB")
    found = next(match[1] for line in lines if (match := pattern.search(line)))
    return round(float(found) * 2**20)


async def test_a_real_server_loads_and_answers_through_the_guard(
    engine: EngineLocation, tmp_path: Path
) -> None:
    lines: list[str] = []
    rpc = await start_rpc_server(engine, device="CPU", log_path=tmp_path / "rpc.log", threads=1)
    async with guarded_relay(rpc.port, 1 << 30) as relay:
        server, port = llama_server(engine, tmp_path, relay.port)
        server._on_line = lines.append
        server.start()
        await server.wait_ready()
        rounding = 0.01 * 2**20
        weights = logged_bytes(lines, "model")
        assert abs(relay.account.tensor_bytes - weights) < rounding
        held = weights + logged_bytes(lines, "KV") + logged_bytes(lines, "compute")
        assert abs(relay.account.allocated_bytes - held) < 3 * rounding
        async with httpx.AsyncClient(trust_env=False) as client:
            request = {"prompt": "the of", "n_predict": 4, "temperature": 0}
            answer = await client.post(f"http://127.0.0.1:{port}/completion", json=request)
        assert answer.json()["tokens_predicted"] == 4
        assert abs(relay.account.tensor_bytes - weights) < rounding
        await server.stop()
        assert relay.refusals == []
        assert relay.link_count > 1
    assert rpc.process.status.state is ProcessState.READY
    await rpc.process.stop()


async def test_a_limit_that_is_too_small_fails_the_load_and_spares_the_server(
    engine: EngineLocation, tmp_path: Path
) -> None:
    # Enough for the weights (298 kB), too little for the KV cache (256 KiB) besides.
    limit = 400_000
    rpc = await start_rpc_server(engine, device="CPU", log_path=tmp_path / "rpc.log", threads=1)
    async with guarded_relay(rpc.port, limit) as relay:
        server, _ = llama_server(engine, tmp_path, relay.port)
        server.start()
        with pytest.raises(LinkcppError, match="llama-server"):
            await server.wait_ready()
        # Build 10068 crashes while it cleans up, at times before its log thread has written why.
        is_crash = "SIGSEGV" in str(server.status.detail)
        assert is_crash or any("failed to allocate" in line for line in server.recent_lines)
        assert 250_000 < relay.max_allocated_bytes <= limit
        assert relay.denied_count == 1
        assert relay.refusals == []
        # The next client starts from nothing.
        async with await RpcClient.connect("127.0.0.1", relay.port) as client:
            assert (await client.device_memory()).free_bytes == limit
            await client.alloc_buffer(limit)
    assert rpc.process.status.state is ProcessState.READY
    await rpc.process.stop()


async def test_a_malformed_frame_ends_its_link_and_nothing_else(
    engine: EngineLocation, tmp_path: Path
) -> None:
    rpc = await start_rpc_server(engine, device="CPU", log_path=tmp_path / "rpc.log", threads=1)
    async with guarded_relay(rpc.port, 1 << 20) as relay:
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
        writer.write(HELLO)
        await reader.readexactly(36)
        writer.write(b"\xffGET / HTTP/1.1\r\n")
        assert await reader.read() == b""
        writer.close()
        assert len(relay.refusals) == 1
        assert relay.refusals[0].startswith("From the client: Command 255 is unknown in RPC ")
        async with await RpcClient.connect("127.0.0.1", relay.port) as client:
            assert await client.device_count() == 1
    assert rpc.process.status.state is ProcessState.READY
    await rpc.process.stop()
