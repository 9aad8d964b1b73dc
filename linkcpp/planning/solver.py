"""Cover a chain of slots by windows at the least cost: exact, by column generation with HiGHS.

A *slot* is a layer, or the output. A *window* ``[first, last)`` of slots is offered by a *group*
(interchangeable devices) at a cost; which windows a group can hold is decided before. Wanted is a
path of windows from slot 0 to the last one that uses each group no more often than it has members.

This is the arc-flow form of the problem: boundaries between slots are nodes, windows are arcs. Its
linear relaxation is solved over a growing set of columns: those whose reduced cost is negative are
added until there are none, which proves a bound for all of them. An integer solution over the
columns found so far gives the other bound. If they are not close, every column whose reduced cost
is larger than the gap can be dropped for good, and the rest is solved as an integer program.
"""

from dataclasses import dataclass, replace
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# A plan this close to the bound is not worth seconds of search for a better one.
ACCEPTED_GAP = 0.002
# Below so many windows the integer program over all of them takes a moment.
SMALL_POOL = 300
_COLUMNS_A_ROUND = 40
_PROMISING = 300
_MOST_ROUNDS = 500
_MOST_TREE_NODES = 20_000
_TOLERANCE = 1e-7
_MIB = 2**20


@dataclass(frozen=True)
class Group:
    """Interchangeable devices and the windows that one of them can hold.

    ``costs`` are milliseconds, ``shared_bytes`` what a window takes of the memory that all groups
    share (the coordinator's RAM). ``is_host`` marks the coordinator's CPU, which is no device to
    llama.cpp; ``is_remote`` a device that is reached over a link.
    """

    members: int
    first: Integers
    last: Integers
    costs: Floats
    shared_bytes: Integers
    is_host: bool = False
    is_remote: bool = False


@dataclass(frozen=True)
class Problem:
    """What to cover, with what, within which limits.

    ``needs_host`` wants a window on the coordinator's CPU. ``most_devices`` bounds the windows that
    are not on it, ``least_remote`` the windows behind links.
    """

    slots: int
    groups: tuple[Group, ...]
    shared_budget_bytes: int
    most_devices: int
    least_remote: int = 0
    needs_host: bool = False


@dataclass(frozen=True)
class Chosen:
    """A window of the solution: which group's, and which slots."""

    group: int
    first: int
    last: int


@dataclass(frozen=True)
class Solution:
    """The windows in order, their total cost, and a proved lower bound of any solution's cost."""

    windows: tuple[Chosen, ...]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, relative to the cost."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0


def solve(problem: Problem, *, below: float = np.inf, any_cover: bool = False) -> Solution | None:
    """Return the best cover, or ``None`` where there provably is none at a cost below ``below``.

    With ``any_cover`` the first that is found will do: the question is whether there is one.
    """
    pool = _Pool(problem)
    if pool.size == 0:
        return None
    if pool.size <= SMALL_POOL:
        return _integer(pool, np.arange(pool.size))
    relaxed = _relax(problem, pool)
    if relaxed is None or relaxed.bound >= below:
        return None
    # The windows that the relaxation likes best almost always contain a good cover.
    promising = np.argsort(relaxed.reduced_costs, kind="stable")[:_PROMISING]
    found = _integer(pool, np.sort(promising)) or _integer(pool, relaxed.columns)
    if found is None:
        return _integer(pool, np.arange(pool.size))
    found = replace(found, bound=min(relaxed.bound, found.cost))
    if any_cover or found.gap <= ACCEPTED_GAP:
        return found
    # No window outside of this set can be part of a cover better than the one at hand.
    margin = found.cost - relaxed.bound + _TOLERANCE
    useful = np.flatnonzero(relaxed.reduced_costs <= margin)
    better = _integer(pool, useful, most_tree_nodes=_MOST_TREE_NODES) or found
    best = min(found, better, key=lambda solution: solution.cost)
    return replace(best, bound=max(relaxed.bound, min(better.bound, best.cost)))


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
        self.upper[self.device_row] = problem.most_devices
        self.lower[self.remote_row] = problem.least_remote
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
    for _ in range(_MOST_ROUNDS):
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


def _integer(
    pool: _Pool, columns: Integers, *, most_tree_nodes: int | None = None
) -> Solution | None:
    """Solve the integer program over some windows; ``None`` if those have no solution.

    The bound is for covers by these windows. With a limit, ``None`` can also mean that no solution
    was found within it.
    """
    solver = _empty(pool)
    solver.setOptionValue("mip_rel_gap", 1e-7)
    solver.setOptionValue("mip_abs_gap", 1e-9)
    if most_tree_nodes is not None:
        solver.setOptionValue("mip_max_nodes", most_tree_nodes)
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
