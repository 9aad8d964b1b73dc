"""A hub whose clock is wrong, and then set: machines go on by themselves."""

import asyncio
import logging
import time

import pytest

from linkcpp.hub.clock_steps import seen_since
from linkcpp.registry.edges import EdgeRequest
from linkcpp.registry.records import Heartbeat, Role
from linkcpp.registry.tickets import verify_edge_ticket
from tests.hub.hubs import RunningHub, node_state

HOUR = 3600.0


@pytest.mark.parametrize("error", [HOUR, -HOUR])
async def test_a_machine_that_joined_while_the_clock_was_wrong_goes_on_when_it_is_mended(
    hub: RunningHub, error: float
) -> None:
    hub.clock.error = error
    node = await hub.machine(Role.NODE)
    hub.clock.error = 0.0
    await node.client.heartbeat(Heartbeat(sequence=0, state=node_state(node)))


async def test_all_machines_renew_their_tokens_at_once_when_the_clock_was_set_back_two_hours(
    hub: RunningHub,
) -> None:
    nodes = [await hub.machine(Role.NODE, name=f"n{number}") for number in range(3)]
    for node in nodes:
        await node.client.token()
    hub.clock.offset += 1200.0  # their tokens have ended
    hub.clock.error = -2 * HOUR
    for node in nodes:
        node.client._token = None
        await node.client.heartbeat(Heartbeat(sequence=0, state=node_state(node)))


async def test_a_clock_that_is_set_while_a_proof_is_on_its_way_costs_another_try_only(
    hub: RunningHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await hub.machine(Role.NODE)
    asked = hub.hub.registrar.told_time

    def set_after_the_first() -> float:
        told = asked()
        hub.clock.error = -2 * HOUR
        return told

    monkeypatch.setattr(hub.hub.registrar, "told_time", set_after_the_first)
    await node.client.heartbeat(Heartbeat(sequence=0, state=node_state(node)))


async def test_who_was_revoked_comes_back_by_a_later_token_only_wherever_the_clock_went(
    hub: RunningHub,
) -> None:
    node = await hub.machine(Role.NODE)
    hub.clock.error = HOUR
    before = await hub.join_token()
    hub.clock.error = -HOUR
    await hub.hub.revoke(node.node_id)
    hub.clock.error = -2 * HOUR
    after = await hub.join_token()
    for token, status in ((before, 403), (after, 200)):
        body = hub.join_body(token, node_id=node.node_id, keys=node.keys)
        assert (await hub.join(body)).status_code == status


@pytest.mark.parametrize("error", [HOUR, -HOUR])
async def test_a_clock_that_is_set_ends_no_edge_and_keeps_no_dead_gateway(
    hub: RunningHub,
    error: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING)
    is_followed = asyncio.Event()
    node, gateway = await hub.online_node(), await hub.online_gateway()
    coordinator = await hub.machine(Role.BACKBONE, name="desk")
    edge = await coordinator.client.create_edge(EdgeRequest(node_id=node.node_id))
    directory = hub.hub.directory
    follow = directory.follow_clock

    def follow_and_tell(step: float, now: float) -> None:
        follow(step, now)
        is_followed.set()

    monkeypatch.setattr(directory, "follow_clock", follow_and_tell)
    hub.clock.error = error
    await is_followed.wait()
    assert "the hub's clock was set" in caplog.text
    assert directory.is_online(gateway.node_id, hub.clock())
    assert edge.edge_id in directory.edges
    assert 0 <= hub.clock() - directory.edges[edge.edge_id].last_seen < HOUR / 2
    hub.clock.offset += 60.0
    assert not directory.is_online(gateway.node_id, hub.clock())


@pytest.mark.parametrize("error", [HOUR, -HOUR])
async def test_a_machine_whose_own_clock_is_wrong_takes_the_tickets_of_its_hub(
    hub: RunningHub, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, coordinator = await hub.online_node(), await hub.machine(Role.BACKBONE, name="desk")
    offer = await coordinator.client.create_edge(EdgeRequest(node_id=node.node_id))
    own = time.time() + error
    monkeypatch.setattr("linkcpp.registry.connection.time", lambda: own)
    now = node.client.ticket_time()
    assert verify_edge_ticket(hub.hub.identity.verifier, offer.ticket, now=now)


def test_what_was_seen_since_the_clock_was_set_is_left_as_it_is() -> None:
    assert seen_since(100.0, 3600.0, 3701.0) == 3700.0
    assert seen_since(3700.5, 3600.0, 3701.0) == 3701.0
    assert seen_since(9000.0, -3600.0, 5401.0) == 5400.0
    assert seen_since(5400.5, -3600.0, 5401.0) == 5400.5
