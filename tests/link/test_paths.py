"""Which path an edge takes, and how it gets from one to another without losing a byte."""

import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.common.errors import LinkcppError
from linkcpp.link.choosing import Path, PathKind, RoundTrips, choose
from linkcpp.link.offers import LinkEndedError
from linkcpp.link.status import ConnectionState
from linkcpp.link.supply import OfferSupply
from tests.link.agent import direct_route
from tests.link.edges import (
    QUICK,
    TARGET,
    End,
    HubOfTest,
    edge,
    gateways,
    node_beyond,
    running_node,
)
from tests.link.programs import pump, until
from tests.support.slow_relay import SlowRelay, slow_relay

DIRECT = Path(PathKind.DIRECT)
RELAY = Path(PathKind.RELAY, "g1")
OTHER_RELAY = Path(PathKind.RELAY, "g2")
MEBIBYTE = 2**20


@given(st.sampled_from([DIRECT, RELAY, OTHER_RELAY]), st.floats(0.01, 2000), st.floats(0.01, 2000))
def test_paths_that_do_not_change_are_changed_at_max_once(
    start: Path, direct_ms: float, relay_ms: float
) -> None:
    times = {DIRECT: direct_ms, RELAY: relay_ms, OTHER_RELAY: relay_ms}
    path, changes = start, 0
    for other in (DIRECT, RELAY, OTHER_RELAY) * 5:
        if other != path and choose(path, times[path], other, times[other]).changes:
            path, changes = other, changes + 1
    assert changes <= 1


@pytest.mark.parametrize(
    ("current", "current_ms", "other", "other_ms", "changes"),
    [
        (RELAY, 20.0, DIRECT, 1.0, True),
        (RELAY, 20.0, DIRECT, 22.0, True),
        (RELAY, 20.0, DIRECT, 40.0, False),
        (DIRECT, 20.0, RELAY, 18.0, False),
        (DIRECT, 200.0, RELAY, 30.0, True),
        (DIRECT, 3.0, RELAY, 0.5, False),
        (RELAY, 40.0, OTHER_RELAY, 36.0, False),
        (RELAY, 40.0, OTHER_RELAY, 10.0, True),
    ],
)
def test_the_choice_and_its_reason(
    current: Path, current_ms: float, other: Path, other_ms: float, changes: bool
) -> None:
    choice = choose(current, current_ms, other, other_ms)
    assert choice.changes is changes
    assert f"{current_ms:.1f} ms" in choice.why
    assert f"{other_ms:.1f} ms" in choice.why
    assert choice.why.startswith(str(other if changes else current))


def test_a_path_is_slow_when_the_last_round_trips_are_all_long() -> None:
    trips = RoundTrips(10.0)
    for rtt_ms in (100.0, 100.0):
        trips.add(rtt_ms)
    assert not trips.is_slow  # the first one is still among the last
    trips.add(100.0)
    assert trips.is_slow
    trips.add(11.0)
    assert not trips.is_slow


async def test_a_direct_path_is_taken_where_it_answers() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, direct_route(node.acceptor) as port:
        hub.direct_urls = (f"ws://127.0.0.1:{port}",)
        async with edge(hub) as end:
            status = end.status()
            assert (status.path, status.gateway_id) == (PathKind.DIRECT, None)
            assert status.why is not None
            assert status.why.startswith("direct: it answered first")
            data = os.urandom(3 * MEBIBYTE)
            assert await pump(end.port, data) == data
            assert node.acceptor.status()[0].path == "direct"
            await until(lambda: end.status().rtt_ms is not None)
    assert hub.is_closed


async def test_the_relay_is_taken_where_no_address_answers() -> None:
    hub = HubOfTest(direct_urls=("ws://127.0.0.1:9", "ws://192.0.2.1:8716"))
    async with running_node(hub) as node, edge(hub) as end:
        (gateway,) = node.gateways
        status = end.status()
        assert (status.path, status.gateway_id) == (PathKind.RELAY, gateway.gateway_id)
        assert await pump(end.port, b"over the relay") == b"over the relay"


async def test_a_direct_path_that_comes_up_later_is_changed_to_in_a_transfer() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, direct_route(node.acceptor) as port, edge(hub) as end:
        assert end.status().path is PathKind.RELAY
        transfer = asyncio.create_task(pump(end.port, data := os.urandom(20 * MEBIBYTE)))
        # The next offer names the address; the last one is used until its ticket ends.
        hub.direct_urls = (f"ws://127.0.0.1:{port}",)
        supply = end.link._supply
        assert isinstance(supply, OfferSupply)
        supply._offer = None
        await until(lambda: end.status().path is PathKind.DIRECT)
        assert await transfer == data
        status = end.status()
        assert (status.change_count, status.reconnect_count) == (1, 0)
        assert status.why is not None
        assert "ms against" in status.why
        assert node.echo.connection_count == 1


@pytest.mark.slow
async def test_a_direct_path_that_gets_slow_is_left_for_the_relay() -> None:
    hub = HubOfTest()
    async with (
        running_node(hub) as node,
        direct_route(node.acceptor) as port,
        slow_relay(port) as network,
    ):
        hub.direct_urls = (f"ws://127.0.0.1:{network.port}",)
        async with edge(hub) as end:
            await until(lambda: end.status().rtt_ms is not None)
            assert end.status().path is PathKind.DIRECT
            network.rtt_seconds = 0.2
            await until(lambda: end.status().path is PathKind.RELAY)
            assert end.status().reconnect_count == 0
            assert await pump(end.port, b"faster again") == b"faster again"
            # And it does not go back to what is still slow.
            seen = network.connection_count
            await until(lambda: network.connection_count >= seen + 2)
            assert end.status().change_count == 1


async def test_a_direct_path_that_is_cut_is_replaced_by_the_relay() -> None:
    hub = HubOfTest()
    async with (
        running_node(hub) as node,
        direct_route(node.acceptor) as port,
        slow_relay(port) as network,
    ):
        hub.direct_urls = (f"ws://127.0.0.1:{network.port}",)
        async with edge(hub) as end:
            data = os.urandom(12 * MEBIBYTE)
            transfer = asyncio.create_task(pump(end.port, data))
            await until(lambda: node.echo.received_bytes > MEBIBYTE)
            network.refuses = True
            network.cut()
            assert await transfer == data
            status = end.status()
            assert (status.path, status.reconnect_count) == (PathKind.RELAY, 1)
            assert status.problem is None


@pytest.mark.slow
async def test_a_network_that_falls_silent_is_noticed_and_got_over() -> None:
    hub = HubOfTest()
    async with (
        node_beyond(hub, rtt_seconds=0.02, loss=0.02) as (network, node),
        edge(hub) as end,
    ):
        data = os.urandom(4 * MEBIBYTE)
        transfer = asyncio.create_task(pump(end.port, data))
        await until(lambda: node.echo.received_bytes > MEBIBYTE)
        network.is_silent = True
        await until(lambda: end.status().state is ConnectionState.RECONNECTING)
        problem = end.status().problem
        assert problem is not None
        assert "nothing came for 1 seconds" in problem
        await asyncio.sleep(2 * QUICK.dead)
        network.cut()
        network.is_silent = False
        assert await transfer == data
        assert node.echo.connection_count == 1


async def cut_again_and_again(network: SlowRelay, end: End, count: int) -> None:
    for number in range(count):
        await until(lambda: end.status().state is ConnectionState.UP)
        assert await pump(end.port, b"between two cuts") == b"between two cuts"
        network.cut()
        await until(lambda: end.status().reconnect_count > number)  # noqa: B023


async def test_a_network_that_is_cut_again_and_again_does_not_make_the_node_wait() -> None:
    """What fails makes it pause ever longer, up to an hour here; what worked does not."""
    hub = HubOfTest()
    times = QUICK._replace(longest_pause=3600.0)
    async with node_beyond(hub, rtt_seconds=0.0, times=times) as (network, _), edge(hub) as end:
        hub.tells_node = False
        await cut_again_and_again(network, end, 15)


async def test_a_coordinator_that_asks_for_a_way_ends_the_pause_of_the_node() -> None:
    hub = HubOfTest()
    times = QUICK._replace(first_pause=3600.0)
    async with node_beyond(hub, rtt_seconds=0.0, times=times) as (network, _), edge(hub) as end:
        await cut_again_and_again(network, end, 3)


async def test_a_small_message_is_not_held_up_by_bulk() -> None:
    """On a slow network a bulk transfer fills every queue; a small message goes past it."""
    hub = HubOfTest()
    async with node_beyond(hub, rtt_seconds=0.02) as (_, node), edge(hub) as end:
        bulk = asyncio.create_task(pump(end.port, bytes(40 * MEBIBYTE)))
        await until(lambda: node.echo.received_bytes > MEBIBYTE)
        for _ in range(5):
            before = node.echo.received_bytes
            assert await pump(end.port, b"one row") == b"one row"
            # The window of one stream and what the network holds, not all of the bulk.
            assert node.echo.received_bytes - before < 16 * MEBIBYTE
        assert not bulk.done()
        bulk.cancel()
        await asyncio.gather(bulk, return_exceptions=True)


async def test_another_gateway_is_asked_for_when_one_has_failed() -> None:
    hub = HubOfTest()
    async with running_node(hub, gateway_count=2) as node, edge(hub) as end:
        first = end.status().gateway_id
        lost = next(one for one in node.gateways if one.gateway_id == first)
        await lost.stop()
        await until(lambda: end.status().state is ConnectionState.UP and hub.asked[-1])
        assert hub.asked[-1] == (first,)
        assert end.status().gateway_id not in (None, first)
        assert await pump(end.port, b"by the other") == b"by the other"


async def test_a_hub_that_is_away_does_not_keep_two_machines_apart() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        (gateway,) = node.gateways
        hub.problem = LinkcppError("The hub does not answer.")
        await gateway.stop()
        await until(lambda: end.status().state is ConnectionState.RECONNECTING)
        await gateway.start()
        await until(lambda: end.status().state is ConnectionState.UP)
        assert await pump(end.port, b"with the old offer") == b"with the old offer"


async def test_an_edge_that_is_not_wanted_any_more_fails_for_good() -> None:
    hub = HubOfTest()
    async with running_node(hub) as node, edge(hub) as end:
        (gateway,) = node.gateways
        hub.revoke()
        assert gateway.relay is not None
        gateway.relay.close_edges([hub.edge_id])
        error = await end.link.wait_failed()
        assert error.message == "The hub does not know this machine any more."
        assert end.status().state is ConnectionState.FAILED
        assert end.status().problem == error.message
        with pytest.raises(OSError):
            await pump(end.port, b"nothing")
        with pytest.raises(ConnectionError, match="does not know this machine"):
            end.link.connect(TARGET)


async def test_a_node_that_never_comes_is_told_in_words() -> None:
    hub = HubOfTest()
    async with gateways(hub):
        with pytest.raises(LinkcppError, match=r"was not reached in 0\.5 seconds"):
            async with edge(hub, timeout_seconds=0.5):
                pass
        hub.problem = LinkEndedError("There is no such node.")
        with pytest.raises(LinkEndedError, match="no such node"):
            async with edge(hub):
                pass
