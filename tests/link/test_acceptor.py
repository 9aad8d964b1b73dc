"""The node's end: who gets in directly, what one who got in may cost, and lost sessions."""

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from linkcpp.common.errors import LinkcppError
from linkcpp.link.acceptor import MAX_LINKS, MAX_STRANGERS, HandedEdge
from linkcpp.link.core import NO_EPOCH, Resume
from linkcpp.link.handshake import Agreed, KnownPeer, initiate, parse_link_key
from linkcpp.link.offers import LinkEndedError
from linkcpp.link.records import CHUNK_BYTES, FrameType, LinkLimits, RecordType
from linkcpp.link.status import ConnectionState
from linkcpp.link.transport import TransportLostError, WebSocketTransport
from linkcpp.registry.edges import EdgeOffer, EdgeRole
from linkcpp.registry.keys import make_keys
from linkcpp.registry.relay import DIRECT_PATH, PAIRED, Hello, RelayCloseCode, encode_hello
from linkcpp.registry.tickets import EdgeClaims, sign_edge_ticket
from tests.gateway.gateways import HUB_ID, Signer
from tests.link.agent import direct_route
from tests.link.edges import (
    BACKBONE,
    BACKBONE_ID,
    NODE,
    NODE_ID,
    QUICK,
    TARGET,
    GatewayAt,
    HubOfTest,
    Node,
    accepting,
    dialling,
    edge,
    gateways,
    running_node,
)
from tests.link.programs import echo_server, exchange, pump, until


class Direct(NamedTuple):
    """A node that may be dialled directly, and its hub."""

    hub: HubOfTest
    node: Node
    port: int

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}{DIRECT_PATH}"

    def hello(
        self, *, signer: Signer | None = None, role: EdgeRole = EdgeRole.BACKBONE, **claims: object
    ) -> bytes:
        """Write a hello with a ticket of which some claims are others."""
        said = {
            "iss": HUB_ID,
            "sub": BACKBONE_ID,
            "edge": self.hub.edge_id,
            "role": role,
            "gateway": None,
            "exp": time.time() + 60,
            **claims,
        }
        key = (signer or self.hub.signer).private
        ticket = sign_edge_ticket(key, EdgeClaims.model_validate(said))
        return encode_hello(Hello(EdgeRole.BACKBONE, self.hub.edge_id, ticket))

    def dial(self) -> connect:
        return connect(self.url, proxy=None, compression=None, ping_interval=None)


@pytest.fixture
async def direct() -> AsyncIterator[Direct]:
    hub = HubOfTest()
    limits = LinkLimits(unacknowledged_bytes=2**17, control_frames=100)
    async with (
        running_node(hub, gateway_count=0, limits=limits) as node,
        direct_route(node.acceptor) as port,
    ):
        hub.direct_urls = (f"ws://127.0.0.1:{port}",)
        yield Direct(hub, node, port)


async def close_code(connection: ClientConnection) -> int | None:
    with pytest.raises(ConnectionClosed) as error:
        while True:
            await connection.recv()
    return error.value.rcvd.code if error.value.rcvd else None


HELLOS: dict[str, tuple[Callable[[Direct], bytes], RelayCloseCode]] = {
    "nothing": (lambda _: b"", RelayCloseCode.MALFORMED),
    "no hello": (lambda _: b"GET / HTTP/1.1\r\n\r\n       ", RelayCloseCode.MALFORMED),
    "far too long": (lambda _: b"LCR1" + bytes(60_000), RelayCloseCode.MALFORMED),
    "no ticket": (lambda direct: direct.hello()[:22], RelayCloseCode.UNAUTHORIZED),
    "another hub's": (lambda direct: direct.hello(signer=Signer()), RelayCloseCode.UNAUTHORIZED),
    "another edge's": (lambda direct: direct.hello(edge="0" * 32), RelayCloseCode.UNAUTHORIZED),
    "the other side's": (
        lambda direct: direct.hello(role=EdgeRole.NODE),
        RelayCloseCode.UNAUTHORIZED,
    ),
    "an old one": (lambda direct: direct.hello(exp=time.time() - 1), RelayCloseCode.UNAUTHORIZED),
}


@pytest.mark.parametrize("what", HELLOS)
async def test_a_direct_path_needs_a_ticket_of_the_hub(direct: Direct, what: str) -> None:
    hello, code = HELLOS[what]
    async with direct.dial() as connection:
        await connection.send(hello(direct))
        assert await close_code(connection) == code


async def test_a_coordinator_that_is_faster_than_the_hub_waits_for_its_offer(
    direct: Direct,
) -> None:
    async with direct.dial() as connection:
        await connection.send(direct.hello())
        await direct.node.acceptor.offer(direct.hub.make(EdgeRole.NODE, None))
        assert await connection.recv() == PAIRED


async def test_an_edge_that_the_hub_never_told_of_is_refused(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linkcpp.link.acceptor._OFFER_SECONDS", 0.1)
    async with direct.dial() as connection:
        await connection.send(direct.hello())
        assert await close_code(connection) == RelayCloseCode.NO_PEER


@pytest.mark.slow
async def test_strangers_who_say_nothing_make_room_for_who_has_a_ticket(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linkcpp.link.acceptor.HELLO_DEADLINE_SECONDS", 4.0)
    strangers = [await direct.dial() for _ in range(MAX_STRANGERS + 8)]
    async with edge(direct.hub) as end:
        assert await pump(end.port, b"still there") == b"still there"
    codes = [await close_code(stranger) for stranger in strangers]
    assert set(codes[:8]) == {RelayCloseCode.FULL}
    assert codes[-1] == RelayCloseCode.HELLO_TIMEOUT


async def test_a_ticket_without_the_coordinators_key_is_of_no_use(direct: Direct) -> None:
    await direct.node.acceptor.offer(direct.hub.make(EdgeRole.NODE, None))
    transport = await WebSocketTransport.dial(direct.url, timeout_seconds=60)
    transport.send(direct.hello())
    assert await transport.receive() == PAIRED
    stranger = KnownPeer(
        make_keys().edge,
        parse_link_key(direct.hub.node_keys.edge_public),
        direct.hub.edge_id,
        BACKBONE,
        NODE,
    )
    with pytest.raises(TransportLostError) as error:
        await initiate(transport, stranger, Resume(b"x" * 16, NO_EPOCH, 0))
    assert error.value.code == RelayCloseCode.HANDSHAKE_FAILED
    assert direct.node.acceptor.status()[0].path is None


class Hostile:
    """A coordinator with all keys that makes its own records."""

    def __init__(self, transport: WebSocketTransport, agreed: Agreed) -> None:
        self.transport = transport
        self._keys = agreed.keys
        self._number = 0

    @classmethod
    async def attach(cls, direct: Direct) -> "Hostile":
        await direct.node.acceptor.offer(direct.hub.make(EdgeRole.NODE, None))
        transport = await WebSocketTransport.dial(direct.url, timeout_seconds=60)
        transport.send(direct.hello())
        assert await transport.receive() == PAIRED
        keys = KnownPeer(
            direct.hub.backbone_keys.edge,
            parse_link_key(direct.hub.node_keys.edge_public),
            direct.hub.edge_id,
            BACKBONE,
            NODE,
        )
        hostile = cls(transport, await initiate(transport, keys, Resume(b"x" * 16, NO_EPOCH, 0)))
        await hostile.send(struct.pack("<BQ", RecordType.ATTACH, 0))
        return hostile

    async def send(self, record: bytes) -> None:
        self.transport.send(self._keys.sending.encrypt(record))

    async def frame(self, kind: FrameType, stream: int, body: bytes = b"") -> None:
        head = struct.pack("<BQQBI", RecordType.DATA, self._number, 0, kind, stream)
        self._number += 1
        await self.send(head + body)

    async def until_closed(self) -> int | None:
        with pytest.raises(TransportLostError) as error:
            async with asyncio.timeout(120):
                while True:
                    await self.transport.receive()
        return error.value.code


async def test_thousands_of_streams_are_refused_and_end_the_session(direct: Direct) -> None:
    hostile = await Hostile.attach(direct)
    with contextlib.suppress(TransportLostError):
        for stream in range(1, 5000):
            await hostile.frame(FrameType.OPEN, stream, TARGET.encode())
    assert await hostile.until_closed() == RelayCloseCode.RECORD_INVALID
    assert direct.node.echo.connection_count <= LinkLimits().streams
    await until(lambda: direct.node.echo.open_count == 0)


async def test_a_flood_beyond_the_window_ends_the_session(direct: Direct) -> None:
    direct.node.echo.goes_on.clear()
    hostile = await Hostile.attach(direct)
    await hostile.frame(FrameType.OPEN, 1, TARGET.encode())
    with contextlib.suppress(TransportLostError):
        for _ in range(2 * LinkLimits().window_bytes // CHUNK_BYTES):
            await hostile.frame(FrameType.DATA, 1, bytes(CHUNK_BYTES))
    assert await hostile.until_closed() == RelayCloseCode.RECORD_INVALID
    direct.node.echo.goes_on.set()
    await until(lambda: direct.node.echo.open_count == 0)


@pytest.mark.slow
async def test_a_peer_that_takes_nothing_is_sent_no_more_than_its_window(direct: Direct) -> None:
    """And its session still ends when it falls silent."""
    hostile = await Hostile.attach(direct)
    await hostile.frame(FrameType.OPEN, 1, TARGET.encode())
    for _ in range(20):
        await hostile.frame(FrameType.DATA, 1, bytes(CHUNK_BYTES))
    (status,) = direct.node.acceptor.status()
    await until(lambda: direct.node.acceptor.status()[0].path is None)
    assert status.sent_bytes < 2 * LinkLimits().window_bytes


@pytest.mark.slow
async def test_the_node_was_restarted_and_its_streams_are_reset() -> None:
    hub = HubOfTest()
    async with (
        gateways(hub),
        echo_server() as echo,
        accepting(hub, echo.port) as first,
        edge(hub) as end,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", end.port)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        await first.aclose()
        async with accepting(hub, echo.port):
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)
            await until(lambda: end.status().state is ConnectionState.UP)
            assert await pump(end.port, b"after") == b"after"
        writer.close()


async def test_the_coordinator_was_restarted_and_gets_a_new_session() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node:
        async with edge(hub) as first:
            _, writer = await asyncio.open_connection("127.0.0.1", first.port)
            writer.write(b"x")
            await until(lambda: node.echo.open_count == 1)
            hub.is_closed = False
        # It said goodbye: the node keeps nothing of it.
        await until(lambda: node.acceptor.edge_ids == () and node.echo.open_count == 0)
        async with edge(hub) as second:
            assert await pump(second.port, b"again") == b"again"
            await until(lambda: node.echo.open_count == 0)
            assert node.acceptor.edge_ids == (hub.edge_id,)
        writer.close()


async def test_a_closed_edge_is_cut_at_once() -> None:
    hub = HubOfTest()
    async with (
        gateways(hub),
        echo_server() as echo,
        accepting(hub, echo.port) as acceptor,
        edge(hub) as end,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", end.port)
        writer.write(b"x")
        await reader.readexactly(1)
        hub.revoke()
        await acceptor.close_link(hub.edge_id)
        assert acceptor.edge_ids == ()
        assert (await end.link.wait_failed()).message.startswith("The hub does not know")
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        await until(lambda: echo.open_count == 0)
        writer.close()


async def test_an_edge_without_a_path_is_forgotten_after_a_while() -> None:
    hub = HubOfTest()
    times = QUICK._replace(forgotten=0.3, left=0.3)
    async with (
        gateways(hub),
        echo_server() as echo,
        accepting(hub, echo.port, times=times) as acceptor,
        edge(hub) as end,
    ):
        await asyncio.sleep(1)
        assert await pump(end.port, b"used") == b"used"
        # It loses its path without a goodbye, and finds no other one.
        hub.problem = LinkcppError("The hub does not answer.")
        await hub.gateways[0].stop()
        await until(lambda: acceptor.edge_ids == ())


async def test_edges_of_a_node_are_bounded_and_idle_ones_make_room(direct: Direct) -> None:
    acceptor, hub = direct.node.acceptor, direct.hub
    async with edge(hub) as end:
        for number in range(2 * MAX_LINKS):
            other = HubOfTest(signer=hub.signer, edge_id=f"{number:032x}")
            await acceptor.offer(other.make(EdgeRole.NODE, None))
            assert len(acceptor.edge_ids) <= MAX_LINKS
        assert hub.edge_id in acceptor.edge_ids
        assert await pump(end.port, b"kept") == b"kept"


async def test_keys_are_pinned_on_both_sides() -> None:
    hub = HubOfTest()
    pinned: dict[str, str] = {}

    def pin(hub_id: str, node_id: str, key: str) -> None:
        if pinned.setdefault(node_id, key) != key:
            raise LinkcppError(f"The machine {node_id} has another key than before.")

    async with running_node(hub) as node:
        node.acceptor._pin = pin
        async with await dialling(hub, pin=pin).open() as link:
            data = os.urandom(100)
            assert await exchange(link.connect(TARGET), data) == data
        assert set(pinned) == {BACKBONE_ID, NODE_ID}
        hub.backbone_keys = make_keys()
        with pytest.raises(LinkcppError, match=f"{BACKBONE_ID} has another key"):
            await node.acceptor.offer(hub.make(EdgeRole.NODE, None))
        hub.node_keys = make_keys()
        hub.acceptor = None
        with pytest.raises(LinkEndedError, match=f"{NODE_ID} has another key"):
            await dialling(hub, pin=pin).open()


@pytest.mark.parametrize(
    "changes",
    [{"hub_id": BACKBONE_ID}, {"peer_node_id": BACKBONE_ID}, {"role": EdgeRole.NODE}],
)
async def test_a_hub_that_offers_an_edge_to_another_machine_than_was_dialled_is_refused(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = HubOfTest()
    make = HubOfTest.make

    def lying(self: HubOfTest, role: EdgeRole, gateway: GatewayAt | None) -> EdgeOffer:
        offer = make(self, role, gateway)
        return offer.model_copy(update=changes) if role is EdgeRole.BACKBONE else offer

    monkeypatch.setattr(HubOfTest, "make", lying)
    async with running_node(hub):
        with pytest.raises(LinkEndedError, match="another machine than the one"):
            async with edge(hub):
                pass


async def test_an_offer_of_another_hub_or_side_is_refused(direct: Direct) -> None:
    offer = direct.hub.make(EdgeRole.NODE, None)
    others = (
        offer.model_copy(update={"hub_id": NODE_ID}),
        offer.model_copy(update={"role": EdgeRole.BACKBONE}),
        offer.model_copy(update={"peer_public_key": "B" * 43}),
    )
    for other in others:
        with pytest.raises(LinkcppError):
            await direct.node.acceptor.offer(other)
    assert direct.node.acceptor.edge_ids == ()


@pytest.mark.parametrize("comes_before", [False, True])
async def test_offers_of_a_programs_edge_go_to_the_program(
    direct: Direct, comes_before: bool
) -> None:
    acceptor, offer = direct.node.acceptor, direct.hub.make(EdgeRole.NODE, None)
    told: list[EdgeOffer] = []
    if comes_before:
        await acceptor.offer(offer)
    await acceptor.hand_over(offer.edge_id, HandedEdge(BACKBONE.node_id, told.append))
    if not comes_before:
        await acceptor.offer(offer)
    assert told == [offer]
    assert acceptor.status() == ()
    assert list(acceptor.edge_ids) == [offer.edge_id]
    await acceptor.close_link(offer.edge_id)
    assert list(acceptor.edge_ids) == []


async def test_offers_of_another_machines_edge_and_to_a_program_that_ended_go_nowhere(
    direct: Direct,
) -> None:
    acceptor, offer = direct.node.acceptor, direct.hub.make(EdgeRole.NODE, None)
    told: list[EdgeOffer] = []
    await acceptor.hand_over(offer.edge_id, HandedEdge("somebody-else", told.append))
    await acceptor.offer(offer)
    assert told == []

    def has_ended(_: EdgeOffer) -> None:
        raise FileNotFoundError

    await acceptor.hand_over(offer.edge_id, HandedEdge(BACKBONE.node_id, has_ended))
    await acceptor.offer(offer)
    assert acceptor.edge_ids == ()
