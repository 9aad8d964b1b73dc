"""What a node tells its hub, and when."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from linkcpp.cluster.records import NodeRecord, NodeStatus
from linkcpp.hub import presence_probe
from linkcpp.hub.presence import presence
from linkcpp.link.offers import HubOffers, LinkEndedError
from linkcpp.node import membership
from linkcpp.node.hub_discovery import describe_registered
from linkcpp.node.membership import Membership, has_news
from linkcpp.registry.connection import HubRefusedError
from linkcpp.registry.edges import NODE_GONE, EdgeRequest
from linkcpp.registry.records import NodeState, Presence, RegisteredNode, Role
from tests.cluster.peers import COORDINATOR, fingerprint, node_record
from tests.hub.hubs import Machine, RunningHub, node_state, running_hub
from tests.link.programs import until

GATEWAY = "00000000-0000-4000-8000-0000000000f1"


def state(record: NodeRecord | None = None, **rtts_ms: float) -> NodeState:
    return NodeState(
        record=record or node_record(),
        relay_rtts_ms={GATEWAY: rtts_ms["rtt_ms"]} if rtts_ms else {},
    )


def offering(offered_bytes: int) -> NodeRecord:
    record = node_record()
    cpu = record.devices[0].model_copy(update={"offered_bytes": offered_bytes, "free_bytes": 1})
    return record.model_copy(update={"devices": (cpu,)})


@pytest.mark.parametrize(
    "now",
    [
        state(offering(3 * 10**9)),
        state(offering(0)),
        state(node_record(engine=fingerprint("7.0.0"))),
        state(node_record(devices=())),
        state(rtt_ms=20.0),
        state().model_copy(update={"direct_urls": ("ws://10.0.0.5:8716/v1/edge",)}),
    ],
)
def test_what_a_plan_would_notice_is_news(now: NodeState) -> None:
    assert has_news(state(), now)


def test_what_moves_all_the_time_is_no_news() -> None:
    assert not has_news(state(), state(offering(5 * 10**9 - 9 * 10**7)))
    assert not has_news(state(rtt_ms=20.0), state(rtt_ms=24.0))
    assert has_news(state(rtt_ms=20.0), state(rtt_ms=26.0))


class NoEdges:
    """Takes part in nothing."""

    edge_ids = ()

    async def offer(self, offer: object) -> None:
        raise AssertionError(f"nobody asked for {offer}")

    async def close_link(self, link_id: str) -> None:
        raise AssertionError(f"there is no edge {link_id}")


class Watched:
    """A node of a hub, as a backbone sees it."""

    def __init__(self, hub: RunningHub, node: Machine, backbone: Machine) -> None:
        self.node = node
        self._hub = hub
        self.backbone = backbone

    async def look(self) -> RegisteredNode:
        return await self.backbone.client.node(self.node.node_id)

    async def asked(self) -> bool:
        """Have the hub ask the node, and tell whether it is silent."""
        (node,) = [
            one
            for one in (await self.backbone.client.nodes(ask=True)).nodes
            if one.node_id == self.node.node_id
        ]
        return node.is_silent

    def forget(self) -> None:
        """Let the hub not have heard of the node just now."""
        self._hub.hub.presence_probe.lost(self.node.node_id)

    @asynccontextmanager
    async def member(self) -> AsyncIterator[None]:
        async def describe() -> NodeRecord:
            return node_state(self.node).record

        it = Membership(
            self.node.client, NoEdges(), describe=describe, held=tuple, direct_urls=tuple
        )
        running = asyncio.create_task(it.run())
        await until(self._is_online)
        yield
        running.cancel()
        async with asyncio.timeout(30):
            await asyncio.gather(running, return_exceptions=True)

    def _is_online(self) -> bool:
        known = self._hub.hub.directory.machines[self.node.node_id]
        return presence(known.last_seen, self._hub.clock(), known.left_at) is Presence.ONLINE


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with running_hub(tmp_path / "hub", None) as hub:
        yield Watched(hub, await hub.machine(Role.NODE), await hub.machine(Role.BACKBONE))


async def test_a_node_that_stops_is_gone_at_once_and_back_as_soon_as_it_starts(
    watched: Watched,
) -> None:
    for _ in range(2):
        async with watched.member():
            assert (await watched.look()).presence is Presence.ONLINE
        seen = await watched.look()
        assert (seen.presence, seen.has_left) == (Presence.GONE, True)


async def test_a_hub_that_does_not_answer_does_not_keep_a_node_from_stopping(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_LEAVING_SECONDS", 0.05)
    monkeypatch.setattr(watched.node.client, "leave", asyncio.Event().wait)
    async with watched.member():
        pass
    assert (await watched.look()).presence is Presence.ONLINE


async def test_a_node_says_at_once_that_it_is_there_when_it_is_asked(watched: Watched) -> None:
    async with watched.member():
        before = (await watched.look()).last_seen
        assert await watched.asked() is False
        watched.forget()
        assert await watched.asked() is False
        seen = (await watched.look()).last_seen
        assert before is not None and seen is not None and seen > before


async def test_a_node_that_was_killed_is_not_counted_on_though_no_heartbeat_is_late(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_probe, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(presence_probe, "_RETURN_SECONDS", 0.0)
    monkeypatch.setattr(membership, "_LEAVING_SECONDS", 0.05)
    monkeypatch.setattr(watched.node.client, "leave", asyncio.Event().wait)
    async with watched.member():
        pass
    assert (await watched.look()).presence is Presence.ONLINE
    watched.forget()
    while not await watched.asked():  # a heartbeat was still on its way
        watched.forget()
    ready = describe_registered(
        await watched.backbone.client.nodes(ask=True), COORDINATOR, hub_url="http://x", rtts_ms={}
    )
    assert [(node.status, "does not answer" in (node.reason or "")) for node in ready] == [
        (NodeStatus.STALE, True)
    ]
    with pytest.raises(HubRefusedError, match="does not answer this hub") as refused:
        await watched.backbone.client.create_edge(EdgeRequest(node_id=watched.node.node_id))
    assert refused.value.code == NODE_GONE
    offers = HubOffers(watched.backbone.client, watched.node.node_id)
    with pytest.raises(LinkEndedError):
        await offers.offer(())
