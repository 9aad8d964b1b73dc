"""Who is let in, how long one waits, and who has to go."""

import asyncio
import contextlib

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from linkcpp.gateway import connection as connection_module
from linkcpp.gateway.relay import RelayLimits
from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.relay import PAIRED, Hello, RelayCloseCode, encode_hello
from tests.gateway.gateways import BOTH, Gateway, Signer, closed_with, new_edge, running_gateway

BACKBONE, NODE = BOTH
OTHER_GATEWAY = "55555555-5555-4555-8555-555555555555"


async def _expect_close(gateway: Gateway, message: bytes | str, code: int) -> None:
    async with gateway.dial() as connection:
        await connection.send(message)
        with closed_with(code):
            await connection.recv()


async def test_a_ticket_that_has_ended_is_refused(gateway: Gateway) -> None:
    edge = new_edge()
    ticket = gateway.signer.ticket(edge, NODE, lifetime_seconds=-1)
    hello = encode_hello(Hello(NODE, edge, ticket))
    await _expect_close(gateway, hello, RelayCloseCode.UNAUTHORIZED)


async def test_a_ticket_of_another_hub_is_refused(gateway: Gateway) -> None:
    hello = Signer().hello(new_edge(), NODE)
    await _expect_close(gateway, hello, RelayCloseCode.UNAUTHORIZED)


async def test_a_ticket_for_another_edge_side_or_gateway_is_refused(gateway: Gateway) -> None:
    edge, signer = new_edge(), gateway.signer
    for ticket in (
        signer.ticket(new_edge(), NODE),
        signer.ticket(edge, BACKBONE),
        signer.ticket(edge, NODE, gateway=OTHER_GATEWAY),
        signer.ticket(edge, NODE, gateway=None),
        "no.ticket.atall",
    ):
        hello = encode_hello(Hello(NODE, edge, ticket))
        await _expect_close(gateway, hello, RelayCloseCode.UNAUTHORIZED)


async def test_a_pair_outlives_its_tickets(gateway: Gateway) -> None:
    edge = new_edge()
    async with gateway.dial() as backbone, gateway.dial() as node:
        for connection, role in ((backbone, BACKBONE), (node, NODE)):
            ticket = gateway.signer.ticket(edge, role, lifetime_seconds=0.5)
            await connection.send(encode_hello(Hello(role, edge, ticket)))
            if role is NODE:
                assert await backbone.recv() == PAIRED
                assert await node.recv() == PAIRED
        await asyncio.sleep(0.6)
        await backbone.send(b"still here")
        assert await node.recv() == b"still here"


@pytest.mark.parametrize(
    "message",
    [b"", b"LCR1", b"LCR2" + bytes(30), b"LCR1\x03" + bytes(30), b"\xff" * 30, bytes(5000), "text"],
    ids=["empty", "short", "other magic", "other role", "not ASCII", "too long", "text"],
)
async def test_a_first_message_that_is_no_hello_is_refused(
    gateway: Gateway, message: bytes | str
) -> None:
    await _expect_close(gateway, message, RelayCloseCode.MALFORMED)


async def test_a_hello_in_fragments_is_taken(gateway: Gateway) -> None:
    edge = new_edge()
    hello = gateway.signer.hello(edge, BACKBONE)
    async with gateway.dial() as backbone, gateway.side(edge, NODE) as node:
        await backbone.send([hello[:3], hello[3:50], hello[50:]])
        assert await backbone.recv() == PAIRED
        assert await node.recv() == PAIRED


async def test_data_before_the_pairing_is_refused(gateway: Gateway) -> None:
    async with gateway.side(new_edge(), NODE) as node:
        await node.send(b"too early")
        with closed_with(RelayCloseCode.MALFORMED):
            await node.recv()


async def test_who_says_nothing_is_dropped(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "HELLO_DEADLINE_SECONDS", 0.2)
    async with gateway.dial() as connection:
        with closed_with(RelayCloseCode.HELLO_TIMEOUT):
            await connection.recv()


async def test_who_waits_for_nobody_is_told_so(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "PAIRING_SECONDS", 0.2)
    async with gateway.side(new_edge(), NODE) as node:
        with closed_with(RelayCloseCode.NO_PEER):
            await node.recv()


@pytest.mark.slow
async def test_peers_are_pinged_and_dropped_when_they_do_not_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "PING_SECONDS", 0.2)
    monkeypatch.setattr(connection_module, "CLOSING_SECONDS", 0.2)
    async with gateway.pair() as (backbone, node):
        await asyncio.sleep(1)
        await backbone.send(b"both answered all pings")
        assert await node.recv() == b"both answered all pings"
        node.transport.pause_reading()
        with closed_with(RelayCloseCode.PEER_GONE):
            await backbone.recv()


async def _is_open(connection: ClientConnection) -> bool:
    try:
        await asyncio.wait_for(connection.recv(), 0.2)
    except TimeoutError:
        return True
    except ConnectionClosed:
        return False
    return True


async def test_a_newer_connection_takes_the_place_of_one_that_waits(gateway: Gateway) -> None:
    edge = new_edge()
    async with gateway.side(edge, NODE) as old, gateway.side(edge, NODE) as new:
        with closed_with(RelayCloseCode.REPLACED):
            await old.recv()
        async with gateway.side(edge, BACKBONE) as backbone:
            assert await backbone.recv() == PAIRED
            assert await new.recv() == PAIRED
            await backbone.send(b"to the new one")
            assert await new.recv() == b"to the new one"


async def test_a_newer_connection_ends_the_pair_and_waits_for_the_other_side(
    gateway: Gateway,
) -> None:
    edge = new_edge()
    async with gateway.pair(edge) as (backbone, node), gateway.side(edge, NODE) as new:
        with closed_with(RelayCloseCode.REPLACED):
            await node.recv()
        with closed_with(RelayCloseCode.PEER_GONE):
            await backbone.recv()
        async with gateway.side(edge, BACKBONE) as back:
            assert await back.recv() == PAIRED
            assert await new.recv() == PAIRED


async def test_the_late_death_of_a_replaced_connection_does_not_touch_the_new_pair(
    gateway: Gateway,
) -> None:
    edge = new_edge()
    async with contextlib.AsyncExitStack() as stack:
        old = await stack.enter_async_context(gateway.side(edge, NODE))
        old.transport.pause_reading()  # it does not see that it was closed
        node = await stack.enter_async_context(gateway.side(edge, NODE))
        backbone = await stack.enter_async_context(gateway.side(edge, BACKBONE))
        assert await backbone.recv() == PAIRED
        assert await node.recv() == PAIRED
        old.transport.abort()
        await asyncio.sleep(0.2)
        await backbone.send(b"untouched")
        assert await node.recv() == b"untouched"


async def test_an_edge_that_the_hub_ends_is_cut_on_both_sides(gateway: Gateway) -> None:
    assert gateway.relay is not None
    edge, other = new_edge(), new_edge()
    async with gateway.pair(edge) as (backbone, node), gateway.pair(other) as (untouched, _):
        gateway.relay.close_edges([edge, new_edge()])
        for connection in (backbone, node):
            with closed_with(RelayCloseCode.REVOKED):
                await connection.recv()
        assert gateway.relay.edge_ids == (other,)
        assert await _is_open(untouched)


async def test_a_gateway_that_stops_says_so() -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with running_gateway() as gateway:
            backbone, node = await stack.enter_async_context(gateway.pair())
            waiting = await stack.enter_async_context(gateway.side(new_edge(), NODE))
            silent = await stack.enter_async_context(gateway.dial())
        for connection in (backbone, node, waiting, silent):
            with closed_with(RelayCloseCode.STOPPING):
                await connection.recv()


async def test_connections_of_one_address_that_wait_are_bounded() -> None:
    async with running_gateway(RelayLimits(unpaired_per_caller=2)) as gateway:
        waiting = (gateway.side(new_edge(), NODE), gateway.side(new_edge(), NODE))
        async with gateway.pair(), waiting[0], waiting[1]:
            with pytest.raises(InvalidStatus) as caught:
                async with gateway.dial():
                    pass
            assert caught.value.response.status_code == 429
        async with gateway.pair():
            pass


async def test_connections_that_wait_are_bounded_in_all() -> None:
    limits = RelayLimits(unpaired=1)
    async with running_gateway(limits) as gateway, gateway.side(new_edge(), NODE):
        with pytest.raises(InvalidStatus) as caught:
            async with gateway.dial():
                pass
        assert caught.value.response.status_code == 503


@pytest.mark.parametrize(
    "limits", [RelayLimits(unpaired=8), RelayLimits(unpaired_per_caller=8)], ids=["all", "caller"]
)
async def test_who_says_nothing_makes_room_for_who_has_a_ticket(limits: RelayLimits) -> None:
    async with running_gateway(limits) as gateway, contextlib.AsyncExitStack() as stack:
        for _ in range(12):
            silent = await stack.enter_async_context(gateway.dial())
        async with gateway.pair() as (backbone, node):
            await backbone.send(b"through")
            assert await node.recv() == b"through"
        assert await _is_open(silent)


async def test_edges_are_bounded() -> None:
    async with running_gateway(RelayLimits(edges=1)) as gateway, gateway.pair():
        hello = gateway.signer.hello(new_edge(), EdgeRole.NODE)
        await _expect_close(gateway, hello, RelayCloseCode.FULL)
