"""The solver against brute force on small random problems."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linkcpp.planning.solver as solver_module
from linkcpp.planning.problem import Group, Problem, Solution
from linkcpp.planning.solver import ACCEPTED_GAP, solve, solve_exactly
from tests.support.lengths import repeated

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=7)
DEVICE = st.tuples(
    st.integers(1, 40),  # memory
    st.floats(0.5, 10, allow_nan=False),  # time a unit of weight
    st.floats(0, 20, allow_nan=False),  # time of a visit
    st.integers(1, 2),  # members
)


def make_problem(
    sizes: list[int],
    devices: list[tuple[int, float, float, int]],
    host: tuple[int, float] | None,
    max_devices: int,
    min_remote: int,
) -> Problem:
    """Windows of slots of unequal sizes; a group can hold those that its memory can."""
    prefix = np.concatenate([[0], np.cumsum(sizes)])
    slots = len(sizes)
    groups = []
    if host is not None:
        rows = [(0, j, prefix[j] * host[1]) for j in range(1, slots + 1) if prefix[j] <= host[0]]
        groups.append(group_of(rows, members=1, is_host=True))
    for memory, slowness, visit, members in devices:
        rows = [
            (i, j, (prefix[j] - prefix[i]) * slowness + visit)
            for i in range(slots)
            for j in range(i + 1, slots + 1)
            if prefix[j] - prefix[i] <= memory
        ]
        groups.append(group_of(rows, members=members, is_host=False))
    return Problem(
        slots=slots,
        slot_reads=np.array(sizes, dtype=np.float64),
        groups=tuple(groups),
        shared_budget_bytes=0,
        max_devices=max_devices,
        min_remote=min_remote,
        needs_host=host is not None,
    )


def group_of(rows: list[tuple[int, int, float]], *, members: int, is_host: bool) -> Group:
    return Group(
        members=members,
        first=np.array([row[0] for row in rows], dtype=np.int64),
        last=np.array([row[1] for row in rows], dtype=np.int64),
        costs=np.array([row[2] for row in rows], dtype=np.float64),
        shared_bytes=np.zeros(len(rows), dtype=np.int64),
        is_host=is_host,
        is_remote=not is_host,
    )


def brute_force(problem: Problem) -> float | None:
    """Extend every partial cover by every window; the state is (covered slots, uses of groups)."""
    states = {(0, (0,) * len(problem.groups)): 0.0}
    for covered in range(problem.slots):
        for (end, used), cost in list(states.items()):
            if end != covered:
                continue
            for index, group in enumerate(problem.groups):
                if used[index] >= group.members:
                    continue
                uses = (*used[:index], used[index] + 1, *used[index + 1 :])
                for first, last, more in zip(group.first, group.last, group.costs, strict=True):
                    if first == covered:
                        key = (int(last), uses)
                        states[key] = min(states.get(key, np.inf), cost + float(more))
    costs = [
        cost
        for (end, used), cost in states.items()
        if end == problem.slots and is_within_limits(problem, used)
    ]
    return min(costs, default=None)


def is_within_limits(problem: Problem, used: tuple[int, ...]) -> bool:
    pairs = list(zip(problem.groups, used, strict=True))
    devices = sum(count for group, count in pairs if not group.is_host)
    hosts = sum(count for group, count in pairs if group.is_host)
    return problem.min_remote <= devices <= problem.max_devices and (hosts >= problem.needs_host)


def check_cover(problem: Problem, solution: Solution) -> None:
    ends = [0, *(window.last for window in solution.windows)]
    assert [window.first for window in solution.windows] == ends[:-1]
    assert ends[-1] == problem.slots


def solve_reduced(problem: Problem, *, any_cover: bool = False) -> Solution | None:
    """As if there were many devices: windows that cannot help are dropped before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver_module, "_MANY_GROUPS", 0)
        return solve(problem, any_cover=any_cover)


@pytest.mark.parametrize("method", [solve, solve_exactly, solve_reduced])
@settings(max_examples=repeated(60), deadline=None)
@given(
    sizes=SIZES,
    devices=st.lists(DEVICE, min_size=1, max_size=4),
    host=st.none() | st.tuples(st.integers(1, 40), st.floats(0.5, 10, allow_nan=False)),
    max_devices=st.integers(1, 4),
    min_remote=st.integers(0, 2),
)
def test_it_finds_the_optimum_exactly_where_there_is_one(
    *,
    method: Callable[..., Solution | None],
    sizes: list[int],
    devices: list[tuple[int, float, float, int]],
    host: tuple[int, float] | None,
    max_devices: int,
    min_remote: int,
) -> None:
    problem = make_problem(sizes, devices, host, max_devices, min_remote)
    best = brute_force(problem)
    solution = method(problem)
    any_cover = method(problem, any_cover=True)
    assert (solution is None) == (any_cover is None) == (best is None)
    if solution is None or any_cover is None or best is None:
        return
    check_cover(problem, solution)
    check_cover(problem, any_cover)
    assert solution.bound <= best * (1 + 1e-6) + 1e-6
    assert best - 1e-6 <= solution.cost <= best * (1 + ACCEPTED_GAP) + 1e-6
    assert solution.cost <= any_cover.cost + 1e-6


def test_a_greedy_guess_would_fail_where_a_placement_exists() -> None:
    # Slots of 3, 3, 4, 4 on devices of 6 and 8: the larger device must not begin.
    problem = make_problem([3, 3, 4, 4], [(8, 1.0, 0.0, 1), (6, 9.0, 0.0, 1)], None, 2, 0)
    solution = solve(problem)
    assert solution is not None
    assert [(w.group, w.first, w.last) for w in solution.windows] == [(1, 0, 2), (0, 2, 4)]


def test_shared_memory_is_a_limit_for_all_together() -> None:
    rows = [(0, 1, 1.0), (1, 2, 1.0)]
    cheap = replace(group_of(rows, members=1, is_host=False), shared_bytes=np.array([6, 6]) * 2**20)
    dear = group_of([(0, 1, 5.0), (1, 2, 5.0)], members=1, is_host=False)
    problem = Problem(
        slots=2,
        slot_reads=np.ones(2),
        groups=(cheap, cheap, dear),
        shared_budget_bytes=10 * 2**20,
        max_devices=3,
    )
    solution = solve(problem)
    assert solution is not None
    assert solution.cost == pytest.approx(6.0)


def test_two_runs_give_the_same_cover() -> None:
    problem = make_problem([5, 6, 5, 7, 5, 6], [(12, 1.0, 2.0, 2)] * 3, None, 4, 0)
    assert solve(problem) == solve(problem)


def test_what_cannot_be_cheaper_is_not_searched() -> None:
    problem = make_problem([5] * 30, [(200, 1.0, 0.0, 1), (60, 2.0, 0.0, 3)], None, 4, 0)
    assert solve(problem) is not None
    assert solve(problem, below=1.0) is None
