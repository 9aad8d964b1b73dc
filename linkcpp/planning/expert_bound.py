"""The linear relaxation of placing experts: a bound of any placement, and levels worth trying.

A *pattern* is one layer done within some time with so many of its experts on each holder. The
relaxation takes fractions of patterns, all layers covered, no holder's memory exceeded (the
configuration program of Gilmore and Gomory, solved by column generation). Prices for memory prove a
bound (Lagrange): no layer costs less than its cheapest pattern at these prices, and the prices are
paid back for the memory that there is. Times are tried on a grid; between two of its points the
pattern takes the lower one's time and the upper one's limits, so the bound holds for all times.
"""

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from linkcpp.planning.expert_filling import Wanted
from linkcpp.planning.expert_problem import ExpertProblem, Level
from linkcpp.planning.problem import Floats, Integers

# Times that are looked at a class; fewer where holders times levels would not fit into memory.
_MAX_LEVELS = 384
_MAX_ENTRIES = 400_000
_MAX_ROUNDS = 60
_CLOSE_ENOUGH = 5e-4
# Candidates of a round are looked for in so many parts of the grid, so that rounds bring variety.
_PARTS = 4


@dataclass(frozen=True)
class Relaxed:
    """A bound in milliseconds of all layers, how much of which level, and who takes part."""

    bound_ms: float
    weights: tuple[tuple[Wanted, float], ...]
    holders: Integers


class _Grid:
    """Times of one class, and what each holder can have of a layer by then."""

    def __init__(self, problem: ExpertProblem, number: int, top_ms: float) -> None:
        low, high = problem.level_range(number)
        high = min(high, max(top_ms, low))
        entry = problem.classes[number]
        counts = np.arange(1, entry.expert_count + 1) * (entry.used_count / entry.expert_count)
        is_exact = problem.holder_count * entry.expert_count <= 4 * _MAX_LEVELS
        if is_exact:
            work = np.unique(np.maximum(1.0, counts))
            times = problem.fixed_ms[:, None] + problem.expert_ms[number][:, None] * work
            levels = np.unique(times[(times >= low * (1 - 1e-7)) & (times <= high * (1 + 1e-7))])
        else:
            count = max(16, min(_MAX_LEVELS, _MAX_ENTRIES // problem.holder_count))
            levels = np.geomspace(low, high, count) if high > low else np.array([low])
        self.levels: Floats = levels if len(levels) else np.array([low])
        self.limits = problem.max_experts(number, self.levels).astype(np.float64)
        self._is_exact = is_exact
        self.need = entry.expert_count
        self.size = entry.expert_bytes

    def prices(self, prices: Floats, order: Integers) -> Floats:
        """Price of the cheapest pattern of every level, infinite where there is none."""
        limits = self.limits[order]
        paid: Floats = self.size * (prices[order] @ self.taken(limits))
        return np.where(limits.sum(axis=0) < self.need, np.inf, paid)

    def lower(self, paid: Floats) -> float:
        """The least that a layer costs at any time, given the prices of the levels."""
        if not self._is_exact:
            paid = np.append(paid[1:], paid[-1])
        return float((self.levels + paid).min())

    def taken(self, limits: Floats) -> Floats:
        """Take what is needed from the holders in their order."""
        reached = np.cumsum(limits, axis=0)
        taken: Floats = np.clip(self.need - (reached - limits), 0, limits)
        return taken


def relax(
    problem: ExpertProblem, known: list[Level], top_ms: list[float], goal_ms: float
) -> Relaxed:
    """Solve the relaxation from a placement that is known.

    ``top_ms`` are times by class beyond which no layer of a better placement can be. The search
    ends early where the bound reaches ``goal_ms``.
    """
    grids = [_Grid(problem, number, top) for number, top in enumerate(top_ms)]
    master = _Master(problem, grids)
    for level in known:
        master.add(level.number, level.level_ms, level.totals / level.layer_count)
    bound = 0.0
    for _ in range(_MAX_ROUNDS):
        cost, prices, values = master.solve()
        order = np.argsort(prices, kind="stable").astype(np.int64)
        proved = -float(prices @ problem.room_bytes)
        for number, (grid, value) in enumerate(zip(grids, values, strict=True)):
            paid = grid.prices(prices, order)
            proved += problem.classes[number].count * grid.lower(paid)
            master.add_best(number, order, grid.levels + paid, value)
        bound = max(bound, proved)
        if bound >= goal_ms or bound >= cost * (1 - _CLOSE_ENOUGH) or not master.has_grown:
            break
    return Relaxed(bound, master.weights(), master.holders())


class _Master:
    """The program over the patterns so far."""

    def __init__(self, problem: ExpertProblem, grids: list[_Grid]) -> None:
        self._problem = problem
        self._grids = grids
        self._patterns: list[tuple[int, float]] = []
        self._seen: set[tuple[int, bytes]] = set()
        self.has_grown = False
        # The public subclass only adds callbacks, and prints a banner on stdout when it is made.
        self._solver: Any = highspy._core._Highs()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        for _ in range(problem.holder_count):
            self._solver.addRow(-np.inf, 1.0, 0, [], [])
        for entry in problem.classes:
            self._solver.addRow(float(entry.count), float(entry.count), 0, [], [])

    def add(self, number: int, time_ms: float, taken: Floats) -> None:
        """Add a pattern; memory counts in parts of what a holder has."""
        key = (number, np.round(taken, 6).tobytes() + np.float64(time_ms).tobytes())
        if key in self._seen:
            return
        self._seen.add(key)
        self.has_grown = True
        rows = np.flatnonzero(taken)
        sizes = taken[rows] * self._grids[number].size / self._problem.room_bytes[rows]
        rows = np.append(rows, self._problem.holder_count + number)
        self._patterns.append((number, time_ms))
        self._solver.addCol(
            time_ms, 0.0, np.inf, len(rows), rows.astype(np.int32), np.append(sizes, 1.0)
        )

    def add_best(self, number: int, order: Integers, costs: Floats, value: float) -> None:
        """Add the most promising pattern of each part of the grid.

        ``order`` are the holders by price, ``costs`` the time and price of the levels, ``value`` is
        what a layer of the class is worth.
        """
        grid = self._grids[number]
        for part in np.array_split(np.arange(len(costs)), _PARTS):
            if not len(part):
                continue
            best = int(part[costs[part].argmin()])
            if costs[best] < value - 1e-9 * max(1.0, abs(value)):
                taken = np.zeros(len(order))
                taken[order] = grid.taken(grid.limits[order, best : best + 1])[:, 0]
                self.add(number, float(grid.levels[best]), taken)

    def solve(self) -> tuple[float, Floats, list[float]]:
        """Return the cost, prices of a byte by holder, and what a layer of each class is worth."""
        self.has_grown = False
        self._solver.run()
        duals = np.array(self._solver.getSolution().row_dual)
        count = self._problem.holder_count
        room = np.maximum(self._problem.room_bytes, 1)
        prices: Floats = np.maximum(0.0, -duals[:count]) / room
        return (
            float(self._solver.getInfo().objective_function_value),
            prices,
            [float(value) for value in duals[count:]],
        )

    def holders(self) -> Integers:
        """Who has experts in the solution."""
        used = np.array(self._solver.getSolution().row_value[: self._problem.holder_count])
        return np.flatnonzero(used > 1e-9)

    def weights(self) -> tuple[tuple[Wanted, float], ...]:
        """How much of each pattern the solution has."""
        values = self._solver.getSolution().col_value
        return tuple(
            (Wanted(number, 1, time), float(value))
            for (number, time), value in zip(self._patterns, values, strict=False)
            if value > 1e-9
        )
