"""What strangers cost a node's real agent: nothing that its coordinator would notice."""

import asyncio
import random
import struct
from pathlib import Path

import httpx
import psutil
import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.node.connector import open_client
from linkcpp.registry.relay import encode_cluster_hello
from tests.node.agents import agent_process
from tests.support.dripping import dripping
from tests.support.lengths import repeated

ATTACKERS = 560
CALLS = 20
# With --long a million frames.
FRAMES_A_CONNECTION = 200
CONNECTIONS = repeated(200)
AT_ONCE = 100
MEBIBYTE = 2**20
UPGRADE = (
    b"GET /v1/edge HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"GET / HTTP/1.1\r\nX-Endless: ", id="endless head"),
        pytest.param(b"", id="no head"),
        pytest.param(UPGRADE, id="a link without a hello"),
        pytest.param(UPGRADE + b"\x82\xfe\xff\xff\0\0\0\0", id="a hello that never ends"),
        pytest.param(
            b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\nGET", id="one answer, then no more"
        ),
    ],
)
async def test_an_agent_serves_its_coordinator_while_strangers_hold_hundreds_of_connections(
    stock_engine: EngineLocation, tmp_path: Path, said: bytes
) -> None:
    async with agent_process(stock_engine, tmp_path / "node") as agent:
        port = httpx.URL(agent.url).port or 0
        async with await open_client(agent.url, agent.token) as known:
            await known.node()
            async with dripping(port, ATTACKERS, said):
                for _ in range(CALLS):
                    await known.node()
                    async with await open_client(agent.url, agent.token) as fresh:
                        await fresh.node()


def frame(payload: bytes) -> bytes:
    """A client's binary frame (RFC 6455, section 5.2), masked with zeros."""
    size = len(payload)
    head = bytes([0x82, 0x80 | size]) if size < 126 else struct.pack("!BBH", 0x82, 0xFE, size)
    return head + bytes(4) + payload


def what_a_stranger_sends(chance: random.Random) -> bytes:
    """Begin a link as well as one can without the token, or in any other way, and go on."""
    hello = encode_cluster_hello(chance.randbytes(16).hex())
    first = [hello, hello, chance.randbytes(20), b"LCR1" + chance.randbytes(60), b""]
    frames = [frame(chance.choice(first))]
    sizes = chance.choices((0, 1, 48, 72, 88, 300), k=FRAMES_A_CONNECTION - 1)
    frames += [frame(chance.randbytes(size)) for size in sizes]
    data = b"".join(frames)
    if chance.random() < 0.05:  # not even frames, from somewhere on
        at = chance.randrange(len(data))
        data = data[:at] + chance.randbytes(len(data) - at)
    return UPGRADE + data


async def be_strangers(port: int, chance: random.Random, count: int) -> None:
    """Be so many, some at a time: those that stop in the middle of a frame are heard for 10 s."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def be_one() -> None:
        async with turns:
            told = await be_a_stranger(port, chance)
        assert len(told) < 1000

    await asyncio.gather(*(be_one() for _ in range(count)))


async def be_a_stranger(port: int, chance: random.Random) -> bytes:
    """Send it all, and read until the agent ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    try:
        async with asyncio.timeout(60):
            writer.write(what_a_stranger_sends(chance))
            while piece := await reader.read(65536):
                heard += piece
    except OSError:
        pass
    finally:
        writer.transport.abort()
    return heard


async def test_frames_of_strangers_cost_an_agent_nothing_that_lasts_and_tell_them_nothing(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    chance = random.Random(9)  # noqa: S311
    async with agent_process(stock_engine, tmp_path / "node") as agent:
        port = httpx.URL(agent.url).port or 0
        process = psutil.Process(agent.process.pid)
        async with await open_client(agent.url, agent.token) as known:
            await be_strangers(port, chance, AT_ONCE)
            await known.node()
            before, descriptors = process.memory_info().rss, process.num_fds()
            await be_strangers(port, chance, CONNECTIONS)
            await known.node()
            async with await open_client(agent.url, agent.token) as fresh:
                await fresh.node()
            assert process.memory_info().rss - before < 24 * MEBIBYTE
            while process.num_fds() > descriptors + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert "Traceback" not in agent.output.read_text()
