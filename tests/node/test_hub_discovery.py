"""The nodes of a hub, as discovery describes nodes."""

from typing import Any

import pytest

from linkcpp.cli.discover import Where, render
from linkcpp.cluster.records import DiscoveredNode, LinkSpeed, NodeId, NodeRecord, NodeStatus
from linkcpp.node.discovery import Discovery
from linkcpp.node.hub_discovery import describe_registered, with_hub_nodes
from linkcpp.registry.hub_location import hub_node_url, parse_hub_node_url
from linkcpp.registry.records import NodeList, NodeState, Presence, RegisteredNode, Role
from linkcpp.registry.relay_rtt import health_url
from tests.cluster.peers import COORDINATOR, fingerprint, node_record

HUB = "https://hub.example"
ATTIC = "00000000-0000-4000-8000-00000000000a"
CELLAR = "00000000-0000-4000-8000-00000000000b"
NEAR_GATEWAY = "00000000-0000-4000-8000-0000000000f1"
FAR_GATEWAY = "00000000-0000-4000-8000-0000000000f2"


def registered(
    node_id: str = ATTIC, record: NodeRecord | None = None, **changes: Any
) -> RegisteredNode:
    rtts_ms = changes.pop("relay_rtts_ms", {})
    state = NodeState(record=record or node_record(node_id), relay_rtts_ms=rtts_ms)
    values: dict[str, Any] = {
        "node_id": NodeId(node_id),
        "name": "attic",
        "role": Role.NODE,
        "edge_key": "A" * 43,
        "key_fingerprint": "0000",
        "joined_at": 1.0,
        "is_revoked": False,
        "presence": Presence.ONLINE,
        "last_seen": 990.0,
        "state": state,
    }
    return RegisteredNode(**(values | changes))


def described(*nodes: RegisteredNode, **rtts_ms: float) -> tuple[DiscoveredNode, ...]:
    listed = NodeList(nodes=nodes, hub_time=1000.0)
    return describe_registered(listed, COORDINATOR, hub_url=HUB, rtts_ms=rtts_ms)


def test_a_node_of_a_hub_is_ready_and_reached_through_the_hub() -> None:
    (node,) = described(registered())
    assert node.status is NodeStatus.READY
    assert node.urls == (f"hub+{HUB}#{ATTIC}",)
    assert parse_hub_node_url(node.urls[0]) == (HUB, ATTIC)
    assert node.link is None


def test_the_way_over_a_gateway_is_the_sum_of_both_ways_and_the_min_counts() -> None:
    node = registered(relay_rtts_ms={NEAR_GATEWAY: 30.0, FAR_GATEWAY: 4.0})
    listed = NodeList(nodes=(node,), hub_time=1000.0)
    rtts_ms = {NEAR_GATEWAY: 5.0, FAR_GATEWAY: 100.0}
    (found,) = describe_registered(listed, COORDINATOR, hub_url=HUB, rtts_ms=rtts_ms)
    assert found.link == LinkSpeed(rtt_ms=35.0, bytes_per_second=None)


@pytest.mark.parametrize(
    "changes", [{"presence": Presence.GONE}, {"is_revoked": True}, {"role": Role.BACKBONE}]
)
def test_who_is_gone_revoked_or_no_node_is_not_listed(changes: dict[str, Any]) -> None:
    assert described(registered(**changes)) == ()


def test_a_node_that_missed_heartbeats_is_stale_and_it_says_for_how_long() -> None:
    (node,) = described(registered(presence=Presence.STALE, last_seen=955.0))
    assert node.status is NodeStatus.STALE
    assert node.reason == "the hub has not heard of it for 45 seconds"


def test_a_node_with_another_build_is_told_with_both_versions() -> None:
    (node,) = described(registered(record=node_record(ATTIC, engine=fingerprint("7.0.0"))))
    assert node.status is NodeStatus.OTHER_ENGINE
    assert "RPC 7.0.0" in (node.reason or "")
    assert "RPC 4.0.3" in (node.reason or "")


def test_a_node_that_tells_of_another_machine_is_none() -> None:
    (node,) = described(registered(record=node_record(CELLAR)))
    assert node.status is NodeStatus.NOT_A_NODE
    assert node.record is None


def test_names_of_other_machines_cannot_write_on_a_terminal() -> None:
    (node,) = described(registered(name="\x1b[31mred"))
    assert node.name.isprintable()


def test_a_node_around_that_is_also_at_a_hub_is_one_node_with_its_near_address_first() -> None:
    near = DiscoveredNode(
        name="attic",
        urls=("http://10.0.0.5:8716",),
        found_by="mdns",
        status=NodeStatus.READY,
        reason=None,
        record=node_record(ATTIC),
        link=LinkSpeed(rtt_ms=0.3, bytes_per_second=1e8),
    )
    around = Discovery(coordinator=COORDINATOR, nodes=(near,), notes=())
    found = with_hub_nodes(around, described(registered(), registered(CELLAR)))
    one, other = found.nodes
    assert one.urls == ("http://10.0.0.5:8716", hub_node_url(HUB, NodeId(ATTIC)))
    assert one.link == near.link
    assert one.found_by == "mdns, hub"
    assert other.urls == (hub_node_url(HUB, NodeId(CELLAR)),)


@pytest.mark.parametrize(
    ("relay", "health"),
    [
        ("wss://gw.example/v1/relay", "https://gw.example/v1/health"),
        ("ws://127.0.0.1:9000/v1/relay", "http://127.0.0.1:9000/v1/health"),
    ],
)
def test_a_gateway_is_measured_where_it_relays(relay: str, health: str) -> None:
    assert health_url(relay) == health


def test_a_hub_that_is_away_is_the_reason_that_is_told() -> None:
    found = Discovery(coordinator=COORDINATOR, nodes=(), notes=("The hub cannot be reached.",))
    parts = [str(part) for part in render(found, where=Where.HUB)]
    assert parts == ["The hub cannot be reached."]


def test_a_stranger_of_ones_own_gets_this_machines_token_by_a_command() -> None:
    (node,) = described(registered())
    stranger = node.model_copy(update={"status": NodeStatus.WRONG_TOKEN})
    found = Discovery(coordinator=COORDINATOR, nodes=(stranger,), notes=())
    assert "token set --replace" in str(render(found)[-1])


def test_an_empty_hub_says_how_machines_come_in() -> None:
    found = Discovery(coordinator=COORDINATOR, nodes=(), notes=())
    (told,) = (str(part) for part in render(found, where=Where.HUB))
    assert "linkcpp join HUB" in told
