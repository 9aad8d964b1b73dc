"""A node's agent, with a real engine's description, reached by its client over an edge."""

import asyncio
import os
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from linkcpp.edge.choosing import PathKind
from linkcpp.edge.endpoint import EdgeEndpoint
from linkcpp.engine.records import EngineLocation
from linkcpp.node.client import NodeClient, WrongTokenError
from tests.edge.edges import HubOfTest, accepting, edge, gateways
from tests.edge.programs import until
from tests.node.agents import RunningAgent, running_agent

UPLOAD_BYTES = 48 * 2**20


@pytest.fixture
async def node(
    stock_engine: EngineLocation, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningAgent]:
    monkeypatch.setattr("linkcpp.cluster.measure.cpu_read_rate", lambda: 1e10)
    async with running_agent(stock_engine) as running:
        yield running


def client_of(end: EdgeEndpoint, *, token: str | None = None) -> NodeClient:
    return NodeClient("hub+https://hub.example#attic", token or end.token, edge_port=end.port)


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


async def test_the_agents_own_route_takes_a_direct_edge(node: RunningAgent) -> None:
    hub = HubOfTest(direct_urls=(node.url.replace("http", "ws"),))
    async with accepting(hub, port_of(node), node.agent.tokens) as acceptor:
        node.agent.edges = acceptor
        async with edge(hub) as end, client_of(end) as client:
            assert end.status().path is PathKind.DIRECT
            assert await client.echo(os.urandom(2**20)) == 2**20
        node.agent.edges = None
