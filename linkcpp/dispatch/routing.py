"""Who computes which pair, and how long to wait for it. Pure: no clocks, no sockets.

Every expert of a layer has one holder at a time, so all rows of an expert are computed together,
as one engine would do it. Replicas share the load by how fast they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from linkcpp.model.slices.segments import Segment
from linkcpp.worker.slabs import experts_by_layer

NOBODY = -1
# Smoothing as in RFC 6298 (TCP's retransmission timer): a mean and a mean deviation.
_MEAN_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4
_FIRST_DEADLINE_MS = 2_000.0
_FIRST_DEADLINE_MS_PER_PAIR = 5.0
_MAX_DEADLINE_MS = 60_000.0
_MAX_DOUBLINGS = 4
_CLASSES = 24
# Pairs whose time equals what a request costs by itself, for comparing requests of any size.
_FIXED_PAIRS = 8
_IDLE_DECAY = 0.9


@dataclass(slots=True)
class Latency:
    """What a holder's answers took, by the size of the request (powers of two of pairs)."""

    mean_ms: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)
    deviation_ms: list[float] = field(default_factory=lambda: [0.0] * _CLASSES)
    score: float = 0.0
    misses: int = 0

    def observe(self, pairs: int, took_ms: float) -> None:
        """Take note of an answer."""
        size = _size_class(pairs)
        mean = self.mean_ms[size]
        if mean:
            error = took_ms - mean
            self.mean_ms[size] = mean + _MEAN_GAIN * error
            self.deviation_ms[size] += _DEVIATION_GAIN * (abs(error) - self.deviation_ms[size])
        else:
            self.mean_ms[size], self.deviation_ms[size] = took_ms, took_ms / 2
        self.misses = 0
        self._score(pairs, took_ms)

    def observe_miss(self, pairs: int, waited_ms: float) -> None:
        """Take note that no answer came in time: next time it gets twice as long."""
        self.misses += 1
        self._score(pairs, 2 * waited_ms)

    def _score(self, pairs: int, took_ms: float) -> None:
        per_pair = took_ms / (pairs + _FIXED_PAIRS)
        self.score += _MEAN_GAIN * (per_pair - self.score) if self.score else per_pair

    def forgive(self) -> None:
        """Let a holder that had nothing to do look better, so that it is tried again."""
        self.score *= _IDLE_DECAY

    def deadline_ms(self, pairs: int, floor_ms: float) -> float:
        """Return how long to wait for ``pairs`` pairs before somebody else is asked."""
        size = _size_class(pairs)
        if self.mean_ms[size]:
            wait = 4 * self.mean_ms[size] + 8 * self.deviation_ms[size]
        else:
            known = [k for k, mean in enumerate(self.mean_ms) if mean]
            if not known:
                return _FIRST_DEADLINE_MS + _FIRST_DEADLINE_MS_PER_PAIR * pairs
            nearest = min(known, key=lambda k: abs(k - size))
            wait = 8 * self.mean_ms[nearest] * 2.0 ** max(size - nearest, 0)
        patience = 2.0 ** min(self.misses, _MAX_DOUBLINGS)
        return min(max(wait, floor_ms) * patience, _MAX_DEADLINE_MS)


def _size_class(pairs: int) -> int:
    return min(max(pairs, 1).bit_length(), _CLASSES) - 1


class HolderView(NamedTuple):
    """A holder as routing sees it: its number, what it holds, and its score (less is faster)."""

    number: int
    segments: tuple[Segment, ...]
    score: float


class LayerRoutes(NamedTuple):
    """The holders of one layer's experts.

    ``chosen[expert]`` is the holder that is asked first, or ``NOBODY``; ``owners`` is the same as a
    list, which is faster for a few experts. ``holds[row][expert]``
    tells for every holder, by its row in ``numbers``, what it has; rows are sorted by score.
    """

    chosen: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int32]
    holds: npt.NDArray[np.bool_]
    owners: list[int]


Routes = Mapping[int, LayerRoutes]


def plan_routes(expert_counts: Mapping[int, int], holders: Iterable[HolderView]) -> Routes:
    """Choose a holder for each expert of each layer (``expert_counts``: experts by layer).

    Experts go one after the other to the holder that would be done first, so replicas share the
    work and slower ones get less. What holders have beyond the model is ignored.
    """
    ordered = sorted(holders, key=lambda view: (view.score, view.number))
    held = [experts_by_layer(view.segments) for view in ordered]
    scores = _usable_scores(ordered)
    routes = {}
    for layer, count in expert_counts.items():
        holds = np.zeros((len(ordered), count), np.bool_)
        for row, layers in enumerate(held):
            holds[row, [expert for expert in layers.get(layer, ()) if expert < count]] = True
        chosen = np.full(count, NOBODY, np.int32)
        load = np.zeros(len(ordered))
        for expert in np.flatnonzero(holds.any(axis=0)):
            candidates = np.flatnonzero(holds[:, expert])
            best = candidates[np.argmin((load[candidates] + 1) * scores[candidates])]
            load[best] += 1
            chosen[expert] = ordered[best].number
        numbers = np.array([view.number for view in ordered], np.int32)
        routes[layer] = LayerRoutes(chosen, numbers, holds, chosen.tolist())
    return routes


def _usable_scores(ordered: Sequence[HolderView]) -> npt.NDArray[np.float64]:
    """Give a holder without history the score of the fastest one, so that it gets one."""
    known = [view.score for view in ordered if view.score > 0]
    fastest = min(known, default=1.0)
    return np.array([view.score if view.score > 0 else fastest for view in ordered])


def next_holders(
    routes: LayerRoutes, expert_ids: npt.NDArray[np.int32], excluded: set[int]
) -> npt.NDArray[np.int32]:
    """Choose holders for ids whose first choice failed; ``NOBODY`` where none is left."""
    chosen = routes.chosen.copy()
    for expert in np.unique(expert_ids).tolist():
        if int(chosen[expert]) not in excluded:
            continue
        others = [
            number
            for number in routes.numbers[routes.holds[:, expert]].tolist()
            if number not in excluded
        ]
        chosen[expert] = others[0] if others else NOBODY
    result: npt.NDArray[np.int32] = chosen[expert_ids]
    return result
