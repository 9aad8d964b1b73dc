"""What a relay can do to the messages that it carries, and what it learns."""

import asyncio
import os
import struct
from collections.abc import Callable

import pytest

from linkcpp.link.channel import SecureChannel
from linkcpp.link.core import NO_EPOCH, Resume
from linkcpp.link.handshake import initiate, respond
from linkcpp.link.records import RecordType
from linkcpp.link.transport import TransportLostError
from linkcpp.registry.relay import RelayCloseCode
from tests.link.programs import echo_server, pump, until
from tests.link.transports import EPOCHS, Meddler, edge_keys, link_pair, transports

FIRST = Resume(EPOCHS[0], NO_EPOCH, 0)
SECOND = Resume(EPOCHS[1], EPOCHS[0], 0)


def flip_bit(place: int) -> Callable[[bytes], list[bytes]]:
    def meddle(message: bytes) -> list[bytes]:
        altered = bytearray(message)
        altered[place] ^= 1
        return [bytes(altered)]

    return meddle


class Swap:
    """Passes two messages on in the wrong order."""

    def __init__(self) -> None:
        self.held: list[bytes] = []

    def __call__(self, message: bytes) -> list[bytes]:
        self.held.append(message)
        return self.held[::-1] if len(self.held) == 2 else []


class DropFirst:
    """Leaves one message out."""

    def __init__(self) -> None:
        self.has_dropped = False

    def __call__(self, message: bytes) -> list[bytes]:
        if self.has_dropped:
            return [message]
        self.has_dropped = True
        return []


MEDDLERS: dict[str, Callable[[], Meddler]] = {
    "altered at its beginning": lambda: flip_bit(0),
    "altered in its tag": lambda: flip_bit(-1),
    "repeated": lambda: lambda message: [message, message],
    "reordered": Swap,
    "left out": DropFirst,
    "truncated": lambda: lambda message: [message[:-1]],
    "cut to nothing": lambda: lambda message: [b""],
    "grown": lambda: lambda message: [message + b"\0"],
    "far too long": lambda: lambda _: [bytes(1 << 20)],
    "made up": lambda: lambda message: [os.urandom(len(message))],
}


@pytest.mark.parametrize("what", MEDDLERS)
async def test_a_record_that_was_meddled_with_ends_the_link_and_reaches_no_stream(
    what: str,
) -> None:
    async with echo_server() as echo, link_pair(echo.port) as pair:
        _, writer = await asyncio.open_connection("127.0.0.1", pair.port)
        await until(lambda: echo.connection_count == 1)
        pair.transports[0].meddler = MEDDLERS[what]()
        pings = [pair.channels[0].ping() for _ in range(3)]
        writer.write(b"never to arrive")
        outcomes = await asyncio.gather(*pings, return_exceptions=True)
        assert any(isinstance(outcome, TransportLostError) for outcome in outcomes)
        reason = await pair.channels[1].ended
        assert pair.channels[1].end_code == RelayCloseCode.RECORD_INVALID
        assert "message" in reason
        assert pair.transports[1].closed is not None
        assert pair.transports[1].closed[0] == RelayCloseCode.RECORD_INVALID
        assert echo.received_bytes == 0
        writer.close()


async def test_records_of_an_older_link_open_on_no_other() -> None:
    async with echo_server() as echo, link_pair(echo.port) as first:
        await first.channels[0].ping()
        old = first.transports[0].sent[1:]
        second = type(first)(echo.port)
        second.keys = first.keys
        await second.connect()
        second.transports[0].meddler = lambda _: old
        with pytest.raises(TransportLostError):
            await second.channels[0].ping()
        assert second.channels[1].end_code == RelayCloseCode.RECORD_INVALID
        await second.aclose()


async def test_a_relay_sees_nothing_of_what_it_carries() -> None:
    secret = b"the prompt of somebody, in plain words " * 40
    async with echo_server() as echo, link_pair(echo.port) as pair:
        assert await pump(pair.port, secret) == secret
        sent = [message for transport in pair.transports for message in transport.sent]
        assert sum(map(len, sent)) > 2 * len(secret)
        assert not any(secret[:39] in message for message in sent)


async def test_a_first_message_that_was_recorded_moves_no_session() -> None:
    async with echo_server() as echo, link_pair(echo.port) as pair:
        recorded = pair.transports[0].sent[0]
        attacker, node = transports()
        await attacker.send(recorded)
        agreed = await respond(node, pair.keys[1], lambda _: pair.node.core.resume)
        channel = SecureChannel(node, agreed, path="forged", on_attach=pair._attach)
        await attacker.receive()
        for message in pair.transports[0].sent[1:]:
            await attacker.send(message)
        await channel.ended
        assert channel.end_code == RelayCloseCode.RECORD_INVALID
        assert pair.node.channel is pair.channels[1]
        await pair.channels[0].ping()


@pytest.mark.parametrize("place", [0, 40, -1])
async def test_an_altered_handshake_is_refused_with_its_close_code(place: int) -> None:
    (near, far), (backbone, node) = transports(), edge_keys()
    near.meddler = flip_bit(place)
    results = await asyncio.gather(
        initiate(near, backbone, FIRST),
        respond(far, node, lambda _: SECOND),
        return_exceptions=True,
    )
    assert all(isinstance(result, TransportLostError) for result in results)
    assert far.closed is not None
    assert far.closed[0] == RelayCloseCode.HANDSHAKE_FAILED


async def test_a_machine_with_another_key_is_refused() -> None:
    (near, far), (backbone, _), (_, stranger) = transports(), edge_keys(), edge_keys()
    results = await asyncio.gather(
        initiate(near, backbone, FIRST),
        respond(far, stranger, lambda _: SECOND),
        return_exceptions=True,
    )
    assert all(isinstance(result, TransportLostError) for result in results)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\x00",
        bytes([RecordType.PING]) + bytes(9),
        bytes([RecordType.ATTACH]) + bytes(7),
        struct.pack("<BQ", RecordType.ATTACH, 0),
        b"\xff" * 40,
    ],
)
async def test_a_sealed_record_that_means_nothing_ends_the_link(record: bytes) -> None:
    async with echo_server() as echo, link_pair(echo.port) as pair:
        sealed = pair.channels[1].agreed.keys.sending.encrypt(record)
        await pair.transports[1].send(sealed)
        await pair.channels[0].ended
        assert pair.channels[0].end_code == RelayCloseCode.RECORD_INVALID


async def test_a_flood_of_pings_is_bounded() -> None:
    async with echo_server() as echo, link_pair(echo.port) as pair:
        await pair.channels[0].ping()
        ciphers = pair.channels[1].agreed.keys.sending
        for number in range(1000):
            ping = struct.pack("<BQ", RecordType.PING, number)
            pair.transports[1]._outbox.put_nowait(ciphers.encrypt(ping))
        pair.channels[0]._transport = StalledTransport(pair.channels[0]._transport)  # type: ignore[assignment]
        await pair.channels[0].ended
        assert len(pair.channels[0]._control) < 100


class StalledTransport:
    """Takes messages in, and never gets one out."""

    def __init__(self, transport: object) -> None:
        self._transport = transport

    async def send(self, message: bytes) -> None:
        await asyncio.Event().wait()

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)


def test_the_token_is_one_for_an_edge_and_both_ends_derive_it() -> None:
    backbone, node = edge_keys()
    assert backbone.agent_token() == node.agent_token()
    assert len(backbone.agent_token()) == 43
    assert backbone._replace(edge_id="cd" * 16).agent_token() != backbone.agent_token()
    assert edge_keys()[0].agent_token() != backbone.agent_token()
