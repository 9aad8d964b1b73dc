"""Two sides meet and exchange messages, with the ``websockets`` library as client."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosedOK

from linkcpp.registry.relay import FIN, RelayCloseCode
from tests.gateway.gateways import Gateway, closed_with
from tests.gateway.process import gateway_process

LENGTHS = (0, 1, 2, 124, 125, 126, 127, 128, 65_534, 65_535, 65_536, 65_537, 2**20, 2**20 + 1)
LARGE = 64 * 2**20


@pytest.fixture(scope="module")
def uvloop_process() -> Iterator[Gateway]:
    with gateway_process() as running:
        yield running


@pytest.fixture(params=["asyncio", "uvloop"])
def either(request: pytest.FixtureRequest, gateway: Gateway, uvloop_process: Gateway) -> Gateway:
    """A gateway on asyncio's own event loop, and one on uvloop as ``linkcpp gateway`` is."""
    return gateway if request.param == "asyncio" else uvloop_process


async def _passes(sender: ClientConnection, receiver: ClientConnection, message: bytes) -> None:
    _, received = await asyncio.gather(sender.send(message), receiver.recv())
    assert isinstance(received, bytes)
    assert len(received) == len(message)
    assert hashlib.sha256(received).digest() == hashlib.sha256(message).digest()


async def test_messages_of_every_length_pass_unchanged_in_both_directions(either: Gateway) -> None:
    async with either.pair() as (backbone, node):
        for length in LENGTHS:
            message = os.urandom(length)
            await _passes(backbone, node, message)
            await _passes(node, backbone, message)


async def test_a_message_of_64_mib_passes_in_both_directions_at_once(
    uvloop_process: Gateway,
) -> None:
    async with uvloop_process.pair() as (backbone, node):
        there, back = os.urandom(LARGE), os.urandom(LARGE)
        await asyncio.gather(_passes(backbone, node, there), _passes(node, backbone, back))


async def test_fragments_of_every_length_with_pings_between_them_arrive_as_one_message(
    either: Gateway,
) -> None:
    parts = [os.urandom(length) for length in LENGTHS]

    async def fragments(connection: ClientConnection) -> AsyncIterator[bytes]:
        for part in parts:
            yield part
            await connection.ping()

    async with either.pair() as (backbone, node):
        for sender, receiver in ((backbone, node), (node, backbone)):
            _, received = await asyncio.gather(sender.send(fragments(sender)), receiver.recv())
            assert received == b"".join(parts)


async def test_many_messages_keep_their_borders_and_their_order(gateway: Gateway) -> None:
    messages = [os.urandom(index * 37 % 700) for index in range(2000)]

    async def send_all(connection: ClientConnection) -> None:
        for message in messages:
            await connection.send(message)

    async with gateway.pair() as (backbone, node):
        sending = asyncio.gather(send_all(backbone), send_all(node))
        for message in messages:
            assert await node.recv() == message
            assert await backbone.recv() == message
        await sending


async def test_a_part_of_a_message_is_passed_on_before_its_end(gateway: Gateway) -> None:
    async def endless(parts: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
        while part := await parts.get():
            yield part

    async with gateway.pair() as (backbone, node):
        parts: asyncio.Queue[bytes] = asyncio.Queue()
        sending = asyncio.create_task(backbone.send(endless(parts)))
        arriving = node.recv_streaming()
        for part in (b"first", b"second"):
            parts.put_nowait(part)
            assert await anext(arriving) == part
        parts.put_nowait(b"")
        await sending
        assert [part async for part in arriving] == [b""]


async def test_a_side_that_has_finished_still_receives(gateway: Gateway) -> None:
    async with gateway.pair() as (backbone, node):
        await backbone.send(b"the last word")
        await backbone.send(FIN)
        assert await node.recv() == b"the last word"
        assert await node.recv() == FIN
        await _passes(node, backbone, b"an answer")
        await node.send(FIN)
        assert await backbone.recv() == FIN
        with pytest.raises(ConnectionClosedOK):
            await backbone.recv()
        with pytest.raises(ConnectionClosedOK):
            await node.recv()


async def test_data_after_fin_ends_the_edge(gateway: Gateway) -> None:
    async with gateway.pair() as (backbone, node):
        await backbone.send(FIN)
        await backbone.send(b"after all")
        assert await node.recv() == FIN
        with closed_with(RelayCloseCode.MALFORMED):
            await backbone.recv()
        with closed_with(RelayCloseCode.PEER_GONE):
            await node.recv()


async def test_text_that_is_not_fin_ends_the_edge(gateway: Gateway) -> None:
    async with gateway.pair() as (backbone, _):
        await backbone.send("hello")
        with closed_with(RelayCloseCode.MALFORMED):
            await backbone.recv()


async def test_a_wanted_close_is_passed_on_after_what_was_sent(gateway: Gateway) -> None:
    async with gateway.pair() as (backbone, node):
        message = os.urandom(8 * 2**20)
        sending = asyncio.create_task(backbone.send(message))
        assert await node.recv() == message
        await sending
        await backbone.close()
        with closed_with(1000):
            await node.recv()


async def test_another_close_and_a_lost_connection_are_told_as_a_peer_that_is_gone(
    gateway: Gateway,
) -> None:
    async with gateway.pair() as (backbone, node):
        await backbone.close(1011)
        with closed_with(RelayCloseCode.PEER_GONE):
            await node.recv()
    async with gateway.pair() as (backbone, node):
        node.transport.abort()
        with closed_with(RelayCloseCode.PEER_GONE):
            await backbone.recv()


async def test_a_side_that_dies_inside_a_message_leaves_a_clear_end(gateway: Gateway) -> None:
    async def cut_off(connection: ClientConnection) -> AsyncIterator[bytes]:
        yield os.urandom(200_000)
        await asyncio.sleep(0.05)
        connection.transport.abort()
        yield b""

    async with gateway.pair() as (backbone, node):
        sending = asyncio.create_task(backbone.send(cut_off(backbone)))
        with closed_with(RelayCloseCode.PEER_GONE):
            await node.recv()
        await asyncio.gather(sending, return_exceptions=True)
