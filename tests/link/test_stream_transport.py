"""Streams of a link as transports of asyncio's, and HTTP over them with uvicorn and httpx."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from linkcpp.common.http_server import make_server
from linkcpp.link.acceptor import LinkAcceptor, LinkUser
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.handlers import StreamHandler, StreamPort
from linkcpp.link.handshake import cluster_psk
from linkcpp.link.http import link_transport
from linkcpp.link.records import LinkLimits
from linkcpp.link.stream_transport import StreamTransport
from linkcpp.link.supply import ClusterSupply
from linkcpp.link.tcp_handler import Streams
from tests.link.agent import direct_route
from tests.link.edges import BACKBONE, NODE, QUICK, TARGET
from tests.link.programs import exchange, until
from tests.link.transports import TOKEN

MakeProtocol = Callable[[LinkUser], asyncio.Protocol]
WINDOW_BYTES = LinkLimits().window_bytes


@asynccontextmanager
async def link_to(make_protocol: MakeProtocol) -> AsyncIterator[LinkEndpoint]:
    """Link to a node whose streams lead to a protocol of asyncio's."""

    def serve(user: LinkUser, _: str, port: StreamPort) -> StreamHandler:
        extra = {"peername": (user.machine.node_id, 0)}
        return StreamTransport(port, lambda: make_protocol(user), extra)

    psk = cluster_psk(TOKEN)
    acceptor = LinkAcceptor(
        own_key=X25519PrivateKey.generate(), own=NODE, serve=serve, psk=psk, times=QUICK
    )
    try:
        async with direct_route(acceptor) as port:
            supply = ClusterSupply(
                (f"http://127.0.0.1:{port}",),
                own_key=X25519PrivateKey.generate(),
                own=BACKBONE,
                psk=psk,
            )
            async with await LinkEndpoint(supply, times=QUICK).open() as link:
                yield link
    finally:
        await acceptor.aclose()


class Ends(NamedTuple):
    """Both ends of one stream."""

    link: LinkEndpoint
    near: Streams
    far: Streams


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    accepted: asyncio.Queue[Streams] = asyncio.Queue()

    def make_protocol(_: LinkUser) -> asyncio.Protocol:
        reader = asyncio.StreamReader()
        return asyncio.StreamReaderProtocol(
            reader, lambda reader, writer: accepted.put_nowait((reader, writer))
        )

    async with link_to(make_protocol) as link:
        near = link.connect(TARGET)
        yield Ends(link, near, await accepted.get())
        near[1].transport.abort()


async def fill(writer: asyncio.StreamWriter) -> int:
    """Write until the writer has to wait; return how much it took."""
    size = 0
    try:
        while True:
            writer.write(bytes(1 << 16))
            size += 1 << 16
            async with asyncio.timeout(1.0):
                await writer.drain()
    except TimeoutError:
        return size


@pytest.mark.parametrize("side", ["near", "far"])
async def test_a_reader_that_does_not_read_stops_the_writer_at_its_window(
    ends: Ends, side: str
) -> None:
    (_, writer), (reader, _) = (ends.near, ends.far) if side == "near" else (ends.far, ends.near)
    size = await fill(writer)
    # The window, what waits to be sent, and what the reader has in its hands.
    assert WINDOW_BYTES < size < 2 * WINDOW_BYTES
    assert await reader.readexactly(size) == bytes(size)
    # And others of the same link go on meanwhile.
    await writer.drain()
    writer.write(b"on it goes")
    assert await reader.readexactly(10) == b"on it goes"


@pytest.mark.parametrize("side", ["near", "far"])
async def test_each_direction_ends_by_itself(ends: Ends, side: str) -> None:
    one, other = (ends.near, ends.far) if side == "near" else (ends.far, ends.near)
    one[1].write(b"question")
    one[1].write_eof()
    assert await other[0].read(-1) == b"question"
    other[1].write(b"answer")
    other[1].write_eof()
    assert await one[0].read(-1) == b"answer"


async def test_what_was_written_before_the_close_arrives(ends: Ends) -> None:
    data = os.urandom(WINDOW_BYTES + 1000)
    ends.near[1].write(data)
    ends.near[1].close()
    await ends.near[1].wait_closed()
    assert await ends.far[0].read(-1) == data
    ends.far[1].close()
    await until(lambda: ends.link.status().stream_count == 0)


@pytest.mark.parametrize("side", ["near", "far"])
async def test_an_abort_is_a_reset_at_the_other_end(ends: Ends, side: str) -> None:
    one, other = (ends.near, ends.far) if side == "near" else (ends.far, ends.near)
    one[1].transport.abort()
    with pytest.raises(ConnectionResetError):
        await other[0].read(1)
    with pytest.raises(ConnectionResetError):
        await one[0].read(1)
    await until(lambda: ends.link.status().stream_count == 0)


async def test_the_end_of_a_link_resets_its_streams_on_both_sides(ends: Ends) -> None:
    await ends.link.aclose()
    with pytest.raises(ConnectionResetError, match="the link was closed"):
        await ends.near[0].read(1)
    with pytest.raises(ConnectionResetError):
        await ends.far[0].read(1)
    with pytest.raises(ConnectionError):
        ends.link.connect(TARGET)


async def test_both_ends_of_a_stream_know_which_machine_the_other_is(ends: Ends) -> None:
    assert ends.near[1].get_extra_info("peername") == (NODE.node_id, 0)
    assert ends.far[1].get_extra_info("peername") == (BACKBONE.node_id, 0)


async def test_many_streams_carry_bytes_at_the_same_time() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    def make_protocol(_: LinkUser) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), echo)

    async with link_to(make_protocol) as link:
        messages = [os.urandom(size) for size in (0, 1, 70_000, 400_000) * 4]
        answers = await asyncio.gather(
            *(exchange(link.connect(TARGET), message) for message in messages)
        )
        assert answers == messages
        await until(lambda: link.status().stream_count == 0)


@asynccontextmanager
async def http_over_link() -> AsyncIterator[httpx.AsyncClient]:
    """Run a service of uvicorn's behind a link, and httpx before it."""

    async def count(request: Request) -> Response:
        size = 0
        async for part in request.stream():
            size += len(part)
        return Response(str(size))

    async def who(request: Request) -> Response:
        assert request.client is not None
        return Response(f"{request.state.machine} {request.client.host}")

    async def much(_: Request) -> Response:
        return Response(bytes(3 * WINDOW_BYTES))

    server = make_server(
        Starlette(
            routes=[
                Route("/count", count, methods=["POST"]),
                Route("/who", who),
                Route("/much", much),
            ]
        )
    )
    server.config.load()
    async with (
        link_to(lambda user: server.new_protocol({"machine": user.machine.name})) as link,
        httpx.AsyncClient(transport=link_transport(link, TARGET), trust_env=False) as client,
    ):
        yield client


async def test_requests_over_a_link_are_answered_and_name_their_machine() -> None:
    async with http_over_link() as client:
        answer = await client.get("http://node/who")
        assert answer.text == f"{BACKBONE.name} {BACKBONE.node_id}"
        assert (await client.post("http://node/count", content=bytes(100_000))).text == "100000"
        assert (await client.get("http://node/much")).content == bytes(3 * WINDOW_BYTES)
        assert (await client.get("http://node/nothing")).status_code == 404


async def test_many_requests_over_a_link_at_the_same_time() -> None:
    async with http_over_link() as client:
        answers = await asyncio.gather(
            *(client.post("http://node/count", content=bytes(size)) for size in range(30))
        )
        assert [int(answer.text) for answer in answers] == list(range(30))
