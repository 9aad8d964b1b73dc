"""Among covers of (nearly) the same cost: the one whose fullest device has the most room left."""

from collections.abc import Sequence
from dataclasses import replace

from linkcpp.planning.bounds import best_in_order
from linkcpp.planning.problem import Floats, Problem, Solution

# Costs that differ by less are the same for anybody who waits.
EQUAL_COSTS = 0.001
_BISECTIONS = 12


def evened(problem: Problem, fills: Sequence[Floats], solution: Solution) -> Solution:
    """Return a cover by the same devices in the same order, or the solution itself.

    ``fills`` has for each group the part of its room that every window takes. The bound stays: it
    is one for all covers.
    """
    order = [w.group for w in solution.windows if not problem.groups[w.group].is_host]
    limit = solution.cost * (1 + EQUAL_COSTS)
    best = solution
    low, high = 0.0, max(_fill(problem, fills, solution))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        groups = [
            group.only(fill <= middle) for group, fill in zip(problem.groups, fills, strict=True)
        ]
        found = best_in_order(replace(problem, groups=tuple(groups)), order, limit)
        if found is None or not problem.has_room_for(found.windows):
            low = middle
        else:
            best = replace(found, bound=min(solution.bound, found.cost))
            high = max(_fill(problem, fills, found))
    return best


def _fill(problem: Problem, fills: Sequence[Floats], solution: Solution) -> list[float]:
    return [
        float(fills[w.group][problem.groups[w.group].row(w.first, w.last)])
        for w in solution.windows
    ]
