"""Solve the covering problem: proved bounds on both sides, and an exact search where they differ.

1. The bound by counting (see ``bounds``) also names the devices of a nearly best cover; the best
   orders of these give real covers. Layers are nearly alike, so this mostly proves itself.
2. Otherwise the arc-flow form, exactly: boundaries between slots are nodes, windows are arcs. Its
   linear relaxation is solved with HiGHS over a growing set of columns: those whose reduced cost is
   negative are added until there are none, which proves a bound for all of them. Every window whose
   reduced cost is larger than the gap can then be dropped for good, and the rest is solved as an
   integer program.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from linkcpp.planning.bounds import best_in_order, counting_bound
from linkcpp.planning.problem import Chosen, Floats, Integers, Problem, Solution

# A plan this close to the bound is not worth seconds of search for a better one.
ACCEPTED_GAP = 0.003
# Orders are cheap to try, so a better one is looked for until this.
GOOD_GAP = 0.0005
# How much is tried at a time. These change how soon an answer is found and never what is proved:
# each search that ends at one of them leaves the bound as it is, and the plan tells the gap.
_COLUMNS_A_ROUND = 40
_PROMISING = 300
_MAX_ROUNDS = 500
_MAX_TREE_NODES = 3000
_MAX_ORDERS = 100
# The first share of the bound within which windows are looked at; it doubles until it is enough.
_FIRST_MARGIN = 0.01
# With more machines, useless windows are dropped before anything is counted.
_MANY_GROUPS = 60
# What HiGHS calls feasible (its default).
_TOLERANCE = 1e-7
_MIB = 2**20


def solve(problem: Problem, *, below: float = np.inf, any_cover: bool = False) -> Solution | None:
    """Return the best cover, or ``None`` where there provably is none at a cost below ``below``.

    With ``any_cover`` the first that is found will do: the question is whether there is one.
    """
    if len(problem.groups) > _MANY_GROUPS:
        reduced = _without_useless(problem, below)
        if reduced is None:
            return None
        problem = reduced
    bound, groups = counting_bound(problem)
    if bound >= below:
        return None
    found = _best_of_orders(problem, groups, bound, any_cover=any_cover)
    if found is not None and (any_cover or found.gap <= ACCEPTED_GAP):
        return found
    return solve_exactly(problem, found, below=below, any_cover=any_cover)


def _without_useless(problem: Problem, below: float) -> Problem | None:
    """Drop every window that is in no cover better than one at hand; ``None`` if none is useful.

    A cover with a window of reduced cost r costs at least the linear relaxation's bound and r.
    """
    pool = _Pool(problem)
    relaxed = _relax(problem, pool) if pool.size else None
    if relaxed is None or relaxed.bound >= below:
        return None
    known = best_in_order(problem, _largest_first(problem), below)
    if known is not None and problem.has_room_for(known.windows):
        below = known.cost
    is_useful = relaxed.reduced_costs <= below - relaxed.bound + _TOLERANCE
    ends = np.append(pool.group_starts, pool.size)
    starts_of = dict(zip(pool.group[pool.group_starts].tolist(), ends.tolist(), strict=False))
    groups = []
    for index, group in enumerate(problem.groups):
        start = starts_of.get(index, 0)
        groups.append(group.only(is_useful[start : start + len(group.costs)]))
    return replace(problem, groups=tuple(groups))


def _best_of_orders(
    problem: Problem, groups: list[int], bound: float, *, any_cover: bool
) -> Solution | None:
    """Try orders of the devices that the count proposes, then orders of all devices."""
    largest_first = _largest_first(problem)
    everything = sorted(largest_first)
    best: Solution | None = None
    for order in chain(islice(_neighbours(groups), _MAX_ORDERS), [largest_first, everything]):
        found = best_in_order(problem, order, best.cost if best else np.inf)
        if found is not None and problem.has_room_for(found.windows):
            best = replace(found, bound=min(bound, found.cost))
        if best is not None and (any_cover or best.gap <= GOOD_GAP):
            break
        if order is largest_first and best is not None:
            break
    return best


def _neighbours(start: list[int]) -> Iterator[list[int]]:
    """The order itself, all that differ by one exchange, then shuffled ones (always the same)."""
    yield start
    for left, right in combinations(range(len(start)), 2):
        order = start.copy()
        order[left], order[right] = order[right], order[left]
        yield order
    shuffle = np.random.default_rng(0)
    while len(start) > 1:
        yield [start[index] for index in shuffle.permutation(len(start))]


def _largest_first(problem: Problem) -> list[int]:
    """All groups, as often as each may be used."""
    capacities = [int((group.last - group.first).max(initial=0)) for group in problem.groups]
    return [
        index
        for index in sorted(range(len(capacities)), key=lambda index: -capacities[index])
        for _ in range(min(problem.groups[index].members, problem.max_devices))
    ]


def solve_exactly(
    problem: Problem,
    found: Solution | None = None,
    *,
    below: float = np.inf,
    any_cover: bool = False,
) -> Solution | None:
    """Search by linear and integer programming, from a cover that is known already or from none."""
    pool = _Pool(problem)
    if pool.size == 0:
        return None
    relaxed = _relax(problem, pool)
    if relaxed is None or relaxed.bound >= below:
        return None
    if found is None:
        # The windows that the relaxation likes best almost always contain a cover.
        promising = np.argsort(relaxed.reduced_costs, kind="stable")[:_PROMISING]
        found = (
            _integer(pool, np.sort(promising))
            or _integer(pool, relaxed.columns)
            or _integer(pool, np.arange(pool.size))
        )
        if found is None:
            return None
        found = replace(found, bound=relaxed.bound)
    found = replace(found, bound=min(found.cost, max(found.bound, relaxed.bound)))
    if any_cover or found.gap <= ACCEPTED_GAP:
        return found
    return _within_margins(pool, relaxed, found)


class _Pool:
    """All windows of all groups in flat arrays, and the rows of the program that they are in."""

    def __init__(self, problem: Problem) -> None:
        groups = problem.groups
        counts = [len(group.costs) for group in groups]
        self.size = sum(counts)
        self.group = np.repeat(np.arange(len(groups)), counts)
        self.group_starts = np.flatnonzero(np.diff(self.group, prepend=-1))
        self.first = _joined([group.first for group in groups], np.int64)
        self.last = _joined([group.last for group in groups], np.int64)
        self.cost = _joined([group.costs for group in groups], np.float64)
        self.shared_mib = _joined([group.shared_bytes for group in groups], np.float64) / _MIB
        self.is_device = np.repeat([not group.is_host for group in groups], counts)
        self.is_remote = np.repeat([group.is_remote for group in groups], counts)
        # Rows: one a boundary but the last, one a group, then devices, remote, host, shared memory.
        self.group_row = problem.slots
        self.device_row = self.group_row + len(groups)
        self.remote_row, self.host_row, self.shared_row = (self.device_row + n for n in (1, 2, 3))
        self.lower = np.full(self.shared_row + 1, -np.inf)
        self.upper = np.full(self.shared_row + 1, np.inf)
        self.lower[: problem.slots] = self.upper[: problem.slots] = 0.0
        self.lower[0] = self.upper[0] = 1.0
        self.upper[self.group_row : self.device_row] = [group.members for group in groups]
        self.upper[self.device_row] = problem.max_devices
        self.lower[self.remote_row] = problem.min_remote
        self.lower[self.host_row] = float(problem.needs_host)
        self.upper[self.shared_row] = problem.shared_budget_bytes / _MIB

    def entries(self, column: int) -> tuple[list[int], list[float]]:
        """Rows and coefficients of a window."""
        rows = [int(self.first[column]), self.group_row + int(self.group[column])]
        values = [1.0, 1.0]
        if self.last[column] < self.group_row:
            rows.append(int(self.last[column]))
            values.append(-1.0)
        rows.append(self.device_row if self.is_device[column] else self.host_row)
        values.append(1.0)
        if self.is_remote[column]:
            rows.append(self.remote_row)
            values.append(1.0)
        if self.shared_mib[column] > 0:
            rows.append(self.shared_row)
            values.append(float(self.shared_mib[column]))
        return rows, values

    def reduced_costs(self, duals: Floats) -> Floats:
        """What each window would change of the relaxation's cost, given its row prices."""
        potential = np.append(duals[: self.group_row], 0.0)
        group_price = duals[self.group_row : self.device_row]
        host_or_device = np.where(self.is_device, duals[self.device_row], duals[self.host_row])
        price: Floats = (
            potential[self.first]
            - potential[self.last]
            + group_price[self.group]
            + host_or_device
            + self.is_remote * duals[self.remote_row]
            + self.shared_mib * duals[self.shared_row]
        )
        reduced: Floats = self.cost - price
        return reduced


@dataclass(frozen=True)
class _Relaxed:
    bound: float
    columns: Integers
    reduced_costs: Floats


def _relax(problem: Problem, pool: _Pool) -> _Relaxed | None:
    """Solve the linear relaxation over all windows; ``None`` if even that has no solution."""
    # Artificial windows of one slot, dearer than any real cover, make every subset solvable.
    penalty = 10.0 * float(pool.cost.max()) + 1.0
    solver = _empty(pool)
    for slot in range(problem.slots):
        rows = [slot] + ([slot + 1] if slot + 1 < problem.slots else [])
        solver.addCol(penalty, 0.0, np.inf, len(rows), rows, [1.0, -1.0][: len(rows)])
    for row in (pool.remote_row, pool.host_row):
        solver.addCol(penalty, 0.0, np.inf, 1, [row], [1.0])
    artificial = problem.slots + 2
    chosen = np.zeros(pool.size, dtype=bool)
    for _ in range(_MAX_ROUNDS):
        solver.run()
        solution = solver.getSolution()
        reduced = pool.reduced_costs(np.array(solution.row_dual))
        open_costs = np.where(chosen, np.inf, reduced)
        entering = _most_negative(pool, open_costs, _TOLERANCE * max(1.0, penalty * 1e-4))
        if len(entering) == 0:
            break
        chosen[entering] = True
        for column in entering:
            rows, values = pool.entries(int(column))
            solver.addCol(pool.cost[column], 0.0, np.inf, len(rows), rows, values)
    if sum(solution.col_value[:artificial]) > 1e-6:
        return None
    bound = float(solver.getInfo().objective_function_value)
    # Prices that are not quite dual feasible still prove this bound (each unit of negative reduced
    # cost can be used at most once a window, and a cover has at most `slots` of them).
    bound += problem.slots * min(0.0, float(reduced.min()))
    return _Relaxed(bound, np.flatnonzero(chosen), reduced)


def _most_negative(pool: _Pool, reduced: Floats, threshold: float) -> Integers:
    """Pick the windows that promise most: the best of each group, and the best of all."""
    best = np.minimum.reduceat(reduced, pool.group_starts)
    best = np.repeat(best, np.diff(pool.group_starts, append=pool.size))
    useful = np.flatnonzero(reduced < -threshold)
    if len(useful) > _COLUMNS_A_ROUND:
        bar = np.partition(reduced[useful], _COLUMNS_A_ROUND)[_COLUMNS_A_ROUND]
        useful = useful[(reduced[useful] <= bar) | (reduced[useful] == best[useful])]
    return useful


def _within_margins(pool: _Pool, relaxed: _Relaxed, known: Solution) -> Solution:
    """Solve over windows of small reduced cost, more and more of them, until that proves enough.

    A cover with a window of reduced cost r costs at least the relaxation's bound and r: so the best
    over all windows up to a margin is the best of all if it lies within that margin.
    """
    best = known
    margin = min(_FIRST_MARGIN * relaxed.bound, known.cost - relaxed.bound) + _TOLERANCE
    while True:
        useful = np.flatnonzero(relaxed.reduced_costs <= margin)
        found = _integer(pool, useful, max_tree_nodes=_MAX_TREE_NODES)
        if found is not None:
            best = min(best, found, key=lambda solution: solution.cost)
            within = min(found.bound, best.cost)
            proved = min(within, relaxed.bound + margin) if len(useful) < pool.size else within
            best = replace(best, bound=min(best.cost, max(known.bound, proved)))
        enough = best.gap <= ACCEPTED_GAP or margin >= best.cost - relaxed.bound
        if enough or len(useful) == pool.size or (found is None and margin > known.cost):
            return best
        margin *= 2


def _integer(
    pool: _Pool, columns: Integers, *, max_tree_nodes: int | None = None
) -> Solution | None:
    """Solve the integer program over some windows; ``None`` if those have no solution.

    The bound is for covers by these windows. With a limit, ``None`` can also mean that no solution
    was found within it.
    """
    solver = _empty(pool)
    solver.setOptionValue("mip_rel_gap", ACCEPTED_GAP / 2)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    if max_tree_nodes is not None:
        solver.setOptionValue("mip_max_nodes", max_tree_nodes)
    for column in columns:
        rows, values = pool.entries(int(column))
        solver.addCol(pool.cost[column], 0.0, 1.0, len(rows), rows, values)
    count = len(columns)
    solver.changeColsIntegrality(
        count,
        np.arange(count, dtype=np.int32),
        np.full(count, highspy.HighsVarType.kInteger.value, dtype=np.uint8),
    )
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible.value:
        return None
    taken = columns[np.array(solver.getSolution().col_value) > 0.5]
    taken = taken[np.argsort(pool.first[taken], kind="stable")]
    windows = tuple(
        Chosen(int(pool.group[column]), int(pool.first[column]), int(pool.last[column]))
        for column in taken
    )
    cost = float(pool.cost[taken].sum())
    return Solution(windows, cost, min(cost, float(info.mip_dual_bound)))


def _empty(pool: _Pool) -> Any:
    # The public subclass only adds callbacks, and prints a banner on stdout when it is made.
    solver = highspy._core._Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    for lower, upper in zip(pool.lower, pool.upper, strict=True):
        solver.addRow(lower, upper, 0, [], [])
    return solver


def _joined(parts: list[npt.NDArray[Any]], kind: type) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(kind) if parts else np.zeros(0, kind)
