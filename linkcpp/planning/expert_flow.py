"""Give experts to holders when the time of each layer is decided: by linear programming.

A transportation problem: levels need experts, holders have room, and a level's time limits what a
holder can have of it. With experts of one size its corners are whole numbers, so this finds room
whenever there is some; with several sizes, what is left of the fractions is placed one by one.
"""

from collections.abc import Sequence

import highspy
import numpy as np

from linkcpp.planning.expert_filling import Wanted, time_limits
from linkcpp.planning.expert_problem import ExpertProblem, Level
from linkcpp.planning.problem import Floats, Integers


def fill_by_flow(problem: ExpertProblem, wanted: Sequence[Wanted]) -> list[Level] | None:
    """Fill all levels at once; ``None`` where that cannot be."""
    limits = np.array([time_limits(problem, entry) for entry in wanted])
    needs = [problem.classes[w.number].expert_count * w.layer_count for w in wanted]
    if (limits.sum(axis=1) < needs).any():
        return None
    sizes = np.array([problem.classes[entry.number].expert_bytes for entry in wanted])
    # Whole experts of several sizes need a little more room than fractions of them do.
    for kept in (0, 1, 2) if len(set(sizes.tolist())) > 1 else (0,):
        room = np.maximum(problem.room_bytes - kept * int(sizes.max()), 0)
        shares = _solve(room, limits, np.array(needs), sizes)
        if shares is None:
            return None
        if (levels := _whole(problem, wanted, shares, limits)) is not None:
            return levels
    return None


def _whole(
    problem: ExpertProblem, wanted: Sequence[Wanted], shares: Floats, limits: Integers
) -> list[Level] | None:
    """Round down, and place what is then left one by one."""
    sizes = np.array([problem.classes[entry.number].expert_bytes for entry in wanted])
    totals = np.floor(shares + 1e-6).astype(np.int64)
    room = problem.room_bytes - sizes @ totals
    for row, entry in enumerate(wanted):
        need = problem.classes[entry.number].expert_count * entry.layer_count
        missing = need - int(totals[row].sum())
        spare = np.minimum(limits[row] - totals[row], np.maximum(room, 0) // sizes[row])
        more = np.clip(missing - (np.cumsum(spare) - spare), 0, spare)
        if int(more.sum()) < missing:
            return None
        totals[row] += more
        room -= more * sizes[row]
    if (room < 0).any():
        return None
    return [Level(*entry, counts) for entry, counts in zip(wanted, totals, strict=True)]


def _solve(
    room_bytes: Integers, limits: Integers, needs: Integers, sizes: Integers
) -> Floats | None:
    """Solve the transportation problem; ``[level, holder]`` experts, maybe fractions of them."""
    rows, columns = limits.shape
    count = rows * columns
    is_alike = len(set(sizes.tolist())) == 1
    # Memory counts in experts, whole ones where they are of one size.
    unit = int(sizes.min())
    room = room_bytes // unit if is_alike else room_bytes / unit
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = count, rows + columns
    model.col_cost_ = np.zeros(count)
    model.col_lower_ = np.zeros(count)
    model.col_upper_ = limits.astype(np.float64).ravel()
    model.row_lower_ = np.concatenate([needs, np.full(columns, -np.inf)])
    model.row_upper_ = np.concatenate([needs, room]).astype(np.float64)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.arange(0, 2 * count + 1, 2)
    index = np.empty((count, 2), dtype=np.int32)
    index[:, 0] = np.repeat(np.arange(rows), columns)
    index[:, 1] = rows + np.tile(np.arange(columns), rows)
    model.a_matrix_.index_ = index.ravel()
    value = np.ones((count, 2))
    value[:, 1] = np.repeat(sizes / unit, columns)
    model.a_matrix_.value_ = value.ravel()
    solver = highspy._core._Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("solver", "simplex")
    solver.passModel(model)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    found: Floats = np.array(solver.getSolution().col_value).reshape(rows, columns)
    return found
