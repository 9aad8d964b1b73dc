"""Give experts to holders when the time of each layer is decided already.

Levels are ``(class, layers, milliseconds)``. Two ways: *far first* wastes nothing, so it finds room
where there is some; *evenly* leaves the fullest holder as much room as it can.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from linkcpp.planning.expert_problem import ExpertProblem, Level
from linkcpp.planning.problem import Integers

_BISECTIONS = 60


class Wanted(NamedTuple):
    """So many layers of a class within so many milliseconds each."""

    number: int
    layer_count: int
    level_ms: float


def fill_far_first(problem: ExpertProblem, wanted: Sequence[Wanted]) -> list[Level] | None:
    """Fill the slow levels first, and each with the slowest holders that it admits.

    What is near is then left for the fast levels, which nothing else can serve. Returns ``None``
    where something is left over.
    """
    room = problem.room_bytes.copy()
    levels = []
    for entry in sorted(wanted, key=lambda entry: -entry.level_ms):
        layer_class = problem.classes[entry.number]
        limits = _limits(problem, entry, room)
        order = np.argsort(-problem.min_ms(entry.number), kind="stable")
        need = entry.layer_count * layer_class.expert_count
        reached = np.cumsum(limits[order])
        if not len(reached) or reached[-1] < need:
            return None
        totals = np.zeros_like(limits)
        totals[order] = np.clip(need - (reached - limits[order]), 0, limits[order])
        room -= totals * layer_class.expert_bytes
        levels.append(Level(*entry, totals))
    return levels


def fill_evenly(problem: ExpertProblem, wanted: Sequence[Wanted]) -> list[Level] | None:
    """Fill the fast levels first, each so that the fullest holder is filled least.

    Returns ``None`` where something is left over, which another order might have placed.
    """
    used = np.zeros_like(problem.room_bytes)
    levels = []
    for entry in sorted(wanted, key=lambda entry: entry.level_ms):
        layer_class = problem.classes[entry.number]
        limits = _limits(problem, entry, problem.room_bytes - used)
        need = entry.layer_count * layer_class.expert_count
        if int(limits.sum()) < need:
            return None
        totals = _pour(problem.room_bytes, used, limits, layer_class.expert_bytes, need)
        used += totals * layer_class.expert_bytes
        levels.append(Level(*entry, totals))
    return levels


def time_limits(problem: ExpertProblem, entry: Wanted) -> Integers:
    """How many experts of all layers of a level each holder can have at most."""
    limits: Integers = problem.max_experts(entry.number, entry.level_ms) * entry.layer_count
    return limits


def _limits(problem: ExpertProblem, entry: Wanted, room: Integers) -> Integers:
    size = problem.classes[entry.number].expert_bytes
    limits: Integers = np.minimum(time_limits(problem, entry), room // size)
    return limits


def _pour(room: Integers, used: Integers, limits: Integers, size: int, need: int) -> Integers:
    """Fill all holders up to the same share of their room, as far as each may."""

    def up_to(share: float) -> Integers:
        counts = np.floor((room * share - used) / size)
        poured: Integers = np.clip(counts, 0, limits).astype(np.int64)
        return poured

    low, high = 0.0, 1.0 + size / max(int(room.max()), 1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if int(up_to(middle).sum()) >= need else (middle, high)
    totals = up_to(low)
    missing = need - int(totals.sum())
    while missing > 0:
        # One more for whoever is filled least with it.
        open_holders = np.flatnonzero(totals < limits)
        filled = (used + (totals + 1) * size)[open_holders] / np.maximum(room[open_holders], 1)
        chosen = open_holders[np.argsort(filled, kind="stable")[:missing]]
        totals[chosen] += 1
        missing -= len(chosen)
    return totals
