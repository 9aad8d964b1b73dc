"""Who computes what, and how long to wait: decisions over plain data."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.dispatch.routing import NOBODY, HolderView, Latency, next_holders, plan_routes
from linkcpp.model.slices.segments import Segment


def view(number: int, first: int, last: int, score: float = 1.0, layer: int = 0) -> HolderView:
    return HolderView(number, (Segment(layer=layer, first=first, last=last),), score)


def test_every_expert_goes_to_a_holder_that_has_it_or_to_nobody() -> None:
    routes = plan_routes({0: 8, 1: 8}, [view(5, 0, 3), view(9, 4, 6)])
    assert routes[0].chosen.tolist() == [5, 5, 5, 5, 9, 9, 9, NOBODY]
    assert routes[1].chosen.tolist() == [NOBODY] * 8


def test_replicas_share_and_the_slower_one_gets_less() -> None:
    routes = plan_routes({0: 100}, [view(0, 0, 99, 1.0), view(1, 0, 99, 3.0)])
    counts = np.bincount(routes[0].chosen)
    assert counts.tolist() == [75, 25]


def test_a_holder_without_history_is_given_work() -> None:
    routes = plan_routes({0: 10}, [view(0, 0, 9, 0.5), view(1, 0, 9, 0.0)])
    assert set(routes[0].chosen.tolist()) == {0, 1}


def test_after_a_failure_the_next_holder_is_asked_and_at_last_nobody() -> None:
    routes = plan_routes({0: 4}, [view(0, 0, 3, 1.0), view(1, 0, 1, 9.0)])[0]
    ids = np.array([0, 3, 1], np.int32)
    assert next_holders(routes, ids, set()).tolist() == routes.chosen[ids].tolist()
    assert next_holders(routes, ids, {0}).tolist() == [1, NOBODY, 1]
    assert next_holders(routes, ids, {0, 1}).tolist() == [NOBODY] * 3


def test_what_a_holder_has_beyond_the_model_is_ignored() -> None:
    routes = plan_routes({0: 2}, [view(0, 0, 500), view(1, 0, 0, layer=7)])
    assert routes[0].chosen.tolist() == [0, 0]


def test_the_deadline_follows_a_holders_own_history() -> None:
    fast, slow = Latency(), Latency()
    for _ in range(50):
        fast.observe(4, 1.0)
        slow.observe(4, 100.0)
    assert fast.deadline_ms(4, 0) < 10
    assert slow.deadline_ms(4, 0) > 300
    assert fast.deadline_ms(4, 250) == 250
    assert fast.deadline_ms(4096, 0) > 4 * fast.deadline_ms(64, 0)


def test_a_miss_doubles_the_deadline_and_an_answer_makes_it_normal_again() -> None:
    latency = Latency()
    latency.observe(4, 10.0)
    before = latency.deadline_ms(4, 0)
    latency.observe_miss(4, before)
    assert latency.deadline_ms(4, 0) == 2 * before
    latency.observe(4, 10.0)
    assert latency.deadline_ms(4, 0) <= before


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.001, 10**7)), max_size=30))
def test_a_deadline_is_always_sensible(history: list[tuple[int, float]]) -> None:
    latency = Latency()
    for pairs, took in history:
        latency.observe(pairs, took)
    for pairs in (1, 8, 4096):
        assert 5 <= latency.deadline_ms(pairs, 5) <= 400_000


@given(
    shares=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15), st.floats(0, 9)), max_size=5),
    excluded=st.sets(st.integers(0, 4)),
)
def test_nobody_is_asked_for_what_it_does_not_hold(
    shares: list[tuple[int, int, float]], excluded: set[int]
) -> None:
    views = [view(k, min(a, b), max(a, b), score) for k, (a, b, score) in enumerate(shares)]
    routes = plan_routes({0: 16}, views)[0]
    ids = np.arange(16, dtype=np.int32)
    for expert, number in enumerate(next_holders(routes, ids, excluded).tolist()):
        able = {
            v.number for v in views if v.segments[0].first <= expert <= v.segments[0].last
        } - excluded
        assert (number in able) if able else number == NOBODY
