"""Heartbeats: who is there, and what a node learns by them."""

import asyncio
import uuid

import pytest
from sqlalchemy import insert

from linkcpp.hub.heartbeat_rows import HeartbeatRow, LeaveRow
from linkcpp.hub.machines import nodes_json
from linkcpp.hub.presence import is_gateway_online, presence
from linkcpp.hub.schema import MACHINES
from linkcpp.registry.connection import HubRefusedError
from linkcpp.registry.edges import EdgeRequest
from linkcpp.registry.records import HEARTBEAT_SECONDS, Heartbeat, Presence, Role
from tests.hub.hubs import RunningHub, node_state


@pytest.mark.parametrize(
    ("silent_seconds", "expected"),
    [
        (0, Presence.ONLINE),
        (29.9, Presence.ONLINE),
        (30, Presence.STALE),
        (99.9, Presence.STALE),
        (100, Presence.GONE),
        (-5, Presence.ONLINE),
    ],
)
def test_a_node_is_stale_after_three_missed_heartbeats_and_gone_after_ten(
    silent_seconds: float, expected: Presence
) -> None:
    assert presence(1000.0, 1000.0 + silent_seconds) is expected


def test_a_machine_that_never_told_of_itself_is_gone() -> None:
    assert presence(None, 1000.0) is Presence.GONE


def test_a_node_that_was_heard_before_the_clock_was_set_back_has_to_be_heard_again() -> None:
    assert presence(1000.0, 1000.0 - HEARTBEAT_SECONDS / 2) is Presence.ONLINE
    assert presence(1000.0, 1000.0 - HEARTBEAT_SECONDS) is Presence.GONE


def test_a_gateway_is_online_until_it_missed_three_heartbeats() -> None:
    assert is_gateway_online(100.0, 105.9)
    assert not is_gateway_online(100.0, 106.0)


async def test_a_node_that_tells_of_itself_is_listed_online_with_what_it_told(
    hub: RunningHub,
) -> None:
    node = await hub.online_node("attic", direct_urls=("ws://10.0.0.5:8716/v1/edge",))
    backbone = await hub.machine(Role.BACKBONE, name="desk")
    listed = {one.node_id: one for one in (await backbone.client.nodes()).nodes}
    attic = listed[node.node_id]
    assert attic.presence is Presence.ONLINE
    assert attic.edge_key == node.keys.edge_public
    assert attic.state == node_state(node, direct_urls=("ws://10.0.0.5:8716/v1/edge",))
    assert listed[backbone.node_id].last_seen is None
    assert await backbone.client.node(node.node_id) == attic


async def test_many_machines_are_listed_in_pieces_each_once_and_in_the_order_of_their_names(
    hub: RunningHub,
) -> None:
    backbone = await hub.machine(Role.BACKBONE, name="a desk")
    keys = {"signing_key": backbone.keys.signing_public, "edge_key": backbone.keys.edge_public}
    row = {"role": "node", "token_id": "", "joined_at": 0.0, **keys}
    names = [f"node {number:03}" for number in range(350)]
    rows = [row | {"node_id": str(uuid.uuid4()), "name": name} for name in reversed(names)]
    await hub.hub.writer.write(lambda connection: connection.execute(insert(MACHINES), rows))
    listed = (await backbone.client.nodes()).nodes
    assert [one.name for one in listed] == ["a desk", *names]
    pieces = await hub.hub.read(lambda engine: nodes_json(engine, hub.clock(), frozenset()))
    assert max(map(len, pieces)) < sum(map(len, pieces)) / 3


async def test_silence_makes_a_node_stale_then_gone_and_a_heartbeat_brings_it_back(
    hub: RunningHub,
) -> None:
    node = await hub.online_node()
    backbone = await hub.machine(Role.BACKBONE)
    seen = []
    for further_seconds in (31, 70):
        hub.clock.offset += further_seconds
        seen.append((await backbone.client.node(node.node_id)).presence)
    await node.client.heartbeat(Heartbeat(sequence=1))
    seen.append((await backbone.client.node(node.node_id)).presence)
    assert seen == [Presence.STALE, Presence.GONE, Presence.ONLINE]


async def test_a_node_that_leaves_is_gone_at_once_and_a_heartbeat_brings_it_back(
    hub: RunningHub,
) -> None:
    node, other = await hub.online_node(), await hub.online_node("cellar")
    backbone = await hub.machine(Role.BACKBONE)
    await node.client.leave()
    listed = {one.node_id: one for one in (await backbone.client.nodes()).nodes}
    assert (listed[node.node_id].presence, listed[node.node_id].has_left) == (Presence.GONE, True)
    assert (listed[other.node_id].presence, listed[other.node_id].has_left) == (
        Presence.ONLINE,
        False,
    )
    with pytest.raises(HubRefusedError, match="attic was stopped"):
        await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))
    await node.client.heartbeat(Heartbeat(sequence=0, state=node_state(node)))
    back = await backbone.client.node(node.node_id)
    assert (back.presence, back.has_left) == (Presence.ONLINE, False)
    assert await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))


async def test_a_heartbeat_takes_a_leave_back_though_the_hubs_clock_was_set_back(
    hub: RunningHub,
) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    await node.client.leave()
    hub.clock.offset = -600
    beat = await hub.http.post("/v1/heartbeat", headers=node.headers, json={"sequence": 1})
    seen = await hub.http.get(f"/v1/nodes/{node.node_id}", headers=backbone.headers)
    asked = {"node_id": node.node_id}
    edge = await hub.http.post("/v1/edges", headers=backbone.headers, json=asked)
    assert (beat.status_code, edge.status_code) == (200, 201)
    assert (seen.json()["presence"], seen.json()["has_left"]) == ("online", False)


async def test_of_what_is_written_at_once_of_a_node_the_last_counts(hub: RunningHub) -> None:
    node, backbone = await hub.online_node(), await hub.machine(Role.BACKBONE)
    state = node_state(node).model_dump_json()
    plain, whole = (HeartbeatRow(node.node_id, 5.0, told) for told in (None, state))
    leave = LeaveRow(node.node_id, 5.0)
    seen = []
    orders: list[list[HeartbeatRow | LeaveRow]] = [
        [plain, leave],
        [leave, whole, plain],
        [whole, leave, leave],
        [leave, plain],
    ]
    for rows in orders:
        async with asyncio.timeout(20):
            await asyncio.gather(*map(hub.hub.writer.heartbeat, rows))
        seen.append((await backbone.client.node(node.node_id)).has_left)
    assert seen == [True, False, True, False]
    assert (await backbone.client.node(node.node_id)).state is not None


async def test_a_machine_that_joins_again_while_its_heartbeat_is_written_is_online(
    hub: RunningHub,
) -> None:
    node = await hub.online_node()
    backbone = await hub.machine(Role.BACKBONE)
    hub.clock.offset = 200
    token = await hub.join_token()
    again = hub.join_body(token, node_id=node.node_id, keys=node.keys, name=node.name)
    beat = Heartbeat(sequence=1)
    registrar = hub.hub.registrar
    await asyncio.gather(registrar.heartbeat(node.node_id, beat), registrar.join(again))
    assert (await backbone.client.node(node.node_id)).presence is Presence.ONLINE
    assert await backbone.client.create_edge(EdgeRequest(node_id=node.node_id))


@pytest.mark.parametrize("role", [Role.BACKBONE, Role.ADMIN, Role.GATEWAY])
async def test_nobody_but_a_node_leaves(hub: RunningHub, role: Role) -> None:
    machine = await hub.machine(role)
    with pytest.raises(HubRefusedError) as refused:
        await machine.client.leave()
    assert refused.value.code == "other_role"


async def test_the_hub_asks_for_the_state_until_it_has_it_and_keeps_it(hub: RunningHub) -> None:
    node = await hub.machine(Role.NODE)
    assert (await node.client.heartbeat(Heartbeat(sequence=0))).wants_state
    state = node_state(node)
    assert not (await node.client.heartbeat(Heartbeat(sequence=1, state=state))).wants_state
    assert not (await node.client.heartbeat(Heartbeat(sequence=2))).wants_state
    backbone = await hub.machine(Role.BACKBONE)
    assert (await backbone.client.node(node.node_id)).state == state


async def test_edges_that_the_hub_does_not_know_are_to_be_closed(hub: RunningHub) -> None:
    node = await hub.online_node()
    answer = await node.client.heartbeat(Heartbeat(sequence=1, edges=("0" * 32,)))
    assert answer.close_edges == ("0" * 32,)


async def test_a_node_cannot_tell_of_another_machine(hub: RunningHub) -> None:
    node, other = await hub.online_node(), await hub.online_node("cellar")
    with pytest.raises(HubRefusedError, match="only of itself"):
        await node.client.heartbeat(Heartbeat(sequence=1, state=node_state(other)))
