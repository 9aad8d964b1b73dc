"""Placing experts: against brute force on tiny problems, and against its own promises."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linkcpp.planning.expert_copies import NOBODY, place_copies
from linkcpp.planning.expert_problem import ExpertProblem, LayerClass, Level, spread
from linkcpp.planning.expert_solver import ExpertCounts, fits, place_experts
from linkcpp.planning.problem import Floats
from tests.support.lengths import repeated

HOLDER = st.tuples(
    st.integers(0, 9),  # room, in experts of one byte
    st.floats(0, 20, allow_nan=False),  # round trip
    st.floats(0.5, 5, allow_nan=False),  # an expert's time
)


def make_problem(
    holders: list[tuple[int, float, float]], layers: list[int], experts: int, used: int
) -> ExpertProblem:
    """``layers`` counts the layers of each class; an expert of class ``c`` has ``c + 1`` bytes."""
    starts = itertools.accumulate([0, *layers])
    classes = tuple(
        LayerClass(tuple(range(start, start + count)), experts, size + 1, used)
        for size, (start, count) in enumerate(zip(starts, layers, strict=False))
    )
    return ExpertProblem(
        classes=classes,
        room_bytes=np.array([room for room, _, _ in holders], dtype=np.int64),
        fixed_ms=np.array([fixed for _, fixed, _ in holders]),
        expert_ms=np.array([[each for _, _, each in holders]] * len(classes)),
    )


def layer_ms(problem: ExpertProblem, counts: tuple[int, ...]) -> float:
    """The definition, written once more: the slowest holder that is used."""
    entry = problem.classes[0]
    return max(
        float(problem.fixed_ms[h])
        + float(problem.expert_ms[0, h]) * max(1.0, entry.used_count * c / entry.expert_count)
        for h, c in enumerate(counts)
        if c
    )


def brute_force(problem: ExpertProblem) -> float | None:
    """Try every way to cut every layer; the state is what room is left."""
    states = {tuple(problem.room_bytes.tolist()): 0.0}
    for entry in problem.classes:
        cuts = [
            cut
            for cut in itertools.product(range(entry.expert_count + 1), repeat=problem.holder_count)
            if sum(cut) == entry.expert_count
        ]
        times = {cut: layer_ms(problem, cut) for cut in cuts}
        for _ in entry.layers:
            following: dict[tuple[int, ...], float] = {}
            for room, cost in states.items():
                for cut in cuts:
                    left = tuple(r - c * entry.expert_bytes for r, c in zip(room, cut, strict=True))
                    if min(left) >= 0:
                        better = cost + times[cut]
                        following[left] = min(following.get(left, np.inf), better)
            states = following
    return min(states.values(), default=None)


def check(problem: ExpertProblem, found: ExpertCounts) -> None:
    """Every layer is whole, nobody holds more than it can, and the times are those of the cuts."""
    counts = np.diff(found.ends, axis=1, prepend=0)
    used = np.zeros(problem.holder_count, dtype=np.int64)
    assert found.layers == tuple(sorted(layer for c in problem.classes for layer in c.layers))
    for row, layer in enumerate(found.layers):
        entry = next(entry for entry in problem.classes if layer in entry.layers)
        assert counts[row].min() >= 0
        assert counts[row].sum() == entry.expert_count
        used += counts[row] * entry.expert_bytes
        assert found.layers_ms[row] == pytest.approx(layer_ms(problem, tuple(counts[row])))
    assert (used <= problem.room_bytes).all()


@settings(max_examples=repeated(150), deadline=None)
@given(
    holders=st.lists(HOLDER, min_size=1, max_size=3),
    layers=st.integers(1, 3),
    experts=st.integers(1, 4),
    used=st.integers(1, 4),
)
def test_it_is_as_near_to_the_optimum_as_it_says(
    holders: list[tuple[int, float, float]], layers: int, experts: int, used: int
) -> None:
    problem = make_problem(holders, [layers], experts, min(used, experts))
    best = brute_force(problem)
    found = place_experts(problem)
    assert (found is None) == (best is None) == (not fits(problem))
    if found is None or best is None:
        return
    check(problem, found)
    assert found.bound_ms <= best * (1 + 1e-6) + 1e-6
    assert best <= found.layers_ms.sum() * (1 + 1e-6) + 1e-6


@settings(max_examples=repeated(40), deadline=None)
@given(
    holders=st.lists(HOLDER, min_size=1, max_size=3),
    layers=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_experts_of_two_sizes_are_bounded_as_well(
    holders: list[tuple[int, float, float]], layers: tuple[int, int]
) -> None:
    problem = make_problem(holders, list(layers), 2, 2)
    best = brute_force(problem)
    found = place_experts(problem)
    if found is None:
        # Whole experts of several sizes may not be packed where that is tight; never the reverse.
        total = sum(c.count * c.expert_count * c.expert_bytes for c in problem.classes)
        assert best is None or problem.room_bytes.sum() < total + 2 * problem.holder_count
        return
    assert best is not None
    check(problem, found)
    assert found.bound_ms <= best * (1 + 1e-6) + 1e-6 <= found.layers_ms.sum() * (1 + 2e-6) + 2e-6


def random_problem(count: int, seed: int, *, gigabytes: tuple[float, float]) -> ExpertProblem:
    """122B's experts on unlike machines."""
    draw = np.random.default_rng(seed)
    size, row = 5_308_416, 12_288
    rates = np.where(
        draw.random(count) < 0.4, draw.uniform(2e11, 1e12, count), draw.uniform(1e10, 8e10, count)
    )
    links = draw.uniform(2e6, 120e6, count)
    return ExpertProblem(
        classes=(LayerClass(tuple(range(48)), 256, size, 8),),
        room_bytes=(draw.uniform(*gigabytes, count) * 1e9).astype(np.int64),
        fixed_ms=draw.uniform(0.2, 40, count) + row / links * 1e3,
        expert_ms=(size / rates * 1e3 + row / links * 1e3)[None, :],
    )


@pytest.mark.parametrize(("count", "gigabytes"), [(12, (4, 16)), (40, (2, 6)), (400, (2, 6))])
def test_large_plans_are_near_the_bound(count: int, gigabytes: tuple[float, float]) -> None:
    problem = random_problem(count, 3, gigabytes=gigabytes)
    found = place_experts(problem)
    assert found is not None
    check(problem, found)
    assert found.layers_ms.sum() <= found.bound_ms * 1.05


def test_the_same_problem_has_the_same_answer() -> None:
    first, second = (place_experts(random_problem(30, 5, gigabytes=(2, 6))) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first.ends == second.ends).all()


def test_a_tight_fit_is_found() -> None:
    # 8 experts in 2 layers on three holders with exactly the room, none of it in whole layers.
    problem = make_problem([(3, 1.0, 1.0), (3, 2.0, 1.0), (2, 9.0, 1.0)], [2], 4, 2)
    found = place_experts(problem)
    assert found is not None
    check(problem, found)


def test_equal_holders_are_filled_evenly() -> None:
    problem = make_problem([(60, 1.0, 1.0)] * 5, [10], 12, 2)
    found = place_experts(problem)
    assert found is not None
    held = np.diff(found.ends, axis=1, prepend=0).sum(axis=0)
    assert held.tolist() == [24] * 5


def test_a_far_holder_with_much_room_serves_few_layers_rather_than_all() -> None:
    problem = make_problem([(48, 1.0, 0.1), (64, 50.0, 0.1)], [8], 8, 2)
    found = place_experts(problem)
    assert found is not None
    held = np.diff(found.ends, axis=1, prepend=0)
    assert ((held == 0) | (held == 8)).all()
    assert (held[:, 1] > 0).sum() == 2


@given(
    totals=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    count=st.integers(1, 7),
)
def test_totals_are_cut_into_layers_that_differ_by_one(totals: list[int], count: int) -> None:
    experts = -(-sum(totals) // count)
    totals[0] += experts * count - sum(totals)
    ends = spread(Level(0, count, 1.0, np.array(totals)), experts)
    sizes = np.diff(ends, axis=1, prepend=0)
    assert sizes.sum(axis=0).tolist() == totals
    assert (sizes.max(axis=0) - sizes.min(axis=0) <= 1).all()
    assert (ends[:, -1] == experts).all()


def weights_of(problem: ExpertProblem, seed: int) -> list[Floats]:
    draw = np.random.default_rng(seed)
    entry = problem.classes[0]
    drawn = [draw.zipf(1.3, entry.expert_count).clip(max=1000) for _ in entry.layers]
    return [counts / counts.sum() for counts in drawn]


@settings(max_examples=repeated(60), deadline=None)
@given(
    rooms=st.lists(st.integers(1, 60), min_size=2, max_size=6),
    nodes=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    copies=st.integers(1, 4),
    is_hot=st.booleans(),
)
def test_replicas_are_on_other_nodes_and_short_only_for_lack_of_room(
    rooms: list[int], nodes: list[int], copies: int, *, is_hot: bool
) -> None:
    problem = make_problem([(room, 1.0, 1.0) for room in rooms], [3], 8, 2)
    counts = place_experts(problem)
    if counts is None:
        return
    weights = weights_of(problem, 1) if is_hot else None
    numbers = np.array(nodes[: len(rooms)])
    placed = place_copies(problem, counts, numbers, copies, weights)
    room = problem.room_bytes.copy()
    for entry in placed:
        assert entry.holders.shape == (copies, 8)
        assert (entry.first != NOBODY).all()
        room -= np.bincount(entry.holders[entry.holders != NOBODY], minlength=len(rooms))
    assert (room >= 0).all()
    for entry in placed:
        for expert in range(8):
            holders = entry.holders[:, expert]
            there = numbers[holders[holders != NOBODY]].tolist()
            assert len(there) == len(set(there))
            if len(there) < copies:
                assert not any(room[h] and numbers[h] not in there for h in range(len(rooms)))


def test_replicas_find_room_where_memory_is_just_enough() -> None:
    problem = make_problem([(16, 1.0, 1.0)] * 4, [4], 8, 2)
    counts = place_experts(problem)
    assert counts is not None
    placed = place_copies(problem, counts, np.arange(4), 2, None)
    assert all((entry.holders != NOBODY).all() for entry in placed)


def test_often_chosen_experts_are_near_and_have_replicas_first() -> None:
    problem = make_problem([(20, 1.0, 1.0), (20, 30.0, 1.0), (4, 40.0, 1.0)], [4], 8, 2)
    weights = [np.array([0.02, 0.02, 0.4, 0.02, 0.02, 0.02, 0.1, 0.4])] * 4
    counts = place_experts(problem)
    assert counts is not None
    placed = place_copies(problem, counts, np.arange(3), 2, weights)
    shared = [entry for entry in placed if len(set(entry.first.tolist())) > 1]
    assert shared
    for entry in shared:
        assert entry.first[2] == entry.first[7] == 0
    short = [e for entry in placed for e in np.flatnonzero(entry.holders[1] == NOBODY).tolist()]
    assert short
    assert not {2, 7} & set(short)
