"""A node's agent, with a real engine's description, reached by its client over an edge."""

import asyncio
import os
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from linkcpp.cluster.records import NodeId
from linkcpp.engine.records import EngineLocation
from linkcpp.link.choosing import PathKind
from linkcpp.link.endpoint import EdgeEndpoint
from linkcpp.node.client import EdgePort, NodeClient, OtherNodeError, WrongTokenError
from tests.link.edges import NODE_ID, HubOfTest, accepting, edge, gateways
from tests.link.programs import until
from tests.node.agents import RunningAgent, running_agent

UPLOAD_BYTES = 48 * 2**20


@pytest.fixture
async def node(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningAgent]:
    monkeypatch.setattr("linkcpp.cluster.measure.cpu_read_rate", lambda: 1e10)
    async with running_agent(stock_engine) as running:
        identity = running.agent.identity
        running.agent.identity = identity.model_copy(update={"node_id": NodeId(NODE_ID)})
        yield running


def client_of(end: EdgeEndpoint, *, token: str | None = None) -> NodeClient:
    port = EdgePort(end.port, NodeId(NODE_ID))
    return NodeClient(f"hub+https://hub.example#{NODE_ID}", token or end.token, edge=port)


def port_of(node: RunningAgent) -> int:
    return urlsplit(node.url).port or 0


async def test_an_upload_goes_on_when_the_gateway_is_killed_and_restarted(
    node: RunningAgent,
) -> None:
    hub = HubOfTest()
    async with (
        gateways(hub) as (gateway,),
        accepting(hub, port_of(node), node.agent.tokens),
        edge(hub) as end,
        client_of(end) as client,
    ):
        assert (await client.node()).name == "attic"
        assert (await client.health()).node_id == node.agent.identity.node_id
        upload = asyncio.create_task(client.echo(os.urandom(UPLOAD_BYTES)))
        await until(lambda: end.status().sent_bytes > UPLOAD_BYTES // 4)
        await gateway.stop()
        await gateway.start()
        await until(lambda: end.status().reconnect_count == 1)
        assert await upload == UPLOAD_BYTES
        assert end.status().path is PathKind.RELAY


async def test_the_agent_takes_the_edges_token_while_the_edge_lives_and_no_other(
    node: RunningAgent,
) -> None:
    hub = HubOfTest()
    async with gateways(hub), accepting(hub, port_of(node), node.agent.tokens) as acceptor:
        async with edge(hub) as end:
            async with client_of(end, token="x" * 43) as stranger:
                with pytest.raises(WrongTokenError):
                    await stranger.node()
            token = end.token
            async with client_of(end) as client:
                assert (await client.servers()) == ()
        await acceptor.close_edge(hub.edge_id)
    assert not node.agent.tokens.takes(token)
    assert node.agent.tokens.takes(node.token)


async def test_a_node_that_calls_itself_another_one_than_the_edge_has_proved_is_not_believed(
    node: RunningAgent,
) -> None:
    hub = HubOfTest()
    identity = node.agent.identity
    async with (
        gateways(hub),
        accepting(hub, port_of(node), node.agent.tokens),
        edge(hub) as end,
        client_of(end) as client,
    ):
        assert (await client.node()).node_id == NODE_ID
        other = NodeId("55555555-5555-4555-8555-555555555555")
        node.agent.identity = identity.model_copy(update={"node_id": other})
        with pytest.raises(OtherNodeError, match=f"says that it is {other}"):
            await client.node()
        with pytest.raises(OtherNodeError):
            await client.health()


async def test_the_agents_own_route_takes_a_direct_edge(node: RunningAgent) -> None:
    hub = HubOfTest(direct_urls=(node.url.replace("http", "ws"),))
    async with accepting(hub, port_of(node), node.agent.tokens) as acceptor:
        node.agent.edges = acceptor
        async with edge(hub) as end, client_of(end) as client:
            assert end.status().path is PathKind.DIRECT
            assert await client.echo(os.urandom(2**20)) == 2**20
        node.agent.edges = None
