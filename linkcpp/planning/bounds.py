"""Two relatives of the covering problem that dynamic programming solves at once.

With the order of the groups given, the best cover is found exactly: an upper bound, and the optimum
where slots are alike, since then any order will do. With only the *number* of slots of each window
kept, and each at the price of the cheapest window with so many, order does not matter at all: a
lower bound, close where slots are nearly alike. Slots that are unlike the rest (the output, a
next-token block, dense first layers) are kept apart, so that no window gets those for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linkcpp.planning.problem import Chosen, Floats, Group, Integers, Problem, Solution

# Slots that are counted one by one, since they cost more or less than the others: each doubles the
# states of the count, so they are few, and only those that differ from the median by this share.
_MAX_SPECIAL = 5
_UNLIKE = 0.25


def best_in_order(problem: Problem, order: Sequence[int], below: float) -> Solution | None:
    """Return the best cover whose windows come in this order of the groups.

    A group is named once for each use that may be made of it; any use may be left out.
    The coordinator's CPU is first whatever the order says, and shared memory is not looked at: only
    for problems where no device's window takes any.
    """
    slots, most = problem.slots, problem.max_devices
    table = np.full((most + 1, slots + 1), np.inf)
    table[0, 0] = 0.0
    layers: list[tuple[int, Floats, Floats]] = []
    if problem.needs_host:
        index = next(i for i, group in enumerate(problem.groups) if group.is_host)
        costs = _matrix(problem.groups[index], slots)
        layers.append((index, costs, table))
        table = np.full_like(table, np.inf)
        table[0] = costs[0]
    for index in order:
        group = problem.groups[index]
        if group.is_host or len(group.costs) == 0:
            continue
        costs = _matrix(group, slots)
        layers.append((index, costs, table))
        # [devices, first, last]: one more device, from where the others end.
        taken = (table[:-1, :, None] + costs[None, :, :]).min(axis=1)
        table = np.vstack([table[:1], np.minimum(table[1:], taken)])
    ends = table[problem.min_remote :, slots]
    if len(ends) == 0 or not float(ends.min()) < below:
        return None
    used = int(ends.argmin()) + problem.min_remote
    return Solution(tuple(_walk_back(problem, layers, table, used)), float(ends.min()), 0.0)


def _walk_back(
    problem: Problem, layers: list[tuple[int, Floats, Floats]], table: Floats, used: int
) -> list[Chosen]:
    """Find the windows that a table's last entry stands for."""
    chosen: list[Chosen] = []
    end = problem.slots
    for index, costs, before in reversed(layers):
        is_host = problem.groups[index].is_host
        if not is_host and before[used, end] == table[used, end]:
            table = before
            continue
        used -= not is_host
        first = int((before[used] + costs[:, end]).argmin())
        chosen.append(Chosen(index, first, end))
        table, end = before, first
    return chosen[::-1]


def _matrix(group: Group, slots: int) -> Floats:
    costs = np.full((slots + 1, slots + 1), np.inf)
    costs[group.first, group.last] = group.costs
    return costs


def counting_bound(problem: Problem) -> tuple[float, list[int]]:
    """Return a lower bound of any cover, and the groups of the cheapest cover by numbers alone.

    The bound is infinite where there is no cover; a group with several uses is named several times.
    """
    special = _special_slots(problem.slot_reads)
    plain = problem.slots - len(special)
    before = np.concatenate([[0], np.cumsum(~np.isin(np.arange(problem.slots), special))])
    masks = np.zeros(problem.slots + 1, dtype=np.int64)
    for bit, slot in enumerate(special.tolist()):
        masks[slot + 1 :] |= 1 << bit
    table = np.full((problem.max_devices + 1, 1 << len(special), plain + 1), np.inf)
    table[0, 0, 0] = 0.0
    steps: list[_Step] = []
    for index in sorted(range(len(problem.groups)), key=lambda i: not problem.groups[i].is_host):
        group = problem.groups[index]
        if len(group.costs) == 0 and not group.is_host:
            continue
        cheapest = _cheapest(group, before, masks)
        for _ in range(min(group.members, problem.max_devices)):
            steps.append(_Step(index, cheapest, table, not group.is_host))
            more = _with_one_more(table, cheapest, is_device=not group.is_host)
            # A coordinator's CPU that is offered at all is wanted.
            table = more if group.is_host else np.minimum(table, more)
    ends = table[problem.min_remote :, -1, plain]
    if len(ends) == 0 or not np.isfinite(ends.min()):
        return np.inf, []
    state = (int(ends.argmin()) + problem.min_remote, table.shape[1] - 1, plain)
    return float(ends.min()), _used_groups(steps, table, state)


@dataclass(frozen=True)
class _Step:
    """One more device in the table: what it offers, and the table without it."""

    group: int
    cheapest: Floats
    before: Floats
    is_device: bool


def _used_groups(steps: list[_Step], table: Floats, state: tuple[int, int, int]) -> list[int]:
    """Walk back from a state of the last table to the groups that it was made from."""
    used: list[int] = []
    for step in reversed(steps):
        value = table[state]
        table = step.before
        if step.is_device and table[state] == value:
            continue
        devices, mask, plain = state
        for taken_mask, taken in np.argwhere(np.isfinite(step.cheapest)).tolist():
            cost = step.cheapest[taken_mask, taken]
            came_from = (devices - step.is_device, mask ^ taken_mask, plain - taken)
            is_possible = mask & taken_mask == taken_mask and plain >= taken and came_from[0] >= 0
            if is_possible and table[came_from] + cost == value:
                used.append(step.group)
                state = came_from
                break
    return used[::-1]


def _special_slots(slot_costs: Floats) -> Integers:
    """The slots that differ most from the median, if they differ much."""
    middle = float(np.median(slot_costs))
    unlike = np.abs(slot_costs - middle) / max(middle, 1e-12)
    ranked = np.argsort(-unlike, kind="stable")[:_MAX_SPECIAL]
    return np.sort(ranked[unlike[ranked] > _UNLIKE])


def _cheapest(group: Group, before: Integers, masks: Integers) -> Floats:
    """The least cost of a window by what it contains: ``[special slots, number of others]``."""
    count = before[group.last] - before[group.first]
    mask = masks[group.last] ^ masks[group.first]
    cheapest = np.full((int(masks[-1]) + 1, int(before[-1]) + 1), np.inf)
    np.minimum.at(cheapest, (mask, count), group.costs)
    return cheapest


def _with_one_more(table: Floats, cheapest: Floats, *, is_device: bool) -> Floats:
    """Return the table with one window of a device added to every state (which costs infinity where
    it cannot be).
    """
    more = np.full_like(table, np.inf)
    target = more[1:] if is_device else more
    source = table[:-1] if is_device else table
    states = np.arange(table.shape[1])
    for mask in np.flatnonzero(np.isfinite(cheapest).any(axis=1)).tolist():
        most = int(np.flatnonzero(np.isfinite(cheapest[mask]))[-1])
        free = states[(states & mask) == 0]
        padded = np.pad(source[:, free], ((0, 0), (0, 0), (most, 0)), constant_values=np.inf)
        # reach[..., n, t] is the state with n - (most - t) slots, which this window completes to n.
        reach = np.lib.stride_tricks.sliding_window_view(padded, most + 1, axis=2)
        best = (reach + cheapest[mask, most::-1]).min(axis=3)
        target[:, free | mask] = np.minimum(target[:, free | mask], best)
    return more
