"""A node's agent, with a real engine's description, reached by its client over an edge."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from linkcpp.cluster.records import NodeId
from linkcpp.engine.records import EngineLocation
from linkcpp.link.acceptor import HubIntroduction
from linkcpp.link.choosing import PathKind
from linkcpp.link.endpoint import LinkEndpoint
from linkcpp.node.client import NodeClient, NodeUnreachableError, OtherNodeError
from linkcpp.registry.keys import load_keys
from tests.link.edges import NODE, NODE_ID, HubOfTest, dialling, gateways, no_pin
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


def client_of(link: LinkEndpoint) -> NodeClient:
    return NodeClient(f"hub+https://hub.example#{NODE_ID}", link)


@contextlib.asynccontextmanager
async def at_hub(node: RunningAgent, hub: HubOfTest) -> AsyncIterator[None]:
    """Have the agent take links that a hub introduces."""
    hub.node_keys, hub.acceptor = load_keys(), node.agent.links
    node.agent.links.hub = HubIntroduction(hub.signer.key)
    node.agent.links._pin = no_pin
    node.agent.links._own = NODE
    yield
    await node.agent.links.close_link(hub.edge_id)


@contextlib.asynccontextmanager
async def linked(hub: HubOfTest) -> AsyncIterator[LinkEndpoint]:
    """Run the coordinator's end."""
    async with await dialling(hub).open() as link:
        yield link


async def test_an_upload_goes_on_when_the_gateway_is_killed_and_restarted(
    node: RunningAgent,
) -> None:
    hub = HubOfTest()
    async with (
        at_hub(node, hub),
        gateways(hub) as (gateway,),
        linked(hub) as end,
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


async def test_the_agent_serves_a_link_while_it_lives_and_not_after(node: RunningAgent) -> None:
    hub = HubOfTest()
    async with at_hub(node, hub), gateways(hub), linked(hub) as link, client_of(link) as client:
        assert (await client.servers()) == ()
        hub.revoke()
        await node.agent.links.close_link(hub.edge_id)
        await link.wait_failed()
        with pytest.raises(NodeUnreachableError):
            await client.servers()
    # Links of the cluster are none of the hub's.
    assert (await node.client.servers()) == ()


async def test_a_node_that_calls_itself_another_one_than_the_edge_has_proved_is_not_believed(
    node: RunningAgent,
) -> None:
    hub = HubOfTest()
    identity = node.agent.identity
    async with (
        at_hub(node, hub),
        gateways(hub),
        linked(hub) as end,
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
    async with at_hub(node, hub), linked(hub) as end, client_of(end) as client:
        assert end.status().path is PathKind.DIRECT
        assert await client.echo(os.urandom(2**20)) == 2**20
