"""Which experts each holder has: the first holder of every expert, and its replicas.

All arrays are by layer, in the order of ``ExpertCounts.layers``. ``first[expert]`` is the holder
that computes an expert as long as all goes well; a replica is on another node, since a node that
dies takes all its devices along.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from linkcpp.planning.expert_problem import ExpertProblem
from linkcpp.planning.expert_solver import MAX_HOLDERS, ExpertCounts
from linkcpp.planning.problem import Floats, Integers

Mask = npt.NDArray[np.bool_]
NOBODY = -1
# Experts that are chosen more often than so many times the mean are placed one by one; the others
# stay together. Where a slice gets too many segments so, fewer count as hot, at last none.
HOTNESS = (1.5, 3.0, 6.0, float("inf"))
# What a node takes in one slice; as linkcpp.node.records.MAX_SEGMENTS.
MAX_SEGMENTS = 512
# How far beyond its share a holder goes to copy another's whole slice, which keeps segments few.
_MIRRORED = 1.25


@dataclass(frozen=True)
class Copies:
    """``holders[copy, expert]`` of one layer, ``NOBODY`` where a copy found no room."""

    layer: int
    number: int
    holders: Integers

    @property
    def first(self) -> Integers:
        """Who computes each expert."""
        first: Integers = self.holders[0]
        return first


def class_numbers(problem: ExpertProblem) -> dict[int, int]:
    """The class of each layer."""
    return {layer: number for number, entry in enumerate(problem.classes) for layer in entry.layers}


def place_copies(
    problem: ExpertProblem,
    counts: ExpertCounts,
    node_numbers: Integers,
    copies: int,
    weights: Sequence[Floats] | None,
) -> list[Copies]:
    """Name up to ``copies`` holders of every expert, on different nodes.

    With ``weights``, shares of each layer's work by expert, the often chosen ones go to the nearest
    holders and get their replicas first.
    """
    for hotness in HOTNESS if weights is not None else ():
        placed = _first_holders(problem, counts, weights, hotness)
        placed = _add_replicas(problem, placed, node_numbers, copies, weights)
        if _max_segments(problem, placed) <= MAX_SEGMENTS:
            return placed
    placed = _first_holders(problem, counts, None, 0.0)
    return _add_replicas(problem, placed, node_numbers, copies, None)


def _max_segments(problem: ExpertProblem, placed: Sequence[Copies]) -> int:
    counts = np.zeros(problem.holder_count, dtype=np.int64)
    for entry in placed:
        owners = np.array([owner for owner, _, _ in runs(entry.holders)], dtype=np.int64)
        counts += _held(problem, owners)
    return int(counts.max())


def runs(holders: Integers) -> list[tuple[int, int, int]]:
    """Who has which run of a layer's experts, sorted: (holder, first, last), copies joined."""
    copies, experts = np.nonzero(holders != NOBODY)
    owners = holders[copies, experts]
    order = np.lexsort((experts, owners))
    owners, experts = owners[order], experts[order]
    is_start = (np.diff(owners, prepend=-1) != 0) | (np.diff(experts, prepend=-2) != 1)
    starts = np.flatnonzero(is_start)
    ends = np.append(starts[1:], len(owners)) - 1
    columns = (owners[starts], experts[starts], experts[ends])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _first_holders(
    problem: ExpertProblem,
    counts: ExpertCounts,
    weights: Sequence[Floats] | None,
    hotness: float,
) -> list[Copies]:
    """Name the holder of every expert."""
    numbers = class_numbers(problem)
    found = []
    for row, layer in enumerate(counts.layers):
        number = numbers[layer]
        sizes = np.diff(counts.ends[row], prepend=0)
        if weights is None:
            first = np.repeat(np.arange(problem.holder_count), sizes)
        else:
            level_ms = float(counts.layers_ms[row])
            is_hot = weights[row] > hotness / len(weights[row])
            first = _by_weight(problem, number, sizes, (weights[row], is_hot, level_ms))
        found.append(Copies(layer, number, first[None, :].astype(np.int64)))
    return found


def _by_weight(
    problem: ExpertProblem, number: int, sizes: Integers, wanted: tuple[Floats, Mask, float]
) -> Integers:
    """Give the hot experts to the nearest holders, each up to its time and its room.

    ``wanted`` are the weights, which of them are hot, and the time of the layer in milliseconds.
    """
    weights, is_hot, level_ms = wanted
    near = problem.min_ms(number)
    holders = np.flatnonzero(sizes)
    holders = holders[np.argsort(near[holders], kind="stable")]
    used = problem.classes[number].used_count
    open_slots = sizes[holders].copy()
    # A whole chosen expert is computed by whoever is asked at all.
    work = (level_ms - problem.fixed_ms[holders]) / problem.expert_ms[number][holders]
    open_work = np.maximum(work, 1.0) / used
    order = np.argsort(-weights, kind="stable")
    first = np.full(len(weights), NOBODY, dtype=np.int64)

    def give(expert: int) -> None:
        is_open = open_slots > 0
        able = is_open & (open_work >= weights[expert] - 1e-12)
        # Beyond everybody's time, whoever is least late takes it.
        left = np.where(is_open, open_work, -np.inf)
        chosen = int(able.argmax() if able.any() else left.argmax())
        first[expert] = holders[chosen]
        open_slots[chosen] -= 1
        open_work[chosen] -= weights[expert]

    for expert in (*order[is_hot[order]].tolist(), *np.flatnonzero(~is_hot).tolist()):
        give(expert)
    return first


def _add_replicas(
    problem: ExpertProblem,
    placed: Sequence[Copies],
    node_numbers: Integers,
    copies: int,
    weights: Sequence[Floats] | None,
) -> list[Copies]:
    """Give every expert up to ``copies`` holders on different nodes, as far as memory goes.

    Copy by copy, so that nobody gets a third before others have a second; with ``weights`` the
    often chosen come first. Room is used where most of it is left.
    """
    placed = list(placed)
    room = _room(problem, placed)
    waves = _waves(placed, weights)
    for _ in range(1, copies):
        few = _few_holders(problem, placed, room)
        placed = [
            Copies(c.layer, c.number, np.vstack([c.holders, np.full_like(c.first, NOBODY)]))
            for c in placed
        ]
        for wave in waves:
            _add_copy(problem, placed, node_numbers, few, wave)
        room = _room(problem, placed)
        # Whoever is far is asked only where the near ones have no room.
        for wave in waves if any((c.holders[-1] == NOBODY).any() for c in placed) else []:
            _add_copy(problem, placed, node_numbers, room, wave)
        room = _room(problem, placed)
    return placed


def _room(problem: ExpertProblem, placed: Sequence[Copies]) -> Integers:
    """What holders have left."""
    room = problem.room_bytes.copy()
    for entry in placed:
        held = _held(problem, entry.holders[entry.holders != NOBODY])
        room -= held * problem.classes[entry.number].expert_bytes
    return room


def _few_holders(problem: ExpertProblem, placed: Sequence[Copies], room: Integers) -> Integers:
    """The room of the holders in use and the nearest others, up to ``MAX_HOLDERS``."""
    used = np.zeros(problem.holder_count, dtype=np.int64)
    for entry in placed:
        used += _held(problem, entry.holders[entry.holders != NOBODY])
    near = np.lexsort((problem.expert_ms.max(axis=0) + problem.fixed_ms, used == 0))
    chosen = near[: max(MAX_HOLDERS, int((used > 0).sum()))]
    few = np.zeros_like(room)
    few[chosen] = room[chosen]
    return few


def _held(problem: ExpertProblem, holders: Integers) -> Integers:
    counts: Integers = np.bincount(holders, minlength=problem.holder_count)
    return counts


def _waves(placed: Sequence[Copies], weights: Sequence[Floats] | None) -> list[list[Mask]]:
    """Which experts get their replicas first: masks by layer."""
    if weights is None:
        return [[np.ones(len(entry.first), dtype=bool) for entry in placed]]
    bars = np.array(sorted(HOTNESS[:-1], reverse=True))
    ranks = [np.sum(mine[:, None] * len(mine) <= bars[None, :], axis=1) for mine in weights]
    return [[rank == wave for rank in ranks] for wave in range(len(bars) + 1)]


def _add_copy(
    problem: ExpertProblem,
    placed: Sequence[Copies],
    node_numbers: Integers,
    room: Integers,
    wave: Sequence[Mask],
) -> None:
    """Place one more copy of the wave's experts, changing ``room`` and the last row of holders."""
    needed = sum(
        int(mask.sum()) * problem.classes[entry.number].expert_bytes
        for entry, mask in zip(placed, wave, strict=True)
    )
    for entry, mask in zip(placed, wave, strict=True):
        size = problem.classes[entry.number].expert_bytes
        is_open = mask & (entry.holders[-1] == NOBODY)
        # Each holder's part of this layer is its part of what is still to be placed.
        part = room / max(needed, 1) * int(is_open.sum())
        shares = np.ceil(part * min(1.0, needed / max(int(room.sum()), 1)))
        needed -= int(is_open.sum()) * size
        room -= _mirror(entry, is_open, shares, room // size, node_numbers) * size
        for limits in (shares.astype(np.int64), np.full_like(room, len(is_open))):
            taken = _take(entry, is_open, np.minimum(limits, room // size), node_numbers)
            room -= taken * size
            if not is_open.any():
                break


def _mirror(
    entry: Copies, is_open: Mask, shares: Floats, fitting: Integers, node_numbers: Integers
) -> Integers:
    """Let a holder take all that another one computes, if that is about its share; say how much.

    So the replicas of a slice are a slice too, with as few segments.
    """
    taken = np.zeros_like(fitting)
    first = entry.first
    holders = np.unique(first)
    shift = len(holders) * (len(entry.holders) - 1) // len(entry.holders)
    shift = max(shift, 1)
    for place, owner in enumerate(holders.tolist()):
        other = int(holders[(place + shift) % len(holders)])
        wanted = is_open & (first == owner)
        count = int(wanted.sum())
        others = entry.holders[:, wanted]
        is_there = ((others != NOBODY) & (node_numbers[others] == node_numbers[other])).any()
        if count and not is_there and count <= min(_MIRRORED * shares[other] + 1, fitting[other]):
            entry.holders[-1, wanted] = other
            is_open &= ~wanted
            taken[other] = count
    return taken


def _take(entry: Copies, is_open: Mask, limits: Integers, node_numbers: Integers) -> Integers:
    """Let holders take runs of what is open, those with the highest limits first; say how much."""
    taken = np.zeros_like(limits)
    nodes = np.where(entry.holders >= 0, node_numbers[entry.holders], NOBODY)
    able_holders = np.flatnonzero(limits > 0)
    for holder in able_holders[np.argsort(-limits[able_holders], kind="stable")].tolist():
        is_mine = (nodes == node_numbers[holder]).any(axis=0)
        able = np.flatnonzero(is_open & ~is_mine)[: int(limits[holder])]
        if not len(able):
            continue
        entry.holders[-1, able] = holder
        nodes[-1, able] = node_numbers[holder]
        is_open[able] = False
        taken[holder] = len(able)
        if not is_open.any():
            break
    return taken
