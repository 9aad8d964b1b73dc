"""What a relay can do to the messages that it carries, and what it learns."""

import asyncio
import hmac
import os
import struct
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from linkcpp.link.channel import SecureChannel
from linkcpp.link.core import NO_EPOCH, Resume
from linkcpp.link.handshake import Agreed, Introduction, cluster_psk, initiate, respond
from linkcpp.link.noise import KEY_BYTES
from linkcpp.link.records import RecordType
from linkcpp.link.transport import TransportLostError
from linkcpp.registry.relay import RelayCloseCode
from tests.link.edges import BACKBONE, NODE, TARGET
from tests.link.programs import echo_server, exchange, until
from tests.link.transports import (
    EPOCHS,
    INTRODUCTIONS,
    TOKEN,
    Meddler,
    MemoryTransport,
    known_peers,
    link_pair,
    members,
    transports,
)

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
    "cut to a tag": lambda: lambda message: [message[-16:]],
    "cut to nothing": lambda: lambda message: [b""],
    "grown": lambda: lambda message: [message + b"\0"],
    "far too long": lambda: lambda _: [bytes(1 << 20)],
    "made up": lambda: lambda message: [os.urandom(len(message))],
}


@pytest.mark.parametrize("introduced", INTRODUCTIONS)
@pytest.mark.parametrize("what", MEDDLERS)
async def test_a_record_that_was_meddled_with_ends_the_link_and_reaches_no_stream(
    what: str, introduced: str
) -> None:
    introductions = INTRODUCTIONS[introduced]()
    async with echo_server() as echo, link_pair(echo.port, introductions) as pair:
        _, writer = pair.open()
        await until(lambda: echo.connection_count == 1)
        pair.transports[0].meddler = MEDDLERS[what]()
        pings = [asyncio.create_task(pair.channels[0].ping()) for _ in range(3)]
        await asyncio.sleep(0)  # the first message is a ping: one may arrive as it was sent
        writer.write(b"never to arrive")
        outcomes = await asyncio.gather(*pings, return_exceptions=True)
        assert any(isinstance(outcome, TransportLostError) for outcome in outcomes)
        reason = await pair.channels[1].ended
        assert pair.channels[1].end_code == RelayCloseCode.RECORD_INVALID
        assert "message" in reason
        assert pair.transports[1].closed is not None
        assert pair.transports[1].closed[0] == RelayCloseCode.RECORD_INVALID
        assert echo.received_bytes == 0
        writer.transport.abort()


async def test_records_of_an_older_link_open_on_no_other() -> None:
    async with echo_server() as echo, link_pair(echo.port) as first:
        await first.channels[0].ping()
        old = first.transports[0].sent[1:]
        second = type(first)(echo.port, first.introductions)
        await second.connect()
        second.transports[0].meddler = lambda _: old
        with pytest.raises(TransportLostError):
            await second.channels[0].ping()
        assert second.channels[1].end_code == RelayCloseCode.RECORD_INVALID
        await second.aclose()


@pytest.mark.parametrize("introduced", INTRODUCTIONS)
async def test_a_relay_sees_nothing_of_what_it_carries(introduced: str) -> None:
    secret = b"the prompt of somebody, in plain words " * 40
    introductions = INTRODUCTIONS[introduced]()
    async with echo_server() as echo, link_pair(echo.port, introductions) as pair:
        assert await exchange(pair.open(), secret) == secret
        sent = [message for transport in pair.transports for message in transport.sent]
        assert sum(map(len, sent)) > 2 * len(secret)
        hidden = (secret[:39], TARGET.encode(), BACKBONE.name.encode(), NODE.name.encode())
        assert not any(each in message for each in hidden for message in sent)


async def test_a_first_message_that_was_recorded_moves_no_session() -> None:
    async with echo_server() as echo, link_pair(echo.port) as pair:
        await pair.channels[0].ping()
        recorded = pair.transports[0].sent[0]
        attacker, node = transports()
        attacker.send(recorded)
        agreed = await respond(node, pair.introductions[1], lambda _: pair.node.core.resume)
        channel = SecureChannel(node, agreed, path="forged", on_attach=pair.attach)
        await attacker.receive()
        for message in pair.transports[0].sent[1:]:
            attacker.send(message)
        await channel.ended
        assert channel.end_code == RelayCloseCode.RECORD_INVALID
        assert pair.node.channel is pair.channels[1]
        await pair.channels[0].ping()


@pytest.mark.parametrize("place", [0, 40, -1])
@pytest.mark.parametrize("introduced", INTRODUCTIONS)
async def test_an_altered_handshake_is_refused_with_its_close_code(
    introduced: str, place: int
) -> None:
    (near, far), (backbone, node) = transports(), INTRODUCTIONS[introduced]()
    near.meddler = flip_bit(place)
    results = await shake_hands(near, far, backbone, node)
    assert all(isinstance(result, TransportLostError) for result in results)
    assert far.closed is not None
    assert far.closed[0] == RelayCloseCode.HANDSHAKE_FAILED


async def shake_hands(
    near: MemoryTransport, far: MemoryTransport, first: Introduction, second: Introduction
) -> tuple[Agreed | BaseException, Agreed | BaseException]:
    return await asyncio.gather(
        initiate(near, first, FIRST),
        respond(far, second, lambda _: SECOND),
        return_exceptions=True,
    )


@pytest.mark.parametrize("message", [1, 2])
async def test_an_answer_that_was_altered_is_refused_by_whoever_reads_it(message: int) -> None:
    """The second message is the node's, the third proves who the coordinator is."""
    (near, far), (backbone, node) = transports(), members()
    (far if message == 1 else near).meddler = AlterNumber(message // 2)
    results = await shake_hands(near, far, backbone, node)
    reader = far if message == 2 else near
    assert isinstance(results[1], TransportLostError)
    assert reader.closed is not None
    assert reader.closed[0] == RelayCloseCode.HANDSHAKE_FAILED


class AlterNumber:
    """Alters the last byte of one message."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, message: bytes) -> list[bytes]:
        self._left -= 1
        return flip_bit(-1)(message) if self._left == -1 else [message]


async def test_a_machine_with_another_key_is_refused() -> None:
    (near, far), (backbone, _), (_, stranger) = transports(), known_peers(), known_peers()
    results = await shake_hands(near, far, backbone, stranger)
    assert all(isinstance(result, TransportLostError) for result in results)


async def test_a_machine_with_another_token_is_refused_before_it_is_answered() -> None:
    (near, far), (backbone, node) = transports(), members("one token", "another one")
    results = await shake_hands(near, far, backbone, node)
    assert all(isinstance(result, TransportLostError) for result in results)
    assert far.sent == []
    assert far.closed is not None
    assert far.closed[0] == RelayCloseCode.HANDSHAKE_FAILED


async def test_machines_of_a_cluster_learn_who_the_other_is_and_by_which_key() -> None:
    (near, far), (backbone, node) = transports(), members()
    first, second = await shake_hands(near, far, backbone, node)
    assert isinstance(first, Agreed)
    assert isinstance(second, Agreed)
    assert (first.machine, second.machine) == (NODE, BACKBONE)
    assert raw(first.peer_key) == raw(node.own_key.public_key())
    assert raw(second.peer_key) == raw(backbone.own_key.public_key())
    assert (first.own, first.peer) == (second.peer, second.own) == (FIRST, SECOND)
    assert first.keys.handshake_hash == second.keys.handshake_hash


def raw(key: X25519PublicKey) -> bytes:
    return key.public_bytes_raw()


def mixed(change: str) -> tuple[Introduction, Introduction]:
    """What both know, but for one thing."""
    (backbone, node), (member, _) = known_peers(), members()
    both: dict[str, tuple[Introduction, Introduction]] = {
        "the link": (backbone._replace(link_id="cd" * 16), node),
        "who dials": (backbone._replace(own=NODE), node),
        "who was dialled": (backbone, node._replace(own=BACKBONE)),
        "a link of the cluster": (member._replace(link_id="cd" * 16), members()[1]),
        "who introduced them": (member, node),
    }
    return both[change]


@pytest.mark.parametrize(
    "change",
    ["the link", "who dials", "who was dialled", "a link of the cluster", "who introduced them"],
)
async def test_both_must_agree_on_the_link_and_on_who_they_are(change: str) -> None:
    results = await shake_hands(*transports(), *mixed(change))
    assert all(isinstance(result, TransportLostError) for result in results)


def test_what_the_token_proves_does_not_tell_the_token() -> None:
    assert cluster_psk(TOKEN) == cluster_psk(TOKEN)
    assert cluster_psk(TOKEN) != cluster_psk(TOKEN + "x")
    assert len(cluster_psk(TOKEN)) == KEY_BYTES
    # RFC 5869 by hand: extract with a salt of zeros, expand for one block.
    extracted = hmac.digest(bytes(32), TOKEN.encode(), "sha256")
    assert cluster_psk(TOKEN) == hmac.digest(extracted, b"linkcpp cluster token\x01", "sha256")


async def test_a_goodbye_is_told_at_the_end_that_was_dialled() -> None:
    async with echo_server() as echo, link_pair(echo.port) as pair:
        await pair.channels[0].ping()
        leaving = asyncio.create_task(pair.channels[0].say_goodbye())
        await until(lambda: pair.goodbye_count)
        await pair.channels[1].close()
        await leaving
        assert pair.goodbye_count == 1


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\x00",
        bytes([RecordType.PING]) + bytes(9),
        bytes([RecordType.ATTACH]) + bytes(7),
        struct.pack("<BQ", RecordType.ATTACH, 0),
        bytes([RecordType.BYE]),
        b"\xff" * 40,
    ],
)
async def test_a_sealed_record_that_means_nothing_ends_the_link(record: bytes) -> None:
    async with echo_server() as echo, link_pair(echo.port) as pair:
        sealed = pair.channels[1].agreed.keys.sending.encrypt(record)
        pair.transports[1].send(sealed)
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

    is_full = True

    def __init__(self, transport: object) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> object:
        return getattr(self._transport, name)
