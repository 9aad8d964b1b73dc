"""Choose how many experts of each layer every holder gets, and prove how good that is.

First the times: the least time that all layers can share, then what the linear relaxation proposes
(some layers fast and near, others slower and farther), rounded to whole layers and improved one
level at a time. Then who gets what within these times: as evenly as memory allows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from linkcpp.planning.expert_bound import Relaxed, relax
from linkcpp.planning.expert_filling import Wanted, fill_evenly, fill_far_first
from linkcpp.planning.expert_flow import fill_by_flow
from linkcpp.planning.expert_problem import ExpertProblem, Level, spread
from linkcpp.planning.problem import Floats, Integers

# A plan this close to the bound is not worth more search.
ACCEPTED_GAP = 0.003
# Between placements whose times differ by less, the more even one is taken.
EQUAL_TIMES = 0.001
# Evenness alone is not a reason for more links than that.
MAX_HOLDERS = 64
_BISECTIONS = 30
# A trial costs as many steps as there are levels times holders; so many steps, within these bounds.
_MAX_TRIALS = 150
_MIN_TRIALS = 20
_WORK = 20_000
_MAX_IMPROVED = 2
_MAX_FLOWS = 4000
_OFFSETS = (0.5, 0.75, 0.25, 1.0, 0.0)


@dataclass(frozen=True)
class ExpertCounts:
    """For each layer, where every holder's experts end (they begin where the one before ends).

    ``layers`` are the model's numbers of the rows of ``ends``.
    """

    layers: tuple[int, ...]
    ends: Integers
    layers_ms: Floats
    bound_ms: float


def fits(problem: ExpertProblem) -> bool:
    """Tell whether all experts find room, whatever time it takes."""
    return fill_far_first(problem, _at(problem, np.inf)) is not None


def place_experts(problem: ExpertProblem) -> ExpertCounts | None:
    """Place all experts of all layers; ``None`` where memory does not suffice."""
    able = np.flatnonzero(problem.room_bytes >= min(c.expert_bytes for c in problem.classes))
    if not len(able):
        return None
    reduced = _with_holders(problem, able)
    wanted = _uniform(reduced)
    if wanted is None:
        return None
    lows = [reduced.level_range(number)[0] for number in range(len(reduced.classes))]
    least = sum(entry.count * low for entry, low in zip(reduced.classes, lows, strict=True))
    best, bound = _improve(reduced, wanted), least
    cost = _cost(reduced, best)
    if cost - bound > ACCEPTED_GAP * cost:
        best, bound = _search(reduced, best, lows, least)
    counts = _laid_out(reduced, best, bound)
    ends = np.zeros((len(counts.layers), problem.holder_count), dtype=np.int64)
    ends[:, able] = counts.ends
    return replace(counts, ends=np.maximum.accumulate(ends, axis=1))


def _with_holders(problem: ExpertProblem, chosen: Integers) -> ExpertProblem:
    return ExpertProblem(
        problem.classes,
        problem.room_bytes[chosen],
        problem.fixed_ms[chosen],
        problem.expert_ms[:, chosen],
    )


def _at(problem: ExpertProblem, level_ms: float) -> list[Wanted]:
    """All layers within the same time, or the least that their class needs."""
    wanted = []
    for number, entry in enumerate(problem.classes):
        low, high = problem.level_range(number)
        wanted.append(Wanted(number, entry.count, min(max(level_ms, low), high)))
    return wanted


def _uniform(problem: ExpertProblem) -> list[Wanted] | None:
    """Find the least time that all layers can share."""
    ranges = [problem.level_range(number) for number in range(len(problem.classes))]
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    if not np.isfinite(high) or fill_far_first(problem, _at(problem, high)) is None:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if fill_far_first(problem, _at(problem, middle)) is None:
            low = middle
        else:
            high = middle
        if high - low < 1e-6 * high:
            break
    return _at(problem, high)


def _search(
    problem: ExpertProblem, best: list[Level], lows: Sequence[float], least: float
) -> tuple[list[Level], float]:
    """Solve the relaxation, and try what it proposes."""
    cost = _cost(problem, best)
    # All other layers take the least that they can; so this much is left for one.
    tops = [low + cost - least for low in lows]
    near = np.sum([level.totals for level in best], axis=0) > 0
    for number, top in enumerate(tops):
        near |= problem.min_ms(number) <= top * (1 + 1e-9)
    chosen = np.flatnonzero(near)
    part = _with_holders(problem, chosen)
    inside = [replace(level, totals=level.totals[chosen]) for level in best]
    relaxed = relax(part, inside, tops, cost * (1 - ACCEPTED_GAP))
    bound = max(least, relaxed.bound_ms)
    # Few holders take part, which makes it cheap to try much.
    chosen = chosen[relaxed.holders]
    part = _with_holders(problem, chosen)
    rounded = list(_rounded(part, relaxed))
    tried = [(found, wanted) for wanted in rounded if (found := _fill(part, wanted))]
    tried.sort(key=lambda pair: _cost(part, pair[0]))
    for _, wanted in tried[:_MAX_IMPROVED]:
        if cost - bound <= ACCEPTED_GAP * cost:
            break
        found = _improve(part, wanted)
        if (time := _cost(part, found)) < cost:
            cost = time
            best = [replace(entry, totals=_among(entry.totals, chosen, near)) for entry in found]
    return best, bound


def _among(totals: Integers, chosen: Integers, everybody: npt.NDArray[np.bool_]) -> Integers:
    """Totals of chosen holders, as those of all."""
    among = np.zeros(len(everybody), dtype=np.int64)
    among[chosen] = totals
    return among


def _rounded(problem: ExpertProblem, relaxed: Relaxed) -> Iterator[list[Wanted]]:
    """Whole layers for the fractions: sorted by time, each layer takes its place's level."""
    for offset in _OFFSETS:
        wanted: list[Wanted] = []
        for number, entry in enumerate(problem.classes):
            mine = sorted(
                (level.level_ms, weight)
                for level, weight in relaxed.weights
                if level.number == number
            )
            reached = np.cumsum([weight for _, weight in mine])
            places = np.minimum(np.arange(entry.count) + offset, reached[-1])
            chosen = np.minimum(np.searchsorted(reached, places - 1e-9), len(mine) - 1)
            for index, count in zip(*np.unique(chosen, return_counts=True), strict=True):
                wanted.append(Wanted(number, int(count), mine[int(index)][0]))
        yield wanted
        # The same with everything a little slower, where whole layers do not fit as fractions did.
        for slower in (1.01, 1.05):
            yield [entry._replace(level_ms=entry.level_ms * slower) for entry in wanted]


def _improve(problem: ExpertProblem, wanted: list[Wanted]) -> list[Level]:
    """Make levels faster as long as everything still fits: whole levels, then single layers."""
    trials = 0
    most = max(_MIN_TRIALS, min(_MAX_TRIALS, _WORK // (len(wanted) * problem.holder_count)))
    has_improved = True
    while has_improved and trials < most:
        has_improved = False
        for index in sorted(range(len(wanted)), key=lambda i: -wanted[i].level_ms):
            for changed in _faster(problem, wanted, index):
                trials += 1
                if trials >= most:
                    break
                if _fill(problem, changed) is not None:
                    wanted, has_improved = changed, True
                    break
            if has_improved:
                break
    levels = _fill(problem, wanted)
    assert levels is not None  # noqa: S101 - what does not fit was not taken
    return levels


def _fill(problem: ExpertProblem, wanted: list[Wanted]) -> list[Level] | None:
    """Find room: greedily, and where that fails and the problem is small enough, exactly."""
    found = fill_far_first(problem, wanted)
    if found is None and len(wanted) * problem.holder_count <= _MAX_FLOWS:
        found = fill_by_flow(problem, wanted)
    return found


def _faster(problem: ExpertProblem, wanted: list[Wanted], index: int) -> Iterator[list[Wanted]]:
    entry = wanted[index]
    low = problem.level_range(entry.number)[0]
    others = [*wanted[:index], *wanted[index + 1 :]]
    same = sorted(w.level_ms for w in others if w.number == entry.number)
    below = [level for level in same if level < entry.level_ms * (1 - 1e-9)]
    for part in (0.0, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99):
        level = low + part * (entry.level_ms - low)
        if level < entry.level_ms * (1 - ACCEPTED_GAP / 3):
            yield _merged([*others, entry._replace(level_ms=level)])
    if entry.layer_count > 1:
        for count in dict.fromkeys((entry.layer_count // 2, 1)):
            for level in dict.fromkeys([low, *below]):
                if level < entry.level_ms * (1 - ACCEPTED_GAP / 3):
                    rest = entry._replace(layer_count=entry.layer_count - count)
                    yield _merged([*others, rest, Wanted(entry.number, count, level)])


def _merged(wanted: list[Wanted]) -> list[Wanted]:
    counts: dict[tuple[int, float], int] = {}
    for entry in wanted:
        key = (entry.number, entry.level_ms)
        counts[key] = counts.get(key, 0) + entry.layer_count
    return [Wanted(number, count, level) for (number, level), count in sorted(counts.items())]


def _layers_ms(problem: ExpertProblem, level: Level) -> Floats:
    entry = problem.classes[level.number]
    ends = spread(level, entry.expert_count)
    counts = np.diff(ends, axis=1, prepend=0)
    times: Floats = problem.holder_ms(level.number, counts / entry.expert_count).max(axis=1)
    return times


def _cost(problem: ExpertProblem, levels: Sequence[Level]) -> float:
    return float(sum(_layers_ms(problem, level).sum() for level in levels))


def _with_few(problem: ExpertProblem, levels: Sequence[Level]) -> ExpertProblem:
    """The problem without room on holders that are not needed, where there are very many."""
    used = sum((level.totals for level in levels), np.zeros_like(problem.room_bytes))
    near = np.lexsort((problem.expert_ms.max(axis=0) + problem.fixed_ms, used == 0))
    room = np.zeros_like(problem.room_bytes)
    chosen = near[: max(MAX_HOLDERS, int((used > 0).sum()))]
    room[chosen] = problem.room_bytes[chosen]
    return replace(problem, room_bytes=room)


def _laid_out(problem: ExpertProblem, levels: list[Level], bound_ms: float) -> ExpertCounts:
    """Even out who holds what, and give the levels to layers: the fast ones come first."""
    wanted = [Wanted(level.number, level.layer_count, level.level_ms) for level in levels]
    even = fill_evenly(_with_few(problem, levels), wanted)
    if even is not None and _cost(problem, even) <= _cost(problem, levels) * (1 + EQUAL_TIMES):
        levels = even
    numbers: list[int] = []
    ends, times = [], []
    taken = [0] * len(problem.classes)
    for level in sorted(levels, key=lambda level: (level.number, level.level_ms)):
        entry = problem.classes[level.number]
        start = taken[level.number]
        taken[level.number] += level.layer_count
        numbers += entry.layers[start : start + level.layer_count]
        ends.append(spread(level, entry.expert_count))
        times.append(_layers_ms(problem, level))
    order = np.argsort(numbers, kind="stable")
    layers_ms = np.concatenate(times)[order]
    return ExpertCounts(
        layers=tuple(sorted(numbers)),
        ends=np.concatenate(ends)[order],
        layers_ms=layers_ms,
        bound_ms=min(bound_ms, float(layers_ms.sum())),
    )
