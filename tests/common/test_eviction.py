"""Who makes room for a new connection."""

from hypothesis import given
from hypothesis import strategies as st

from linkcpp.common.eviction import ConnectionInfo, ConnectionLimits, connection_to_evict

LIMITS = ConnectionLimits(strangers=4, strangers_of_address=2)
LAN, WAN, OTHER = "192.168.1.5", "8.8.8.8", "9.9.9.9"


def connections(*hosts: str, busy: tuple[int, ...] = ()) -> list[ConnectionInfo]:
    return [
        ConnectionInfo(number, host, is_waiting=number not in busy)
        for number, host in enumerate(hosts)
    ]


def dropped(*hosts: str, busy: tuple[int, ...] = ()) -> int | None:
    chosen = connection_to_evict(connections(*hosts, busy=busy), LIMITS)
    return chosen.number if chosen else None


def test_nobody_goes_while_there_is_room() -> None:
    assert dropped() is None
    assert dropped(LAN, LAN, LAN, LAN) is None


def test_the_oldest_of_the_address_that_has_max_goes() -> None:
    assert dropped(OTHER, LAN, LAN, LAN, WAN) == 1


def test_an_address_of_its_own_has_a_bound_of_its_own() -> None:
    assert dropped(WAN, WAN, WAN) == 0
    assert dropped("2600::1", "2600::2", "2600::3") == 0


def test_an_address_that_many_share_is_bounded_only_with_all_others() -> None:
    assert dropped("127.0.0.1", "127.0.0.1", "127.0.0.1") is None
    assert dropped("::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1") is None


def test_who_is_served_goes_after_those_who_wait() -> None:
    assert dropped(LAN, LAN, LAN, LAN, LAN, busy=(0, 1)) == 2
    assert dropped(LAN, LAN, LAN, LAN, LAN, busy=(0, 1, 2, 3, 4)) == 0


def test_the_newest_stays_even_where_only_it_waits() -> None:
    assert dropped(LAN, LAN, LAN, LAN, LAN, busy=(0, 1, 2, 3)) == 0
    assert dropped(LAN, LAN, WAN, WAN, OTHER) in (0, 2)


ATTACK = st.lists(st.sampled_from([LAN, WAN, "127.0.0.1"]), min_size=1, max_size=40)


@given(ATTACK)
def test_whoever_has_one_connection_keeps_it_whatever_others_do(hosts: list[str]) -> None:
    known = [ConnectionInfo(0, OTHER, is_waiting=True)]
    for number, host in enumerate(hosts, start=1):
        known.append(ConnectionInfo(number, host, is_waiting=True))
        if (chosen := connection_to_evict(known, LIMITS)) is not None:
            known.remove(chosen)
        assert len(known) <= LIMITS.strangers
    assert known[0].host == OTHER
    assert known[-1].number == len(hosts)
