"""The client of a hub against hosts that lie, stall, redirect or answer without end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import BaseModel

from linkcpp.cluster.records import NodeId
from linkcpp.registry.client import HubClient
from linkcpp.registry.connection import HubError, HubRefusedError, HubUnreachableError
from linkcpp.registry.edges import EdgeOffer, EdgeRequest, EdgeRole, GatewayList, GatewayRecord
from linkcpp.registry.records import Heartbeat, HeartbeatAnswer

HUB, NODE, OTHER = (NodeId(f"00000000-0000-4000-8000-00000000000{n}") for n in "abc")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def host(serve: Serve) -> AsyncIterator[str]:
    """Run a host that answers every connection as ``serve`` does."""

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def answering(answer: bytes) -> Serve:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return serve


async def dripping(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 2**20)
        await writer.drain()


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize(
    "serve",
    [
        answering(b""),
        answering(
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
        ),
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
        answering(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\nnope"),
        answering(b"\x15\x03\x01"),
        dripping,
        endless,
        silent,
    ],
)
async def test_a_host_that_is_no_hub_is_told_in_words_and_in_time(serve: Serve) -> None:
    async with host(serve) as url, HubClient(url, timeout_seconds=0.5) as client:
        with pytest.raises(HubUnreachableError) as told:
            await client.health()
    assert url in str(told.value)
    assert told.value.hint


async def test_where_another_service_answers_the_address_is_doubted_first() -> None:
    answer = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    async with host(answer) as url, HubClient(url) as client:
        with pytest.raises(HubUnreachableError) as told:
            await client.health()
    assert (told.value.hint or "").startswith("Check the address and the port first")


async def test_a_refusal_is_told_in_the_hubs_words_without_control_characters() -> None:
    body = b'{"code": "revoked", "message": "This machine\\u001b[31m was revoked.", "hint": null}'
    answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    async with host(answering(answer)) as url, HubClient(url) as client:
        with pytest.raises(HubRefusedError) as refused:
            await client.health()
    assert refused.value.is_final
    assert "\x1b" not in str(refused.value)


async def test_a_call_that_needs_a_token_is_not_made_without_one() -> None:
    async with HubClient("http://127.0.0.1:9") as client:
        with pytest.raises(HubError, match="needs a token"):
            await client.nodes()


class Hub(HubClient):
    """Tells what a hub at another address would."""

    answers: tuple[BaseModel, ...] = ()

    async def call(self, answer: type[Any], *_: Any, **__: Any) -> Any:
        return next(one for one in self.answers if isinstance(one, answer))


@pytest.mark.parametrize(
    ("hub_url", "gateway_url", "is_dialled"),
    [
        ("https://hub.example", "wss://gw.example/v1/relay", True),
        ("https://hub.example", "ws://gw.example/v1/relay", False),
        ("https://hub.example", "ws://10.0.0.2/v1/relay", False),
        ("http://10.0.0.1:8720", "ws://10.0.0.2/v1/relay", True),
    ],
)
async def test_a_hub_behind_tls_cannot_send_machines_to_gateways_without_it(
    hub_url: str, gateway_url: str, is_dialled: bool
) -> None:
    offer = offered(gateway_url)
    gateway = GatewayRecord(
        gateway_id=OTHER, name="gw", url=gateway_url, edge_count=0, is_online=True, last_seen=1.0
    )
    expected = gateway_url if is_dialled else None
    async with Hub(hub_url, allow_plain=True) as client:
        client.answers = (
            offer,
            HeartbeatAnswer(interval_seconds=10, offers=(offer,)),
            GatewayList(gateways=(gateway,)),
        )
        made = await client.create_edge(EdgeRequest(node_id=NODE))
        assert made.relay_url == expected
        beat = await client.heartbeat(Heartbeat(sequence=0))
        assert beat.offers[0].relay_url == expected
        assert (await client.gateways()).gateways[0].url == expected


async def test_a_direct_address_without_tls_is_dialled_only_where_nobody_is_asked_for_a_name() -> (
    None
):
    good = ("wss://attic.example/v1/edge", "ws://10.0.0.5:8716/v1/edge", "ws://[fd00::5]:8716/")
    offer = offered(None).model_copy(update={"direct_urls": (*good, "ws://router.example/")})
    async with Hub("https://hub.example") as client:
        client.answers = (offer,)
        assert (await client.create_edge(EdgeRequest(node_id=NODE))).direct_urls == good


def offered(relay_url: str | None) -> EdgeOffer:
    return EdgeOffer(
        edge_id="0" * 32,
        role=EdgeRole.BACKBONE,
        gateway_id=OTHER,
        relay_url=relay_url,
        ticket="t",
        peer_node_id=NODE,
        peer_name="attic",
        peer_public_key="A" * 43,
        hub_id=HUB,
        expires_at=1.0,
    )
