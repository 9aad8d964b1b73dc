"""Streams to rpc-servers, and their guard, with real agents, rpc-servers and llama-servers."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Self

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linkcpp.engine import liveness
from linkcpp.engine import process as process_module
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.wire import Command, WireError, encode_request
from linkcpp.engine.wire_messages import PLAIN_TCP
from linkcpp.engine.wire_tensor import empty_tensors
from linkcpp.node.agent import AgentOptions
from linkcpp.node.client import NodeClient, NodeRefusedError
from linkcpp.node.connector import open_client
from linkcpp.node.limits import AGENT_BYTES
from linkcpp.node.records import ServerRecord, ServerRequest, ServerState, server_target
from tests.node.agents import MEBIBYTE, RunningAgent, agent_process, running_agent
from tests.node.links import server_forward
from tests.node.llama import complete, llama_server, rpc_words, wait_loaded
from tests.support.lengths import repeated
from tests.support.memory import peak_bytes
from tests.support.models import smollm2_path
from tests.support.rpc_client import RpcClient


@pytest.fixture
async def node(stock_engine: EngineLocation) -> AsyncIterator[RunningAgent]:
    async with running_agent(stock_engine) as running:
        yield running


async def a_server(
    node: RunningAgent, memory_bytes: int = 64 * MEBIBYTE, lease_seconds: float = 60.0
) -> ServerRecord:
    return await node.client.create_server(
        ServerRequest(
            deployment="test",
            device="CPU",
            memory_bytes=memory_bytes,
            threads=1,
            lease_seconds=lease_seconds,
        )
    )


async def until(
    node: RunningAgent, server: ServerRecord, is_so: Callable[[ServerRecord], bool]
) -> ServerRecord:
    """Ask for the server until something is so of it."""
    while True:
        now = await node.client.server(server.server_id)
        if is_so(now):
            return now
        await asyncio.sleep(0.01)


async def until_state(node: RunningAgent, server: ServerRecord, state: ServerState) -> ServerRecord:
    return await until(node, server, lambda now: now.state is state)


class RawStream:
    """A stream to a server, for bytes that no client of llama.cpp sends."""

    def __init__(self, client: NodeClient, server: ServerRecord) -> None:
        self.reader, self.writer = client.link.connect(server_target(server.server_id))

    async def ended(self) -> str:
        """Wait until the other end resets it; return its words."""
        with pytest.raises(ConnectionResetError) as error:
            while await self.reader.read(1024):
                pass
        return str(error.value)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()


async def test_a_real_model_over_two_agents_answers_as_one_process_does(
    engine: EngineLocation, tmp_path: Path
) -> None:
    model = smollm2_path()
    async with llama_server(engine, model, tmp_path / "one.log") as (process, url):
        assert await wait_loaded(process, url)
        expected = await complete(url)
    async with running_agent(engine) as first, running_agent(engine) as second:
        servers = [await a_server(node, 256 * MEBIBYTE) for node in (first, second)]
        async with (
            await server_forward(first.client, servers[0]) as left,
            await server_forward(second.client, servers[1]) as right,
        ):
            words = rpc_words([left.endpoint, right.endpoint], 31, "16,15")
            log = tmp_path / "split.log"
            async with llama_server(engine, model, log, *words) as (process, url):
                assert await wait_loaded(process, url), log.read_text()[-2000:]
                assert await complete(url) == expected
                held = await first.client.server(servers[0].server_id)
                assert held.is_used
                assert 20 * MEBIBYTE < held.tensor_bytes < held.allocated_bytes
            assert left.sent_bytes > held.tensor_bytes
            await until(first, servers[0], lambda now: now.allocated_bytes == 0)


async def test_a_model_beyond_the_promise_is_refused_and_the_memory_stays_below(
    engine: EngineLocation, tmp_path: Path
) -> None:
    async with running_agent(engine) as node:
        promise = 24 * MEBIBYTE
        server = await a_server(node, promise)
        (process,) = _rpc_servers()
        async with await server_forward(node.client, server) as forward:
            log = tmp_path / "llama.log"
            words = rpc_words([forward.endpoint], 31, "1")
            async with llama_server(engine, smollm2_path(), log, *words) as (llama, url):
                assert not await wait_loaded(llama, url)
            assert forward.refusal is None
        assert peak_bytes(process.pid) <= promise + node.agent.servers.overhead_bytes


async def test_a_promise_of_just_what_a_model_takes_is_enough_and_is_kept(
    engine: EngineLocation, tmp_path: Path
) -> None:
    async with running_agent(engine) as node:
        taken = 256 * MEBIBYTE
        for attempt in range(2):
            server = await a_server(node, taken)
            (process,) = _rpc_servers()
            async with await server_forward(node.client, server) as forward:
                log = tmp_path / f"llama-{attempt}.log"
                words = rpc_words([forward.endpoint], 31, "1")
                async with llama_server(engine, smollm2_path(), log, *words) as (llama, url):
                    assert await wait_loaded(llama, url), log.read_text()[-2000:]
                    assert await complete(url, tokens=4)
                    taken = (await node.client.server(server.server_id)).allocated_bytes
                    keeper = process.parent()
                    assert keeper is not None
                    peak = peak_bytes(process.pid) + keeper.memory_info().rss
            assert peak <= taken + node.agent.servers.overhead_bytes
            await node.client.delete(server.server_id)


async def test_a_client_that_lies_about_sizes_cannot_take_more_than_promised(
    engine: EngineLocation,
) -> None:
    async with running_agent(engine) as node:
        server = await a_server(node, 16 * MEBIBYTE)
        (process,) = _rpc_servers()
        async with await server_forward(node.client, server) as forward:
            async with await RpcClient.connect("127.0.0.1", forward.port) as client:
                with pytest.raises(WireError):
                    await client.alloc_buffer(17 * MEBIBYTE)
                await client.alloc_buffer(8 * MEBIBYTE)
                with pytest.raises(WireError):
                    await client.alloc_buffer(9 * MEBIBYTE)
            assert forward.refusal is None
        async with RawStream(node.client, server) as raw:
            raw.writer.write(encode_request(Command.HELLO, PLAIN_TCP))
            assert await raw.reader.read(1)
            # SET_TENSOR that announces a terabyte.
            raw.writer.write(bytes([6]) + (2**40).to_bytes(8, "little"))
            assert "SET_TENSOR" in await raw.ended()
        assert process.memory_info().rss < 16 * MEBIBYTE + node.agent.servers.overhead_bytes
        assert (await node.client.server(server.server_id)).state is ServerState.READY


async def test_a_request_beyond_the_offer_is_refused_with_numbers(
    stock_engine: EngineLocation,
) -> None:
    limit = 512 * MEBIBYTE
    options = AgentOptions(host="127.0.0.1", memory_limit_bytes=limit, mdns=False)
    async with running_agent(stock_engine, options=options) as node:
        offered = (await node.client.node()).devices[0].offered_bytes
        assert offered == limit - AGENT_BYTES - node.agent.servers.overhead_bytes
        with pytest.raises(NodeRefusedError, match=str(offered)) as error:
            await a_server(node, offered + 1)
        assert error.value.code == "insufficient_memory"
        await a_server(node, offered // 2)
        left = (await node.client.node()).devices[0].offered_bytes
        assert left == limit - AGENT_BYTES - offered // 2 - 2 * node.agent.servers.overhead_bytes
        with pytest.raises(NodeRefusedError):
            await a_server(node, offered // 2)
        await a_server(node, left)


async def test_simultaneous_requests_are_not_promised_the_same_memory(
    stock_engine: EngineLocation,
) -> None:
    options = AgentOptions(
        host="127.0.0.1", memory_limit_bytes=400 * MEBIBYTE + AGENT_BYTES, mdns=False
    )
    async with running_agent(stock_engine, options=options) as node:
        answers = await asyncio.gather(
            *(a_server(node, 100 * MEBIBYTE) for _ in range(6)), return_exceptions=True
        )
        granted = [answer for answer in answers if isinstance(answer, ServerRecord)]
        refused = [answer for answer in answers if isinstance(answer, NodeRefusedError)]
        each = 100 * MEBIBYTE + node.agent.servers.overhead_bytes
        assert len(granted) == 400 * MEBIBYTE // each
        assert len(granted) + len(refused) == 6


async def test_a_server_that_owes_an_answer_and_does_nothing_is_ended(
    node: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.5)
    # It stands for one that waits for a lock: the signal itself is not looked at here.
    monkeypatch.setattr(liveness, "STOPPED_SECONDS", 3600.0)
    server = await a_server(node)
    async with await server_forward(node.client, server) as forward:
        async with await RpcClient.connect("127.0.0.1", forward.port) as client:
            await asyncio.sleep(0.6)
            # It is idle, and owes nobody anything.
            assert (await node.client.server(server.server_id)).state is ServerState.READY
            (program,) = _rpc_servers()
            program.suspend()
            with pytest.raises(WireError):
                await client.alloc_buffer(1024)
        ended = await until_state(node, server, ServerState.FAILED)
    assert "neither answered nor computed" in (ended.detail or "")


async def test_a_server_ends_when_its_lease_passes_without_renewal_or_connection(
    node: RunningAgent,
) -> None:
    server = await a_server(node, lease_seconds=0.5)
    ended = await until_state(node, server, ServerState.STOPPED)
    assert ended.detail == "its lease ended"
    assert _rpc_servers() == []


async def test_a_connection_keeps_a_server_beyond_its_lease(node: RunningAgent) -> None:
    server = await a_server(node, lease_seconds=2.0)
    async with (
        await server_forward(node.client, server) as forward,
        await RpcClient.connect("127.0.0.1", forward.port) as client,
    ):
        other = await a_server(node, lease_seconds=2.0)
        await until_state(node, other, ServerState.STOPPED)
        await asyncio.sleep(0.5)
        assert await client.device_count() == 1
        assert (await node.client.server(server.server_id)).state is ServerState.READY
    await until_state(node, server, ServerState.STOPPED)


async def test_another_machine_is_refused_while_one_uses_the_server(node: RunningAgent) -> None:
    server = await a_server(node)
    async with await open_client(node.url, node.token) as other:
        async with (
            await server_forward(node.client, server) as forward,
            await RpcClient.connect("127.0.0.1", forward.port) as client,
        ):
            assert await client.device_count() == 1
            async with RawStream(other, server) as raw:
                assert (await raw.ended()).startswith("in_use: ")
            assert await client.device_count() == 1
        await until(node, server, lambda now: not now.is_used)
        async with (
            await server_forward(other, server) as forward,
            await RpcClient.connect("127.0.0.1", forward.port) as client,
        ):
            assert await client.device_count() == 1


async def test_a_second_local_connection_waits_for_the_first(node: RunningAgent) -> None:
    server = await a_server(node)
    async with await server_forward(node.client, server) as forward:
        first = await RpcClient.connect("127.0.0.1", forward.port)
        second = asyncio.create_task(RpcClient.connect("127.0.0.1", forward.port))
        await asyncio.sleep(0.2)
        assert not second.done()
        assert await first.device_count() == 1
        await first.aclose()
        client = await second
        assert await client.device_count() == 1
        await client.aclose()


async def test_a_server_that_dies_is_reported_with_the_reason_and_not_restarted(
    node: RunningAgent,
) -> None:
    server = await a_server(node)
    async with await server_forward(node.client, server) as forward:
        client = await RpcClient.connect("127.0.0.1", forward.port)
        (process,) = _rpc_servers()
        process.kill()
        assert "SIGKILL" in await forward.wait_refused()
        with pytest.raises(WireError):
            await client.device_count()
        await client.aclose()
    failed = await until_state(node, server, ServerState.FAILED)
    assert "SIGKILL" in (failed.detail or "")
    assert _rpc_servers() == []
    async with RawStream(node.client, server) as raw:
        assert "SIGKILL" in await raw.ended()


async def test_the_link_lives_while_its_server_reads_nothing(node: RunningAgent) -> None:
    size = 48 * MEBIBYTE
    server = await a_server(node, size)
    (process,) = _rpc_servers()
    async with (
        await server_forward(node.client, server) as forward,
        await RpcClient.connect("127.0.0.1", forward.port, timeout_seconds=60) as client,
    ):
        buffer = (await client.alloc_buffer(size)).buffer
        record = empty_tensors(1)
        record["buffer"], record["data"] = buffer, await client.buffer_base(buffer)
        record["ne"] = [size // 4, 1, 1, 1]
        record["nb"] = [4, size, size, size]
        process.suspend()
        sending = asyncio.create_task(client.set_tensor(record.tobytes(), bytes(size)))
        sent = -1
        while sent != forward.sent_bytes:
            sent = forward.sent_bytes
            # The agent answers pings although what it would pass on has nowhere to go.
            await node.client.link.ping()
            await asyncio.sleep(0.2)
        assert sent < size
        process.resume()
        await sending
        assert await client.device_count() == 1
        assert forward.sent_bytes > size


async def test_deleting_a_server_tells_its_client(node: RunningAgent) -> None:
    server = await a_server(node)
    async with (
        await server_forward(node.client, server) as forward,
        await RpcClient.connect("127.0.0.1", forward.port) as client,
    ):
        assert await client.device_count() == 1
        await node.client.delete(server.server_id)
        assert "it was stopped by its owner" in await forward.wait_refused()


@pytest.mark.parametrize("data", [b"\x00" * 64, b"\xff" * 9, b"GET / HTTP/1.1\r\n\r\n"])
async def test_what_is_not_rpc_ends_that_stream_and_nothing_else(
    node: RunningAgent, data: bytes
) -> None:
    broken, whole = await a_server(node), await a_server(node)
    async with (
        await server_forward(node.client, whole) as forward,
        await RpcClient.connect("127.0.0.1", forward.port) as client,
    ):
        async with RawStream(node.client, broken) as raw:
            raw.writer.write(data)
            assert await raw.ended()
        assert await client.device_count() == 1
    states = {record.state for record in await node.client.servers()}
    assert states == {ServerState.READY}


async def test_a_client_that_stalls_mid_message_blocks_nobody(node: RunningAgent) -> None:
    stalled, other = await a_server(node), await a_server(node)
    async with RawStream(node.client, stalled) as raw:
        raw.writer.write(encode_request(Command.HELLO, PLAIN_TCP)[:5])
        async with (
            await server_forward(node.client, other) as forward,
            await RpcClient.connect("127.0.0.1", forward.port) as client,
        ):
            assert await client.device_count() == 1


_PIECES = st.lists(
    st.one_of(
        st.binary(max_size=400),
        st.builds(
            encode_request, st.sampled_from(list(Command)), st.binary(max_size=32).map(bytes)
        ),
        st.just(encode_request(Command.HELLO, PLAIN_TCP)),
    ),
    max_size=8,
)


async def test_no_sequence_of_bytes_hurts_the_agent(
    stock_engine: EngineLocation, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_agent(stock_engine) as node:
        server = await a_server(node)
        loop = asyncio.get_running_loop()

        async def try_pieces(pieces: list[bytes]) -> None:
            async with RawStream(node.client, server) as raw:
                for piece in pieces:
                    raw.writer.write(piece)
            now = await until(node, server, lambda now: not now.is_used)
            assert now.state is ServerState.READY
            assert now.allocated_bytes == 0

        @settings(
            max_examples=repeated(60),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(_PIECES)
        def fuzz(pieces: list[bytes]) -> None:
            asyncio.run_coroutine_threadsafe(try_pieces(pieces), loop).result()

        await asyncio.to_thread(fuzz)
    assert "internal error" not in caplog.text


async def test_killing_the_agent_leaves_no_process(engine: EngineLocation, tmp_path: Path) -> None:
    async with (
        agent_process(engine, tmp_path / "node") as agent,
        await open_client(agent.url, agent.token) as client,
    ):
        request = ServerRequest(deployment="d", device="CPU", memory_bytes=16 * MEBIBYTE)
        for _ in range(2):
            await client.create_server(request)
        engine_processes = agent.engine_processes()
        assert len(engine_processes) == 4
        lost = asyncio.create_task(client.link.wait_session_lost())
        agent.process.kill()
        assert await lost
        await agent.process.wait()
        await asyncio.to_thread(psutil.wait_procs, engine_processes, timeout=120)
        assert not any(process.is_running() for process in engine_processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_stopped_agent_ends_its_servers_and_says_so(
    stock_engine: EngineLocation, tmp_path: Path, number: signal.Signals
) -> None:
    async with agent_process(stock_engine, tmp_path / "node", "--memory", "1GB") as agent:
        async with await open_client(agent.url, agent.token) as client:
            request = ServerRequest(deployment="mine", device="CPU", memory_bytes=16 * MEBIBYTE)
            server = await client.create_server(request)
            forward = await server_forward(client, server)
            user = await RpcClient.connect("127.0.0.1", forward.port)
            assert await user.device_count() == 1
            engine_processes = agent.engine_processes()
            os.kill(agent.process.pid, number)
            assert "the node agent was stopped" in await forward.wait_refused()
            assert await agent.process.wait() == 0
            assert not any(process.is_running() for process in engine_processes)
            await user.aclose()
            await forward.aclose()
        said = await asyncio.to_thread(agent.output.read_text)
    assert agent.url in said
    assert "mine" in said
    assert "nothing of this node is left running" in said
    assert agent.token not in said


def _rpc_servers() -> list[psutil.Process]:
    """List the rpc-servers that this test process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "rpc-server" in process.name():
                found.append(process)
    return found
