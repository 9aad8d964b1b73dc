"""Edges: offered to both sides, through the best gateway, moved and closed."""

import asyncio
from typing import Any

import pytest

from linkcpp.hub.assignment import UNMEASURED_MS, Candidate, choose_gateway
from linkcpp.registry.connection import HubRefusedError
from linkcpp.registry.edges import (
    CloseEvent,
    EdgeEvent,
    EdgeRequest,
    EdgeRole,
    GatewayHeartbeat,
    HubEvent,
    OfferRequest,
    RevokedEvent,
)
from linkcpp.registry.records import Heartbeat, Role
from linkcpp.registry.tickets import verify_edge_ticket
from tests.hub.hubs import RunningHub, gateway_url

EVENT_SECONDS = 20


def test_the_shortest_way_of_both_sides_is_chosen_and_a_free_gateway_before_a_busy_one() -> None:
    gateways = [Candidate("a", 0), Candidate("b", 0)]
    assert choose_gateway(gateways, rtts_ms=({"a": 10, "b": 40}, {"a": 50, "b": 5})) == "b"
    assert choose_gateway([Candidate("a", 500), Candidate("b", 0)]) == "b"
    assert choose_gateway([]) is None


def test_a_gateway_that_failed_is_taken_only_where_there_is_no_other() -> None:
    both = [Candidate("a", 0), Candidate("b", 900)]
    assert choose_gateway(both, avoid=("a",)) == "b"
    assert choose_gateway(both[:1], avoid=("a",)) == "a"


def test_a_measured_good_way_is_preferred_to_an_unmeasured_one() -> None:
    both = [Candidate("a", 0), Candidate("b", 0)]
    assert choose_gateway(both, rtts_ms=({"b": UNMEASURED_MS / 2},)) == "b"


async def test_both_sides_get_offers_of_one_edge_with_tickets_of_their_own(
    hub: RunningHub,
) -> None:
    gateway = await hub.online_gateway()
    node = await hub.online_node(direct_urls=("ws://10.0.0.5:8716/v1/edge",))
    backbone = await hub.machine(Role.BACKBONE, name="desk")
    async with node.client.events() as events:
        mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
        event = await next_event(events)
    assert isinstance(event, EdgeEvent)
    theirs = event.offer
    assert mine.edge_id == theirs.edge_id
    assert (mine.role, theirs.role) == (EdgeRole.BACKBONE, EdgeRole.NODE)
    assert (mine.relay_url, theirs.relay_url) == (gateway_url("relay"),) * 2
    assert (mine.peer_public_key, theirs.peer_public_key) == (
        node.keys.edge_public,
        backbone.keys.edge_public,
    )
    assert (mine.peer_name, theirs.peer_name) == ("attic", "desk")
    assert (mine.direct_urls, theirs.direct_urls) == (("ws://10.0.0.5:8716/v1/edge",), ())
    for offer, machine in ((mine, backbone), (theirs, node)):
        claims = verify_edge_ticket(hub.hub.identity.verifier, offer.ticket, now=hub.clock())
        assert (claims.edge, claims.role, claims.sub) == (mine.edge_id, offer.role, machine.node_id)
        assert claims.gateway == gateway.node_id == offer.gateway_id


async def test_a_node_that_listens_to_no_events_learns_of_an_edge_by_its_next_heartbeat_once(
    hub: RunningHub,
) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    first = await node.client.heartbeat(Heartbeat(sequence=1))
    second = await node.client.heartbeat(Heartbeat(sequence=2))
    assert [offer.edge_id for offer in first.offers] == [mine.edge_id]
    assert second.offers == ()


async def test_without_a_gateway_there_is_an_offer_for_the_direct_way_and_a_gateway_is_added_later(
    hub: RunningHub,
) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    assert (mine.gateway_id, mine.relay_url) == (None, None)
    async with backbone.client.events() as events:
        gateway = await hub.online_gateway()
        event = await next_event(events)
    assert isinstance(event, EdgeEvent)
    assert (event.offer.edge_id, event.offer.gateway_id) == (mine.edge_id, gateway.node_id)


async def test_edges_of_a_gateway_that_goes_away_move_to_another_one(hub: RunningHub) -> None:
    first = await hub.online_gateway("first")
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    assert mine.gateway_id == first.node_id
    hub.clock.offset += 9  # the first one is silent from now on
    async with backbone.client.events() as for_backbone, node.client.events() as for_node:
        second = await hub.online_gateway("second")
        told = [await next_event(for_backbone), await next_event(for_node)]
    for event in told:
        assert isinstance(event, EdgeEvent)
        assert event.offer.edge_id == mine.edge_id
        assert event.offer.gateway_id == second.node_id
    late = await first.client.gateway_heartbeat(
        GatewayHeartbeat(url=gateway_url("first"), edges=(mine.edge_id,))
    )
    assert late.close_edges == (mine.edge_id,)


async def test_a_coordinator_whose_way_was_lost_gets_another_one_for_the_same_edge(
    hub: RunningHub,
) -> None:
    gateways = {(await hub.online_gateway(name)).node_id for name in ("one", "two")}
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    failed = mine.gateway_id
    assert failed is not None
    again = await backbone.client.renew_offer(mine.edge_id, OfferRequest(not_gateways=(failed,)))
    assert again.edge_id == mine.edge_id
    assert {failed, again.gateway_id} == gateways
    (theirs,) = (await node.client.heartbeat(Heartbeat(sequence=1))).offers
    assert theirs.gateway_id == again.gateway_id


async def test_a_closed_edge_is_closed_for_all_and_closing_twice_is_fine(hub: RunningHub) -> None:
    gateway = await hub.online_gateway()
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    edges = (mine.edge_id,)
    kept = await gateway.client.gateway_heartbeat(
        GatewayHeartbeat(url=gateway_url("relay"), edges=edges)
    )
    assert kept.close_edges == ()
    async with node.client.events() as events:
        for _ in range(2):
            await backbone.client.close_edge(mine.edge_id)
        assert await next_event(events) == CloseEvent(edge_id=mine.edge_id)
    told = await gateway.client.gateway_heartbeat(
        GatewayHeartbeat(url=gateway_url("relay"), edges=edges)
    )
    assert told.close_edges == edges
    answer = await node.client.heartbeat(Heartbeat(sequence=1, edges=edges))
    assert (answer.offers, answer.close_edges) == ((), edges)


async def test_nobody_else_renews_or_closes_an_edge(hub: RunningHub) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    stranger, admin = await hub.machine(Role.BACKBONE), await hub.machine(Role.ADMIN)
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    await stranger.client.close_edge(mine.edge_id)
    with pytest.raises(HubRefusedError, match="no such edge"):
        await stranger.client.renew_offer(mine.edge_id, OfferRequest())
    assert [one.edge_id for one in (await admin.client.edges()).edges] == [mine.edge_id]
    await admin.client.close_edge(mine.edge_id)
    assert (await admin.client.edges()).edges == ()


async def test_an_edge_to_a_machine_that_is_gone_unknown_or_no_node_is_refused(
    hub: RunningHub,
) -> None:
    backbone, other = await hub.machine(Role.BACKBONE), await hub.machine(Role.BACKBONE)
    node = await hub.online_node()
    hub.clock.offset += 101
    codes = []
    for node_id in (node.node_id, other.node_id, backbone.node_id, "0" * 8 + node.node_id[8:]):
        with pytest.raises(HubRefusedError) as refused:
            await backbone.client.create_edge(EdgeRequest(node_id=node_id))
        codes.append(refused.value.code)
    assert codes == ["node_gone", "not_a_node", "unknown_machine", "unknown_machine"]


async def test_an_edge_that_nobody_tells_of_any_more_is_closed(hub: RunningHub) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    hub.clock.offset += 16 * 60
    await hub.hub.edges.close_unseen()
    assert not hub.hub.directory.edges


async def test_a_revoked_node_is_told_and_cut_off_with_its_edges(hub: RunningHub) -> None:
    gateway = await hub.online_gateway()
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    admin = await hub.machine(Role.ADMIN)
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    async with node.client.events() as for_node, backbone.client.events() as for_backbone:
        await admin.client.revoke_node(node.node_id)
        async with asyncio.timeout(EVENT_SECONDS):
            told = [event async for event in for_node]  # ends because the hub closes it
        assert RevokedEvent() in told
        assert await next_event(for_backbone) == CloseEvent(edge_id=mine.edge_id)
    closed = await gateway.client.gateway_heartbeat(
        GatewayHeartbeat(url=gateway_url("relay"), edges=(mine.edge_id,))
    )
    assert closed.close_edges == (mine.edge_id,)
    refused = await hub.http.get("/v1/gateways", headers=node.headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "revoked")


async def test_a_newer_events_connection_takes_the_place_of_an_older_one(hub: RunningHub) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    async with node.client.events() as older, node.client.events() as newer:
        async with asyncio.timeout(EVENT_SECONDS):
            assert [event async for event in older] == []
        await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
        assert isinstance(await next_event(newer), EdgeEvent)


async def next_event(events: Any) -> HubEvent:
    async with asyncio.timeout(EVENT_SECONDS):
        event: HubEvent = await anext(events)
        return event
