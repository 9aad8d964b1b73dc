"""Two sides meet and exchange messages, with the ``websockets`` library as client."""

import asyncio
import hashlib
import os

from websockets.asyncio.client import ClientConnection

from tests.gateway.gateways import Gateway

LENGTHS = (0, 1, 2, 124, 125, 126, 127, 128, 65_534, 65_535, 65_536, 65_537, 2**20, 2**20 + 1)
LARGE = 64 * 2**20


async def _passes(sender: ClientConnection, receiver: ClientConnection, message: bytes) -> None:
    _, received = await asyncio.gather(sender.send(message), receiver.recv())
    assert isinstance(received, bytes)
    assert len(received) == len(message)
    assert hashlib.sha256(received).digest() == hashlib.sha256(message).digest()


async def test_messages_of_every_length_pass_unchanged_in_both_directions(
    gateway: Gateway,
) -> None:
    async with gateway.pair() as (backbone, node):
        for length in LENGTHS:
            message = os.urandom(length)
            await _passes(backbone, node, message)
            await _passes(node, backbone, message)


async def test_a_message_of_64_mib_passes_in_both_directions_at_once(gateway: Gateway) -> None:
    async with gateway.pair() as (backbone, node):
        there, back = os.urandom(LARGE), os.urandom(LARGE)
        await asyncio.gather(_passes(backbone, node, there), _passes(node, backbone, back))
