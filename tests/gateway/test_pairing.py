"""Who meets whom, and who is told what when somebody leaves."""

from hypothesis import given
from hypothesis import strategies as st

from linkcpp.gateway.liveness import Liveness
from linkcpp.gateway.pairing import Ended, Paired, PairingTable, Seat
from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.relay import RelayCloseCode

BACKBONE, NODE = EdgeRole.BACKBONE, EdgeRole.NODE
EDGE = "ab" * 16


def test_two_sides_of_an_edge_meet() -> None:
    table = PairingTable()
    first, events = table.attach(EDGE, BACKBONE)
    assert events == []
    second, events = table.attach(EDGE, NODE)
    assert events == [Paired(second, first)]
    assert table.pair_count == 1


def test_sides_of_different_edges_do_not_meet() -> None:
    table = PairingTable()
    table.attach(EDGE, BACKBONE)
    _, events = table.attach("cd" * 16, NODE)
    assert events == []


def test_a_newer_connection_replaces_one_that_waits() -> None:
    table = PairingTable()
    old, _ = table.attach(EDGE, NODE)
    new, events = table.attach(EDGE, NODE)
    assert [(event.seat, event.code) for event in events if isinstance(event, Ended)] == [
        (old, RelayCloseCode.REPLACED)
    ]
    _, events = table.attach(EDGE, BACKBONE)
    assert any(isinstance(event, Paired) and event.older == new for event in events)


def test_a_newer_connection_ends_the_pair_of_the_older_one() -> None:
    table = PairingTable()
    backbone, _ = table.attach(EDGE, BACKBONE)
    node, _ = table.attach(EDGE, NODE)
    _, events = table.attach(EDGE, NODE)
    assert [(event.seat, event.code) for event in events if isinstance(event, Ended)] == [
        (node, RelayCloseCode.REPLACED),
        (backbone, RelayCloseCode.PEER_GONE),
    ]
    assert table.pair_count == 0


def test_the_late_end_of_a_replaced_connection_changes_nothing() -> None:
    table = PairingTable()
    old, _ = table.attach(EDGE, NODE)
    table.attach(EDGE, NODE)
    table.attach(EDGE, BACKBONE)
    assert table.detach(old, 1000, "late") == []
    assert table.pair_count == 1


def test_an_edge_that_is_closed_is_forgotten() -> None:
    table = PairingTable()
    seats = {table.attach(EDGE, role)[0] for role in EdgeRole}
    ended = table.close(EDGE, RelayCloseCode.REVOKED, "why")
    assert {event.seat for event in ended} == seats
    assert EDGE not in table
    assert table.edge_ids == ()


@given(
    st.lists(
        st.tuples(st.sampled_from(["attach", "detach", "close"]), st.integers(0, 3), st.booleans()),
        max_size=60,
    )
)
def test_whatever_happens_pairs_are_of_one_edge_and_every_end_is_told_once(
    steps: list[tuple[str, int, bool]],
) -> None:
    table, live, seen = PairingTable(), set[Seat](), list[Seat]()
    for what, number, is_node in steps:
        edge_id = f"{number:032x}"
        if what == "attach":
            seat, events = table.attach(edge_id, NODE if is_node else BACKBONE)
            seen.append(seat)
            live.add(seat)
        elif what == "detach" and seen:
            seat = seen[number % len(seen)]
            events = list(table.detach(seat, 1000, ""))
            live.discard(seat)
        else:
            events = list(table.close(edge_id, 1000, ""))
        for event in events:
            if isinstance(event, Ended):
                live.remove(event.seat)
            else:
                assert {event.newer.role, event.older.role} == set(EdgeRole)
                assert event.newer.edge_id == event.older.edge_id
                assert {event.newer, event.older} <= live
        assert set(table.edge_ids) == {seat.edge_id for seat in live}
        sides = [sum(seat.edge_id == edge for seat in live) for edge in table.edge_ids]
        assert table.pair_count == sides.count(2)


def test_a_peer_that_says_nothing_between_two_pings_is_gone() -> None:
    liveness = Liveness()
    assert liveness.look(is_held=False, sent_bytes=4, backlog_bytes=0)
    assert not liveness.look(is_held=False, sent_bytes=6, backlog_bytes=0)


def test_a_peer_that_is_heard_or_not_listened_to_lives() -> None:
    liveness = Liveness()
    liveness.look(is_held=False, sent_bytes=0, backlog_bytes=0)
    liveness.was_heard = True
    assert liveness.look(is_held=False, sent_bytes=0, backlog_bytes=0)
    assert liveness.look(is_held=True, sent_bytes=0, backlog_bytes=0)


def test_a_slow_reader_lives_while_it_reads() -> None:
    liveness = Liveness()
    liveness.look(is_held=False, sent_bytes=1000, backlog_bytes=900)
    assert liveness.look(is_held=False, sent_bytes=1000, backlog_bytes=800)
    assert not liveness.look(is_held=False, sent_bytes=1000, backlog_bytes=800)


def test_what_the_system_takes_for_a_silent_peer_does_not_keep_it() -> None:
    liveness = Liveness()
    liveness.look(is_held=False, sent_bytes=1000, backlog_bytes=0)
    assert not liveness.look(is_held=False, sent_bytes=5000, backlog_bytes=0)
