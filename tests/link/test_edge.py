"""Both ends of an edge over a real gateway and real WebSockets."""

import asyncio
import os

import pytest

from linkcpp.link.records import EdgeLimits
from linkcpp.link.status import EdgeState
from tests.link.edges import HubOfTest, accepting, edge, gateways, running_node
from tests.link.programs import pump, until

MEBIBYTE = 2**20


async def test_bytes_of_many_connections_come_back_through_a_relay() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        assert end.status().state is EdgeState.UP
        messages = [os.urandom(size) for size in (0, 1, 1000, 300_000) * 5]
        answers = await asyncio.gather(*(pump(end.port, message) for message in messages))
        assert answers == messages
        status = end.status()
        assert status.sent_bytes == status.received_bytes == sum(map(len, messages))
        assert node.echo.connection_count == 20


async def test_a_gateway_that_dies_in_a_transfer_costs_no_byte() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        (gateway,) = node.gateways
        data = os.urandom(24 * MEBIBYTE)
        transfer = asyncio.create_task(pump(end.port, data))
        for _ in range(3):
            before = node.echo.received_bytes
            await until(lambda: node.echo.received_bytes > before + 2 * MEBIBYTE)  # noqa: B023
            await gateway.stop()
            await gateway.start()
        async with asyncio.timeout(120):
            assert await transfer == data
        assert end.status().reconnect_count >= 3
        assert node.echo.connection_count == 1


async def test_a_client_that_leaves_ends_what_its_program_still_sends() -> None:
    hub = HubOfTest()
    has_left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(bytes(10_000))
                await writer.drain()
                await asyncio.sleep(0.001)
        except OSError:
            has_left.set_result(None)

    talker = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = talker.sockets[0].getsockname()[1]
    async with gateways(hub), accepting(hub, port), edge(hub) as end:
        reader, writer = await asyncio.open_connection("127.0.0.1", end.port)
        await reader.readexactly(100_000)
        writer.close()
        async with asyncio.timeout(120):
            await has_left
        await until(lambda: end.status().connection_count == 0)
    talker.close()


async def test_a_program_that_takes_no_connection_shows_as_a_reset() -> None:
    hub = HubOfTest()
    async with gateways(hub), accepting(hub, 9), edge(hub) as end:
        reader, _ = await asyncio.open_connection("127.0.0.1", end.port)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)


async def test_each_direction_ends_by_itself() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        node.echo.goes_on.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", end.port)
        writer.write(b"question")
        writer.write_eof()
        await asyncio.sleep(0.1)
        node.echo.goes_on.set()
        assert await reader.read(-1) == b"question"
        writer.close()


async def test_connections_beyond_the_bound_are_dropped_and_the_others_go_on() -> None:
    hub = HubOfTest()
    async with running_node(hub), edge(hub) as end:
        opened = [await asyncio.open_connection("127.0.0.1", end.port) for _ in range(80)]
        for _, writer in opened:
            writer.write(b"x")
        answers = await asyncio.gather(
            *(reader.read(1) for reader, _ in opened), return_exceptions=True
        )
        assert answers.count(b"x") == EdgeLimits().streams
        for _, writer in opened:
            writer.close()
        await until(lambda: end.status().connection_count == 0)
        assert await pump(end.port, b"room again") == b"room again"
