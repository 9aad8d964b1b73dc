"""Peers that break the rules, stall or do not read: they cost little and hurt nobody else."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
from websockets.frames import Frame, Opcode

from linkcpp.gateway import connection as connection_module
from linkcpp.gateway.frames import PROTOCOL_ERROR
from linkcpp.registry.relay import MAX_HELLO_BYTES, PAIRED, RelayCloseCode
from tests.gateway.gateways import BOTH, Gateway, new_edge
from tests.gateway.process import gateway_process
from tests.gateway.raw import RawClient

pytestmark = pytest.mark.slow

BACKBONE, NODE = BOTH
MIB = 2**20


@pytest.fixture(scope="module")
def process() -> Iterator[Gateway]:
    with gateway_process() as running:
        yield running


@contextlib.asynccontextmanager
async def raw_pair(gateway: Gateway) -> AsyncIterator[tuple[RawClient, RawClient]]:
    edge = new_edge()
    clients = [await RawClient.side(gateway, edge, role) for role in BOTH]
    try:
        for client in clients:
            assert await client.frame() == (Opcode.BINARY, PAIRED)
        yield clients[0], clients[1]
    finally:
        for client in clients:
            await client.aclose()


BROKEN = {
    "unmasked": Frame(Opcode.BINARY, b"x").serialize(mask=False),
    "unknown opcode": bytes((0x83, 0x80)) + bytes(4),
    "reserved bit": bytes((0xA2, 0x80)) + bytes(4),
    "oversized ping": struct.pack("!BBH", 0x89, 0xFE, 126) + bytes(130),
    "fragmented close": bytes((0x08, 0x80)) + bytes(4),
    "continuation of nothing": Frame(Opcode.CONT, b"x").serialize(mask=True),
    "negative length": struct.pack("!BBQ", 0x82, 0xFF, 2**63) + bytes(4),
    "half a close code": Frame(Opcode.CLOSE, b"\x03").serialize(mask=True),
}


@pytest.mark.parametrize("stream", BROKEN.values(), ids=BROKEN.keys())
async def test_broken_frames_end_the_edge_with_a_clear_code(
    gateway: Gateway, stream: bytes
) -> None:
    async with raw_pair(gateway) as (backbone, node):
        backbone.send(Opcode.BINARY, b"said before")
        backbone.writer.write(stream)
        assert await backbone.close_code() == PROTOCOL_ERROR
        assert await node.frame() == (Opcode.BINARY, b"said before")
        node.send(Opcode.CLOSE, b"")
        assert await node.close_code() == RelayCloseCode.PEER_GONE


@pytest.mark.parametrize("stream", BROKEN.values(), ids=BROKEN.keys())
async def test_broken_frames_instead_of_a_hello_end_the_connection(
    gateway: Gateway, stream: bytes
) -> None:
    client = await RawClient.dial(gateway)
    client.writer.write(stream)
    assert await client.close_code() == PROTOCOL_ERROR
    await client.aclose()


async def test_a_hello_that_claims_to_be_huge_is_refused_before_it_is_there(
    gateway: Gateway,
) -> None:
    client = await RawClient.dial(gateway)
    client.writer.write(struct.pack("!BBQ4s", 0x82, 0xFF, 2**40, b"\0\0\0\0"))
    client.writer.write(bytes(65_536))
    assert await client.close_code() == RelayCloseCode.MALFORMED
    await client.aclose()


async def test_a_hello_in_endless_fragments_is_refused(gateway: Gateway) -> None:
    client = await RawClient.dial(gateway)
    client.send(Opcode.BINARY, b"LCR1", fin=False)
    for _ in range(MAX_HELLO_BYTES // 100 + 1):
        client.send(Opcode.CONT, bytes(100), fin=False)
    assert await client.close_code() == RelayCloseCode.MALFORMED
    await client.aclose()


async def test_a_hello_that_drips_is_cut_off_at_its_deadline(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HELLO_DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(connection_module, "CLOSING_SECONDS", 0.2)
    client = await RawClient.dial(gateway)
    stream = Frame(Opcode.BINARY, gateway.signer.hello(new_edge(), NODE)).serialize(mask=True)

    async def drip() -> None:
        for byte in stream:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    assert await client.close_code() == RelayCloseCode.HELLO_TIMEOUT
    dripping.cancel()
    await client.aclose()


async def test_an_answer_to_a_close_frame_is_not_waited_for_without_end(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "CLOSING_SECONDS", 0.2)
    assert gateway.relay is not None
    edge = new_edge()
    client = await RawClient.side(gateway, edge, NODE)
    client.send(Opcode.PING, b"")
    assert await client.frame() == (Opcode.PONG, b"")  # so the hello was read
    gateway.relay.close_edges([edge])
    assert await client.close_code() == RelayCloseCode.REVOKED  # and then the end of the socket
    await client.aclose()


def _resident(gateway: Gateway) -> int:
    return int(psutil.Process(gateway.process_id).memory_info().rss)


async def test_memory_stays_bounded_while_one_side_sends_64_mib_and_the_other_does_not_read(
    process: Gateway,
) -> None:
    async with raw_pair(process) as (backbone, node):
        node.reader._transport.pause_reading()  # type: ignore[attr-defined]
        before = _resident(process)
        frame = Frame(Opcode.BINARY, bytes(64 * MIB)).serialize(mask=True)
        backbone.writer.write(frame)
        sent, stuck = 0, 0
        while stuck < 10:
            await asyncio.sleep(0.05)
            left = backbone.writer.transport.get_write_buffer_size()
            stuck, sent = (0, len(frame) - left) if len(frame) - left > sent else (stuck + 1, sent)
        assert 0 < sent < 32 * MIB, "the gateway goes on to read"
        assert _resident(process) - before < 8 * MIB

        node.reader._transport.resume_reading()  # type: ignore[attr-defined]
        received = 0
        while received < 64 * MIB:
            received += len(await node.reader.read(MIB))
        assert _resident(process) - before < 8 * MIB


async def test_pings_without_end_to_a_peer_that_does_not_read_are_not_kept(
    process: Gateway,
) -> None:
    client = await RawClient.dial(process)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    before = _resident(process)
    pings = Frame(Opcode.PING, bytes(125)).serialize(mask=True) * 1000
    for _ in range(200):
        client.writer.write(pings)
        await client.writer.drain()
    assert _resident(process) - before < 8 * MIB
    await client.aclose()


async def test_a_side_that_does_not_read_does_not_hold_up_other_edges(process: Gateway) -> None:
    async with raw_pair(process) as (backbone, node), raw_pair(process) as (one, other):
        node.reader._transport.pause_reading()  # type: ignore[attr-defined]
        backbone.writer.write(Frame(Opcode.BINARY, bytes(32 * MIB)).serialize(mask=True))
        for _ in range(100):
            one.send(Opcode.BINARY, b"there")
            assert await other.frame() == (Opcode.BINARY, b"there")
            other.send(Opcode.BINARY, b"back")
            assert await one.frame() == (Opcode.BINARY, b"back")


async def test_a_side_that_stalls_for_good_is_dropped_and_its_partner_told(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "PING_SECONDS", 0.3)
    monkeypatch.setattr(connection_module, "CLOSING_SECONDS", 0.2)
    async with raw_pair(gateway) as (backbone, node):
        node.reader._transport.pause_reading()  # type: ignore[attr-defined]
        backbone.writer.write(Frame(Opcode.BINARY, bytes(32 * MIB)).serialize(mask=True))
        assert await backbone.close_code() == RelayCloseCode.PEER_GONE
