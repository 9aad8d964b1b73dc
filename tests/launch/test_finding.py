"""The nodes of a plan are found again as who has proved itself, not as who they say they are."""

import pytest

from linkcpp.cluster.records import NodeId
from linkcpp.launch.failing import NodeMissingError, StepRefusedError
from linkcpp.launch.finding import find_nodes
from linkcpp.node.client import NodeClient, NodeUnreachableError
from linkcpp.node.connector import NodeConnector, open_link
from linkcpp.planning.records import Plan
from linkcpp.registry.edges import NODE_REVOKED
from linkcpp.registry.hub_location import hub_node_url
from tests.cluster.peers import TOKEN, Peer, node_record, served
from tests.launch.plans import layers_plan

ATTIC = NodeId("00000000-0000-4000-8000-00000000000a")
CELLAR = NodeId("00000000-0000-4000-8000-00000000000b")
HUB = "https://hub.example"


class Ways(NodeConnector):
    """Leads to peers as a hub would, and by plain addresses."""

    def __init__(self, peers: dict[str, Peer]) -> None:
        super().__init__()
        self._peers = peers
        self.asked: list[str] = []

    async def open(self, url: str, *, timeout_seconds: float = 10.0) -> NodeClient:
        self.asked.append(url)
        peer = self._peers.get(url)
        at = f"http://127.0.0.1:{peer.port}" if peer else url
        link = await open_link(at, TOKEN, timeout_seconds=timeout_seconds)
        return NodeClient(url, link, timeout_seconds=timeout_seconds, owns_link=True)


def plan_with(*urls: str) -> Plan:
    plan = layers_plan(ATTIC)
    return plan.model_copy(update={"node_urls": {ATTIC: urls}, "engine": node_record().engine})


async def find(plan: Plan, ways: Ways, *urls: str) -> str:
    async def discover() -> tuple[str, ...]:
        return urls

    found = await find_nodes(plan, connector=ways, more_urls=(), discover=discover)
    for node in found.values():
        await node.client.aclose()
    return found[ATTIC].url


async def test_a_node_of_a_hub_cannot_take_the_place_of_another_one() -> None:
    liar = Peer(node_record(ATTIC))
    liar.proved_id = CELLAR
    cellar = hub_node_url(HUB, CELLAR)
    async with served(liar):
        ways = Ways({cellar: liar})
        with pytest.raises(NodeMissingError, match="cannot be found"):
            await find(plan_with(), ways, cellar)
    assert liar.tokens_seen == []


async def test_who_calls_itself_another_node_than_it_has_proved_to_be_is_told() -> None:
    liar = Peer(node_record(CELLAR))
    liar.node_body = node_record(ATTIC).model_dump_json().encode()
    async with served(liar) as url:
        with pytest.raises(NodeMissingError, match=f"says that it is {ATTIC}"):
            await find(plan_with(url), Ways({}))


async def test_a_node_that_was_revoked_is_told_as_that_and_not_as_coming_back_by_itself() -> None:
    class Refusing(Ways):
        async def open(self, url: str, *, timeout_seconds: float = 10.0) -> NodeClient:
            raise NodeUnreachableError("The node attic was revoked.", code=NODE_REVOKED)

    with pytest.raises(StepRefusedError, match="was revoked") as refused:
        await find(plan_with(hub_node_url(HUB, ATTIC)), Refusing({}))
    # A missing node is one that takes part as soon as it is there.
    assert not isinstance(refused.value, NodeMissingError)


async def test_a_node_that_proves_itself_is_found_at_the_hub_and_others_there_are_not_asked() -> (
    None
):
    attic = Peer(node_record(ATTIC))
    mine, other = hub_node_url(HUB, ATTIC), hub_node_url(HUB, CELLAR)
    async with served(attic):
        ways = Ways({mine: attic})
        assert await find(plan_with(), ways, other, mine) == mine
    assert ways.asked == [mine]
