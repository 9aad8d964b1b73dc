"""Edges: offered to both sides, through the best gateway, moved and closed."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, select
from starlette.websockets import WebSocket

from linkcpp.common.access import RateLimit
from linkcpp.hub import edges as hub_edges
from linkcpp.hub.assignment import UNMEASURED_MS, Candidate, choose_gateway
from linkcpp.hub.errors import ApiError
from linkcpp.hub.schema import EDGES
from linkcpp.link.offers import HubOffers
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

EVENT_SECONDS = 60


def test_the_min_way_of_both_sides_is_chosen_and_a_free_gateway_before_a_busy_one() -> None:
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
    assert (mine.gateway_name, theirs.gateway_name) == ("relay",) * 2
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


@pytest.mark.parametrize("who", ["backbone", "node"])
@pytest.mark.parametrize("is_revoked_first", [True, False])
async def test_no_edge_comes_into_being_while_one_of_its_machines_is_revoked(
    hub: RunningHub, who: str, is_revoked_first: bool
) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    create = hub.hub.edges.create(backbone.node_id, EdgeRequest(node_id=node.node_id))
    revoke = hub.hub.revoke((backbone if who == "backbone" else node).node_id)
    both = (revoke, create) if is_revoked_first else (create, revoke)
    results = await asyncio.gather(*both, return_exceptions=True)
    if is_revoked_first:
        expected = {"backbone": (403, "revoked"), "node": (409, "node_revoked")}
        (problem,) = (one for one in results if isinstance(one, ApiError))
        assert (problem.status, problem.code) == expected[who]
    assert not hub.hub.directory.edges
    assert not hub.hub.directory.waiting.get(node.node_id)
    assert await open_rows(hub) == 0


async def test_an_edge_whose_machine_is_revoked_meanwhile_gets_no_other_offer(
    hub: RunningHub,
) -> None:
    first = await hub.online_gateway("one")
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    mine = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    await hub.online_gateway("two")
    request = OfferRequest(not_gateways=(first.node_id,))
    revoked, renewed = await asyncio.gather(
        hub.hub.revoke(backbone.node_id),
        hub.hub.edges.renew(backbone.node_id, mine.edge_id, request),
        return_exceptions=True,
    )
    assert revoked is None
    assert isinstance(renewed, ApiError) and renewed.code == "unknown_edge"
    assert not hub.hub.directory.waiting.get(node.node_id)


async def test_a_revocation_and_the_end_of_its_edges_are_one_transaction(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    take_away, seen = hub.hub.writer.take_away, []

    async def take_away_and_look(work: Any) -> Any:
        result = await take_away(work)
        seen.append(await open_rows(hub))
        return result

    monkeypatch.setattr(hub.hub.writer, "take_away", take_away_and_look)
    await hub.hub.revoke(backbone.node_id)
    assert seen[0] == 0


async def test_a_machine_that_is_revoked_while_its_events_open_is_told_nothing(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await hub.online_node()
    accept = WebSocket.accept

    async def revoke_and_accept(self: WebSocket) -> None:
        await hub.hub.revoke(node.node_id)
        await accept(self)

    monkeypatch.setattr(WebSocket, "accept", revoke_and_accept)
    async with node.client.events() as events, asyncio.timeout(EVENT_SECONDS):
        assert [event async for event in events] == []
    assert hub.hub.events.count == 0


async def test_edges_of_one_pair_are_few_and_those_asked_for_at_once_count(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_edges, "_MAX_EDGES_PER_PAIR", 8)
    node, other = await hub.online_node(), await hub.online_node("cellar")
    backbone, second = await hub.machine(Role.BACKBONE), await hub.machine(Role.BACKBONE)
    request = EdgeRequest(node_id=node.node_id)
    asked = (hub.hub.edges.create(backbone.node_id, request) for _ in range(12))
    results = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one.code for one in results if isinstance(one, ApiError)]
    assert refused == ["too_many_edges"] * 4
    await second.client.create_edge(request)
    await backbone.client.create_edge(EdgeRequest(node_id=other.node_id))


async def test_edges_of_killed_coordinators_do_not_keep_the_next_one_out(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_edges, "_MAX_EDGES_PER_PAIR", 8)
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    for _ in range(8):
        await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    hub.clock.offset += 61
    await node.client.heartbeat(Heartbeat(sequence=1))
    offer = await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    assert offer.peer_node_id == node.node_id


async def test_edges_of_a_machine_that_are_asked_for_at_once_are_limited(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_edges, "_MAX_EDGES_PER_MACHINE", 2)
    node = await hub.online_node()
    backbones = [await hub.machine(Role.BACKBONE) for _ in range(3)]
    request = EdgeRequest(node_id=node.node_id)
    results = await asyncio.gather(
        *(hub.hub.edges.create(one.node_id, request) for one in backbones), return_exceptions=True
    )
    assert [one.code for one in results if isinstance(one, ApiError)] == ["too_many_edges"]


async def test_a_machine_that_asks_for_edges_without_end_is_slowed_down(hub: RunningHub) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    nobody = EdgeRequest(node_id="0" * 8 + node.node_id[8:])
    codes = set()
    for _ in range(400):
        with pytest.raises(ApiError) as refused:
            await hub.hub.edges.create(backbone.node_id, nobody)
        codes.add(refused.value.code)
    assert codes == {"unknown_machine", "too_many_calls"}
    other = await hub.machine(Role.BACKBONE)
    await other.client.create_edge(EdgeRequest(node_id=node.node_id))


async def test_a_machine_that_renews_an_edge_without_end_is_slowed_down_and_goes_on_later(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = RateLimit(tries=2, seconds_per_try=5, clock=hub.clock)
    monkeypatch.setattr(hub.hub.edges, "_renewals", limit)
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    offers = HubOffers(backbone.client, node.node_id)
    first = await offers.offer(())
    for _ in range(2):
        await offers.offer(())
    with pytest.raises(HubRefusedError, match="other ways for its edges too often") as refused:
        await offers.offer(())
    assert (refused.value.status, refused.value.code) == (429, "too_many_calls")
    call = (f"/v1/edges/{first.edge_id}/offer", backbone.headers)
    answer = await hub.http.post(call[0], json={}, headers=call[1])
    assert int(answer.headers["Retry-After"]) in range(1, 6)
    hub.clock.offset += 5
    assert (await offers.offer(())).edge_id == first.edge_id


async def test_rows_of_edges_that_were_closed_long_ago_are_deleted(hub: RunningHub) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    ids = []
    for further_days in (0, 4, 4):
        hub.clock.offset += further_days * 86400
        await hub.hub.registrar.heartbeat(node.node_id, Heartbeat(sequence=1))
        offer = await hub.hub.edges.create(backbone.node_id, EdgeRequest(node_id=node.node_id))
        await hub.hub.edges.close(backbone.node_id, offer.edge_id, is_admin=False)
        ids.append(offer.edge_id)
    assert {row.edge_id for row in await edge_rows(hub)} == set(ids[1:])


async def test_a_newer_events_connection_takes_the_place_of_an_older_one(hub: RunningHub) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    async with node.client.events() as older, node.client.events() as newer:
        async with asyncio.timeout(EVENT_SECONDS):
            assert [event async for event in older] == []
        await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
        assert isinstance(await next_event(newer), EdgeEvent)


async def edge_rows(hub: RunningHub) -> list[Any]:
    def read(engine: Engine) -> list[Any]:
        with engine.connect() as connection:
            return list(connection.execute(select(EDGES)))

    return await hub.hub.read(read)


async def open_rows(hub: RunningHub) -> int:
    return sum(row.closed_at is None for row in await edge_rows(hub))


async def next_event(events: Any) -> HubEvent:
    async with asyncio.timeout(EVENT_SECONDS):
        event: HubEvent = await anext(events)
        return event
