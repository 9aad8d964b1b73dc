"""Both ends of a link over a real gateway and real WebSockets."""

import asyncio
import os

import pytest

from linkcpp.link.forward import Forward
from linkcpp.link.records import LinkLimits
from linkcpp.link.status import ConnectionState
from tests.link.edges import TARGET, HubOfTest, accepting, edge, gateways, running_node
from tests.link.programs import pump, until

MEBIBYTE = 2**20


async def test_bytes_of_many_connections_come_back_through_a_relay() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        assert end.status().state is ConnectionState.UP
        messages = [os.urandom(size) for size in (0, 1, 1000, 300_000) * 5]
        answers = await asyncio.gather(*(pump(end.port, message) for message in messages))
        assert answers == messages
        status = end.status()
        assert status.sent_bytes == status.received_bytes == sum(map(len, messages))
        assert end.forward.sent_bytes == end.forward.received_bytes == status.sent_bytes
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
        await until(lambda: end.status().stream_count == 0)
    talker.close()


async def test_a_program_that_takes_no_connection_shows_as_a_reset() -> None:
    hub = HubOfTest()
    async with gateways(hub), accepting(hub, 9), edge(hub) as end:
        reader, _ = await asyncio.open_connection("127.0.0.1", end.port)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        # Who opened the port can say why.
        assert (await end.forward.wait_refused()).startswith("the program takes no connection: ")


async def test_a_port_to_what_the_node_does_not_serve_tells_why() -> None:
    hub = HubOfTest()
    async with running_node(hub), edge(hub) as end:
        async with await Forward.open(end.link, "something else") as forward:
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
            assert await forward.wait_refused() == "there is no 'something else' here"
            assert forward.refusal == "there is no 'something else' here"
            writer.close()
        assert end.forward.refusal is None
        assert await pump(end.port, b"and the others go on") == b"and the others go on"


async def test_a_port_that_is_closed_drops_its_connections_and_the_link_stays() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        async with await Forward.open(end.link, TARGET) as forward:
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            assert (forward.sent_bytes, forward.received_bytes) == (1, 1)
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", forward.port)
        await until(lambda: node.echo.open_count == 0 and end.status().stream_count == 0)
        assert await pump(end.port, b"still up") == b"still up"
        writer.close()


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
        assert answers.count(b"x") == LinkLimits().streams
        for _, writer in opened:
            writer.close()
        await until(lambda: end.status().stream_count == 0)
        assert await pump(end.port, b"room again") == b"room again"
