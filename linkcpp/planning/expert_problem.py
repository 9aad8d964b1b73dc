"""Who computes which experts, as plain data: devices, layers, and the time of a placement.

A token's experts of one layer are asked for at once, and the layer is done with the slowest answer.
A *holder* is a device that may hold experts. With ``c`` of a layer's ``n`` experts, of which ``k``
are chosen for each token, it takes ``fixed_ms + expert_ms x max(1, k c / n)``: its round trip, and
its share of the chosen experts, of which it computes at least a whole one when it is asked at all.
"""

from dataclasses import dataclass

import numpy as np

from linkcpp.planning.problem import Floats, Integers

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class LayerClass:
    """Layers whose experts are alike: their numbers, and the experts of one of them."""

    layers: tuple[int, ...]
    expert_count: int
    expert_bytes: int
    used_count: int

    @property
    def count(self) -> int:
        """How many layers they are."""
        return len(self.layers)


@dataclass(frozen=True)
class ExpertProblem:
    """Layers to place, and holders: by number, what each has room for and how fast it is.

    ``expert_ms[c, h]`` is what one chosen expert of class ``c`` takes on holder ``h``.
    """

    classes: tuple[LayerClass, ...]
    room_bytes: Integers
    fixed_ms: Floats
    expert_ms: Floats

    @property
    def holder_count(self) -> int:
        """How many devices there are."""
        return len(self.room_bytes)

    def min_ms(self, number: int) -> Floats:
        """What each holder takes for a layer at least."""
        least: Floats = self.fixed_ms + self.expert_ms[number]
        return least

    def max_experts(self, number: int, level_ms: float | Floats) -> Integers:
        """How many experts of a layer each holder can have to be done within ``level_ms``.

        Levels along the last axis of the result, where there are several.
        """
        entry = self.classes[number]
        levels = np.asarray(level_ms)
        fixed, each, most = self.fixed_ms, self.expert_ms[number], self._memory_limit(number)
        if levels.ndim:
            fixed, each, most = fixed[:, None], each[:, None], most[:, None]
        work = (levels - fixed) / each
        count = np.floor(work * (entry.expert_count / entry.used_count) + _TOLERANCE)
        is_able = work >= 1 - _TOLERANCE
        limited: Integers = np.where(is_able, np.clip(count, 0, most), 0).astype(np.int64)
        return limited

    def _memory_limit(self, number: int) -> Integers:
        entry = self.classes[number]
        limit: Integers = np.minimum(self.room_bytes // entry.expert_bytes, entry.expert_count)
        return limit

    def holder_ms(self, number: int, shares: Floats) -> Floats:
        """Time of every holder for shares of a layer's work (holders along the last axis)."""
        work = np.maximum(1.0, shares * float(self.classes[number].used_count))
        times: Floats = np.where(shares > 0, self.fixed_ms + self.expert_ms[number] * work, 0.0)
        return times

    def level_range(self, number: int) -> tuple[float, float]:
        """The least time of a layer if memory were for it alone, and the time that suffices always.

        The first is infinite where all holders together cannot hold one layer.
        """
        entry = self.classes[number]
        limit = self._memory_limit(number)
        able = limit > 0
        if int(limit.sum()) < entry.expert_count:
            return np.inf, np.inf
        work = np.maximum(1.0, limit[able] * (entry.used_count / entry.expert_count))
        times = self.fixed_ms[able] + self.expert_ms[number][able] * work
        low, high = float(self.min_ms(number)[able].min()), float(times.max())
        if int(self.max_experts(number, low).sum()) >= entry.expert_count:
            return low, high
        begin = low
        while high - begin > 1e-7 * high:
            middle = (begin + high) / 2
            if int(self.max_experts(number, middle).sum()) >= entry.expert_count:
                high = middle
            else:
                begin = middle
        return high, float(times.max())


@dataclass(frozen=True)
class Level:
    """Some layers of a class that are all done within ``level_ms``.

    ``totals`` is how many experts of all these layers together each holder has.
    """

    number: int
    layer_count: int
    level_ms: float
    totals: Integers


def spread(level: Level, expert_count: int) -> Integers:
    """Cut a level's totals into layers: ``[layer, holder]`` has where a holder's experts end.

    Each layer is cut in the order of the holders, and a holder's number of experts differs by at
    most one between layers (the sum of ``(x + i) // n`` over ``i < n`` is ``x``).
    """
    ends = np.cumsum(level.totals)
    count = level.layer_count
    cut: Integers = (ends[None, :] + np.arange(count)[:, None]) // count
    return np.minimum(cut, expert_count)
