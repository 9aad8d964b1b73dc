"""From what was found at each address to the nodes that there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.cluster.candidates import Candidate, Finding, Probe
from linkcpp.cluster.findings import compare_engines, describe_nodes
from linkcpp.cluster.records import (
    DiscoveredNode,
    Health,
    LinkSpeed,
    NodeId,
    NodeRecord,
    NodeStatus,
)
from linkcpp.engine.records import EngineProblem
from tests.cluster.peers import COORDINATOR, fingerprint, node_record


def advert(host: str, node_id: str | None = "id-a", instance: str = "attic id-a") -> Candidate:
    return Candidate(
        url=f"http://{host}:8716",
        found_by="mdns",
        instance=instance,
        node_id=NodeId(node_id) if node_id else None,
        name="attic",
    )


def named(host: str) -> Candidate:
    return Candidate(url=f"http://{host}:8716", found_by="--node")


def answered(candidate: Candidate, record: NodeRecord, rtt_ms: float = 1.0) -> Probe:
    return Probe(
        candidate=candidate,
        finding=Finding.NODE,
        health=Health(agent_version="0", node_id=record.node_id, name=record.name),
        record=record,
        link=LinkSpeed(rtt_ms=rtt_ms, bytes_per_second=None),
    )


def failed(candidate: Candidate, finding: Finding, says: str | None = None) -> Probe:
    health = Health(agent_version="0", node_id=NodeId("id-?"), name=says) if says else None
    return Probe(candidate=candidate, finding=finding, detail="because", health=health)


def nodes(*probes: Probe) -> tuple[DiscoveredNode, ...]:
    return describe_nodes(probes, COORDINATOR)


def only(*probes: Probe) -> DiscoveredNode:
    found = nodes(*probes)
    assert len(found) == 1, found
    return found[0]


def test_several_addresses_of_one_node_are_one_entry_with_the_nearest_first() -> None:
    record = node_record()
    node = only(
        answered(advert("10.0.0.5"), record, 3.0),
        answered(advert("10.9.0.5"), record, 1.0),
        answered(named("10.0.0.5"), record, 3.0),
    )
    assert node.urls == ("http://10.9.0.5:8716", "http://10.0.0.5:8716")
    assert node.found_by == "--node, mdns"
    assert node.status is NodeStatus.READY
    assert node.reason is None


def test_of_addresses_equally_near_the_plainest_goes_first() -> None:
    record = node_record()
    node = only(
        answered(advert("[fe80::1%eth0]"), record, 0.3),
        answered(advert("[fd00::1]"), record, 0.4),
        answered(advert("10.0.0.5"), record, 0.9),
        answered(advert("10.9.0.5"), record, 40.0),
    )
    hosts = [url.removeprefix("http://").removesuffix(":8716") for url in node.urls]
    assert hosts == ["10.0.0.5", "[fd00::1]", "10.9.0.5", "[fe80::1%eth0]"]


@pytest.mark.parametrize("rtts_ms", [(9.0, 0.3, 1.1), (0.3, 9.0, 0.9), (1.1, 1.2, 9.0)])
def test_an_address_that_answered_late_once_does_not_make_the_order_another(
    rtts_ms: tuple[float, float, float],
) -> None:
    hosts = ("192.168.1.20", "[fe80::1%eth0]", "[fe80::1%wlan0]")
    pairs = zip(hosts, rtts_ms, strict=True)
    node = only(*(answered(advert(host), node_record(), rtt) for host, rtt in pairs))
    assert node.urls[0] == "http://192.168.1.20:8716"


def test_a_private_address_that_leads_back_to_this_machine_is_not_shown_as_the_other_node() -> None:
    # Both machines run Docker: 172.17.0.1, told by the other, is here this machine itself.
    own, other = answered(advert("172.17.0.1"), COORDINATOR), node_record()
    found = nodes(own, answered(advert("10.0.0.5"), other))
    assert [(node.name, node.is_this_machine) for node in found] == [
        ("desk", True),
        ("attic", False),
    ]
    assert found[1].urls == ("http://10.0.0.5:8716",)


def test_a_node_with_no_other_address_than_one_that_leads_elsewhere_is_stale() -> None:
    found = nodes(answered(advert("172.17.0.1"), COORDINATOR))
    stale = [node for node in found if not node.is_this_machine]
    assert [node.status for node in stale] == [NodeStatus.STALE]
    assert stale[0].reason is not None
    assert "this machine (desk)" in stale[0].reason


def test_an_advertised_address_that_does_not_answer_is_stale_and_a_named_one_unreachable() -> None:
    assert only(failed(advert("10.0.0.5"), Finding.NO_ANSWER)).status is NodeStatus.STALE
    assert only(failed(named("10.0.0.5"), Finding.NO_ANSWER)).status is NodeStatus.UNREACHABLE


def test_addresses_that_lead_nowhere_do_not_spoil_a_node_that_is_found() -> None:
    node = only(
        failed(advert("172.17.0.1"), Finding.NO_ANSWER),
        failed(advert("192.168.122.1"), Finding.NOT_A_NODE),
        answered(advert("10.0.0.5"), node_record()),
    )
    assert node.urls == ("http://10.0.0.5:8716",)


def test_who_claims_to_be_a_known_node_without_the_token_stays_in_sight() -> None:
    rogue = advert("10.0.0.66", instance="attic evil")
    found = nodes(
        failed(rogue, Finding.WRONG_TOKEN, says="attic"),
        answered(advert("10.0.0.5"), node_record()),
    )
    assert [node.status for node in found] == [NodeStatus.READY, NodeStatus.WRONG_TOKEN]
    assert found[1].urls == ("http://10.0.0.66:8716",)
    assert found[0].urls == ("http://10.0.0.5:8716",)


def test_an_address_named_and_advertised_that_fails_is_one_entry() -> None:
    node = only(
        failed(advert("10.0.0.5"), Finding.WRONG_TOKEN, says="attic"),
        failed(named("10.0.0.5"), Finding.WRONG_TOKEN, says="attic"),
    )
    assert node.found_by == "--node, mdns"


def test_two_machines_with_one_name_are_told_apart_by_id() -> None:
    found = nodes(
        answered(named("10.0.0.5"), node_record("aaaa-1", "pi")),
        answered(named("10.0.0.6"), node_record("bbbb-2", "pi")),
    )
    assert [node.name for node in found] == ["pi (aaaa)", "pi (bbbb)"]


def test_two_machines_with_one_id_are_told_and_not_used() -> None:
    node = only(
        answered(named("10.0.0.5"), node_record("same", "pi")),
        answered(named("10.0.0.6"), node_record("same", "attic")),
    )
    assert node.status is NodeStatus.DUPLICATE_ID
    assert node.reason is not None
    assert "attic and pi have one node id" in node.reason


def test_another_engine_is_told_with_both_versions() -> None:
    node = only(answered(named("h"), node_record(engine=fingerprint("7.0.0"))))
    assert node.status is NodeStatus.OTHER_ENGINE
    assert node.reason is not None
    assert "RPC 7.0.0" in node.reason
    assert "RPC 4.0.3" in node.reason


def test_a_node_whose_engine_does_not_run_tells_why() -> None:
    problem = EngineProblem(code="sigill", message="It dies of SIGILL.", hint="Install another.")
    broken = only(answered(named("h"), node_record(engine=None, engine_problem=problem)))
    assert broken.status is NodeStatus.ENGINE_PROBLEM
    assert broken.reason == "It dies of SIGILL. Install another."
    without = only(answered(named("h"), node_record(engine=None)))
    assert without.status is NodeStatus.ENGINE_PROBLEM


def test_engines_are_compatible_as_the_client_and_the_operation_numbers_ask() -> None:
    mine = fingerprint("4.1.3")
    assert compare_engines(mine, fingerprint("4.1.3", build=9)) is None
    assert compare_engines(mine, fingerprint("4.0.3")) is None
    for other in ("4.2.3", "3.1.3", "4.1.2", "4.1.4"):
        assert compare_engines(mine, fingerprint(other)) is not None
    assert compare_engines(mine, None) is not None
    assert compare_engines(None, fingerprint("7.0.0")) is None


ids = st.sampled_from(["id-a", "id-b", COORDINATOR.node_id])
hosts = st.sampled_from(["10.0.0.1", "10.0.0.2", "172.17.0.1", "fe80::1%x"])
candidates = st.one_of(
    hosts.map(named),
    st.builds(advert, hosts, st.none() | ids, st.sampled_from(["one", "two"])),
)
probes = st.one_of(
    st.builds(answered, candidates, ids.map(lambda node_id: node_record(node_id, node_id))),
    st.builds(
        failed,
        candidates,
        st.sampled_from([finding for finding in Finding if finding is not Finding.NODE]),
        st.none() | st.just("attic"),
    ),
)


@given(st.lists(probes, max_size=12))
def test_every_answer_gives_the_node_that_answered_and_nothing_else_is_ready(
    found: list[Probe],
) -> None:
    described = nodes(*found)
    proven = {probe.record.node_id: [] for probe in found if probe.record}  # type: ignore[var-annotated]
    for probe in found:
        if probe.record:
            proven[probe.record.node_id].append(probe.candidate.url)
    usable = [node for node in described if node.record is not None]
    assert {node.record.node_id: set(node.urls) for node in usable if node.record} == {
        node_id: set(urls) for node_id, urls in proven.items()
    }
    assert len(usable) == len(proven)
    assert all(node.reason for node in described if node.status is not NodeStatus.READY)
    assert all(node.record for node in described if node.status is NodeStatus.READY)
    assert [node.is_this_machine for node in described].count(True) <= 1
