"""One gateway process holds 1,000 idle edges while 200 others are busy."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import resource

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.frames import Opcode

from linkcpp.common.descriptors import raise_descriptor_limit
from linkcpp.registry.relay import PAIRED
from tests.gateway.gateways import BOTH, Gateway, new_edge
from tests.gateway.process import gateway_process
from tests.gateway.raw import RawClient

IDLE_EDGES = 1000
BUSY_EDGES = 200
MESSAGES = 20
MESSAGE_BYTES = 12 * 1024
DIALS_AT_ONCE = 50
# A row of 122B is 12 KiB; what a busy edge carries is mostly that.
_HEAD_BYTES = 4


async def _open_edges(gateway: Gateway, count: int) -> list[tuple[RawClient, RawClient]]:
    async def open_edge() -> tuple[RawClient, RawClient]:
        edge = new_edge()
        first, second = [await RawClient.side(gateway, edge, role) for role in BOTH]
        for client in (first, second):
            assert await client.frame() == (Opcode.BINARY, PAIRED)
        return first, second

    opened: list[tuple[RawClient, RawClient]] = []
    for _ in range(count // DIALS_AT_ONCE):
        opened += await asyncio.gather(*(open_edge() for _ in range(DIALS_AT_ONCE)))
    return opened


async def _exchange(number: int, pair: tuple[RawClient, RawClient]) -> None:
    """Send messages both ways at the same time, each side's own, and compare what arrives."""

    def message(side: int, index: int) -> bytes:
        seed = hashlib.sha256(f"{number} {side} {index}".encode()).digest()
        return seed * (MESSAGE_BYTES // len(seed))

    async def send(side: int) -> None:
        for index in range(MESSAGES):
            pair[side].send(Opcode.BINARY, message(side, index))
            await pair[side].writer.drain()

    async def receive(side: int) -> None:
        for index in range(MESSAGES):
            head = await pair[side].reader.readexactly(_HEAD_BYTES)
            assert head == bytes((0x82, 126)) + MESSAGE_BYTES.to_bytes(2, "big")
            received = await pair[side].reader.readexactly(MESSAGE_BYTES)
            assert received == message(1 - side, index)

    await asyncio.gather(send(0), send(1), receive(0), receive(1))


@pytest.mark.slow
async def test_a_thousand_idle_edges_and_two_hundred_busy_ones_fit_in_one_process() -> None:
    raise_descriptor_limit(10_000)
    with gateway_process() as gateway:
        process = psutil.Process(gateway.process_id)
        before = process.memory_info().rss
        idle = await _open_edges(gateway, IDLE_EDGES)
        assert process.memory_info().rss - before < IDLE_EDGES * 64 * 1024
        busy = await _open_edges(gateway, BUSY_EDGES)
        await asyncio.gather(*(_exchange(number, pair) for number, pair in enumerate(busy)))
        for first, second in idle:
            first.send(Opcode.BINARY, b"still here")
            second.send(Opcode.BINARY, b"so am I")
        for first, second in idle:
            assert await second.frame() == (Opcode.BINARY, b"still here")
            assert await first.frame() == (Opcode.BINARY, b"so am I")
        for client in itertools.chain(*idle, *busy):
            client.writer.transport.abort()


async def test_relayed_connections_leave_descriptors_for_everything_else() -> None:
    most = 256
    with gateway_process() as gateway:
        process = psutil.Process(gateway.process_id)
        process.rlimit(resource.RLIMIT_NOFILE, (most, most))
        url = f"http://127.0.0.1:{gateway.port}/v1/health"
        async with contextlib.AsyncExitStack() as stack:
            with pytest.raises(InvalidStatus) as refused:
                for _ in range(most):
                    await stack.enter_async_context(gateway.dial())
            answer = refused.value.response
            assert (answer.status_code, json.loads(answer.body)["code"]) == (503, "full")
            assert most - process.num_fds() >= 120
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(url)).status_code == 200
            for _ in range(most):
                _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                stack.callback(writer.transport.abort)
            assert most - process.num_fds() >= 60
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
