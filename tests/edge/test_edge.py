"""Both ends of an edge over a real gateway and real WebSockets."""

import asyncio
import os

from linkcpp.edge.status import EdgeState
from tests.edge.edges import HubOfTest, edge, running_node
from tests.edge.programs import exchange, until

MEBIBYTE = 2**20


async def test_bytes_of_many_connections_come_back_through_a_relay() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        assert end.status().state is EdgeState.UP
        messages = [os.urandom(size) for size in (0, 1, 1000, 300_000) * 5]
        answers = await asyncio.gather(*(exchange(end.port, message) for message in messages))
        assert answers == messages
        status = end.status()
        assert status.sent_bytes == status.received_bytes == sum(map(len, messages))
        assert node.echo.connection_count == 20


async def test_a_gateway_that_dies_in_a_transfer_costs_no_byte() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        (gateway,) = node.gateways
        data = os.urandom(24 * MEBIBYTE)
        transfer = asyncio.create_task(exchange(end.port, data))
        for _ in range(3):
            before = node.echo.received_bytes
            await until(lambda: node.echo.received_bytes > before + 2 * MEBIBYTE)  # noqa: B023
            await gateway.stop()
            await gateway.start()
        async with asyncio.timeout(30):
            assert await transfer == data
        assert end.status().reconnect_count >= 3
        assert node.echo.connection_count == 1
