"""Links within a cluster, which its token introduces, over real WebSockets."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from linkcpp.link.acceptor import LinkAcceptor
from linkcpp.link.core import NO_EPOCH, Resume
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.link.handshake import ClusterMember, Machine, cluster_psk, initiate
from linkcpp.link.offers import LinkEndedError
from linkcpp.link.records import LinkLimits
from linkcpp.link.status import ConnectionState
from linkcpp.link.supply import ClusterSupply
from linkcpp.link.transport import TransportLostError, WebSocketTransport
from linkcpp.registry.relay import DIRECT_PATH, PAIRED, RelayCloseCode, encode_cluster_hello
from tests.link.agent import direct_route
from tests.link.edges import BACKBONE, NODE, QUICK, TARGET, behind
from tests.link.programs import Echo, echo_server, exchange, until
from tests.link.transports import LINK_ID, TOKEN
from tests.support.slow_relay import SlowRelay, slow_relay

MEBIBYTE = 2**20


class Node(NamedTuple):
    """A node of a cluster, the program behind it, and the network before it."""

    acceptor: LinkAcceptor
    echo: Echo
    network: SlowRelay

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.network.port}"


def acceptor_of(echo: Echo, own: Machine = NODE) -> LinkAcceptor:
    return LinkAcceptor(
        own_key=X25519PrivateKey.generate(),
        own=own,
        serve=behind(echo.port),
        psk=cluster_psk(TOKEN),
        times=QUICK,
    )


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with echo_server() as echo:
        acceptor = acceptor_of(echo)
        try:
            async with direct_route(acceptor) as port, slow_relay(port) as network:
                yield Node(acceptor, echo, network)
        finally:
            await acceptor.aclose()


@asynccontextmanager
async def member(node: Node, token: str = TOKEN) -> AsyncIterator[LinkEndpoint]:
    supply = ClusterSupply(
        (node.url,), own_key=X25519PrivateKey.generate(), own=BACKBONE, psk=cluster_psk(token)
    )
    async with await LinkEndpoint(supply, times=QUICK).open() as link:
        yield link


async def test_machines_with_one_token_reach_each_other_and_know_who_they_are(node: Node) -> None:
    async with member(node) as link:
        data = os.urandom(3 * MEBIBYTE)
        assert await exchange(link.connect(TARGET), data) == data
        assert link.peer == NODE
        assert link.status().node_id == NODE.node_id
        (status,) = node.acceptor.status()
        assert status.link_id == link.status().link_id
        assert (status.peer_node_id, status.peer_name) == (BACKBONE.node_id, BACKBONE.name)
        assert node.acceptor.edge_ids == ()
        await link.ping()


async def test_a_machine_with_another_token_is_refused_and_nothing_of_it_is_kept(
    node: Node,
) -> None:
    with pytest.raises(LinkEndedError) as error:
        async with member(node, "another token"):
            pass
    assert error.value.code == "not_introduced"
    await until(lambda: not node.acceptor._strangers)
    assert node.acceptor.status() == ()


async def test_a_node_without_a_cluster_takes_no_member(node: Node) -> None:
    node.acceptor._psk = None
    transport = await said_hello(node)
    with pytest.raises(TransportLostError, match="not in a cluster") as error:
        await transport.receive()
    assert error.value.code == RelayCloseCode.UNAUTHORIZED


async def test_a_path_that_is_cut_is_replaced_and_no_byte_is_lost(node: Node) -> None:
    async with member(node) as link:
        data = os.urandom(12 * MEBIBYTE)
        transfer = asyncio.create_task(exchange(link.connect(TARGET), data))
        for number in range(3):
            before = node.echo.received_bytes
            await until(lambda: node.echo.received_bytes > before + MEBIBYTE)  # noqa: B023
            node.network.cut()
            await until(lambda: link.status().reconnect_count > number)  # noqa: B023
        async with asyncio.timeout(30):
            assert await transfer == data
        assert node.echo.connection_count == 1
        assert link.peer == NODE


async def test_keys_that_have_sealed_enough_are_replaced_and_no_byte_is_lost(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linkcpp.link.channel.MAX_SEALED_BYTES", MEBIBYTE)
    async with member(node) as link:
        data = os.urandom(8 * MEBIBYTE)
        async with asyncio.timeout(60):
            assert await exchange(link.connect(TARGET), data) == data
        assert link.status().reconnect_count >= 7
        assert node.echo.connection_count == 1


async def test_a_goodbye_ends_the_link_at_the_other_end_at_once(node: Node) -> None:
    async with member(node) as link:
        _, writer = link.connect(TARGET)
        writer.write(b"x")
        await until(lambda: node.echo.open_count == 1)
    # Long before it would be forgotten.
    await until(lambda: node.acceptor.status() == () and node.echo.open_count == 0, QUICK.left / 2)


async def test_a_node_that_stops_is_given_up_soon(node: Node) -> None:
    async with member(node) as link:
        node.network.refuses = True
        await node.acceptor.aclose()
        await until(lambda: link.status().state is ConnectionState.RECONNECTING)
        assert link.status().problem is not None


async def test_streams_to_what_the_node_does_not_serve_are_refused_with_the_reason(
    node: Node,
) -> None:
    async with member(node) as link:
        reader, writer = link.connect("something else")
        writer.write(b"anybody?")
        with pytest.raises(ConnectionResetError, match="there is no 'something else' here"):
            await reader.read(1)
        assert await exchange(link.connect(TARGET), b"others go on") == b"others go on"


async def test_more_streams_than_may_be_are_refused_here(node: Node) -> None:
    async with member(node) as link:
        opened = [link.connect(TARGET) for _ in range(LinkLimits().streams)]
        with pytest.raises(ConnectionError, match="too many streams"):
            link.connect(TARGET)
        for _, writer in opened:
            writer.transport.abort()
        assert await exchange(link.connect(TARGET), b"room again") == b"room again"


async def said_hello(node: Node, link_id: str = LINK_ID) -> WebSocketTransport:
    url = node.url.replace("http", "ws") + DIRECT_PATH
    transport = await WebSocketTransport.dial(url, timeout_seconds=5)
    transport.send(encode_cluster_hello(link_id))
    return transport


async def test_a_second_machine_with_a_known_link_but_another_key_is_refused(node: Node) -> None:
    async with member(node) as link:
        link_id = link.status().link_id
        assert link_id is not None
        transport = await said_hello(node, link_id)
        assert await transport.receive() == PAIRED
        other = ClusterMember(X25519PrivateKey.generate(), cluster_psk(TOKEN), link_id, BACKBONE)
        await initiate(transport, other, Resume(b"x" * 16, NO_EPOCH, 0))
        with pytest.raises(TransportLostError, match="another machine's") as error:
            await transport.receive()
        assert error.value.code == RelayCloseCode.UNAUTHORIZED
        assert await exchange(link.connect(TARGET), b"still mine") == b"still mine"
        assert link.status().reconnect_count == 0


async def test_another_machine_at_the_address_is_not_taken_for_the_first(node: Node) -> None:
    other = acceptor_of(node.echo, Machine(BACKBONE.node_id, "cellar"))
    try:
        async with direct_route(other) as port, member(node) as link:
            node.network.target_port = port
            node.network.cut()
            error = await link.wait_failed()
            assert error.code == "link_lost"
            assert BACKBONE.node_id in error.message
            assert link.has_ended
    finally:
        await other.aclose()


async def test_nobody_there_is_told_at_once(node: Node) -> None:
    node.network.refuses = True
    with pytest.raises(LinkEndedError) as error:
        async with member(node):
            pass
    assert error.value.code == "unreachable"
