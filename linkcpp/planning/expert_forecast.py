"""What one decoded token will cost with its experts spread: time, round trips, bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linkcpp.planning.backbone import DISPATCH_MS, FRAME_BYTES, PAIR_BYTES, Setting
from linkcpp.planning.expert_copies import Copies
from linkcpp.planning.problem import Floats

_F32_BYTES = 4


@dataclass(frozen=True)
class Forecast:
    """Of one token, all layers together.

    ``layers_ms`` is what the slowest holders take if every holder of a layer is asked;
    ``typical_ms`` is the whole token's mean where a holder counts by how likely it is asked.
    Arrays are by holder: its part of all the experts' work, and its time if it is asked in every
    layer of which it has a part.
    """

    token_ms: float
    network_ms: float
    layers_ms: float
    typical_ms: float
    round_trip_count: int
    sent_bytes: float
    received_bytes: float
    work_shares: Floats
    holder_compute_ms: Floats
    holder_network_ms: Floats


def forecast(
    setting: Setting, placed: Sequence[Copies], weights: Sequence[Floats] | None
) -> Forecast:
    """Work it out for a placement; ``weights`` are shares of each layer's work by expert."""
    problem = setting.problem
    count = problem.holder_count
    shares = np.array(
        [
            np.bincount(
                entry.first,
                weights=np.full(len(entry.first), 1 / len(entry.first))
                if weights is None
                else weights[row],
                minlength=count,
            )
            for row, entry in enumerate(placed)
        ]
    )
    used = np.array([problem.classes[entry.number].used_count for entry in placed])[:, None]
    each = problem.expert_ms[[entry.number for entry in placed]]
    is_asked = shares > 0
    work = np.where(is_asked, np.maximum(1.0, shares * used), 0.0)
    network = np.where(is_asked, problem.fixed_ms + work * setting.row_ms, 0.0)
    compute = work * (each - setting.row_ms)
    times = network + compute
    slowest = times.argmax(axis=1)
    rows = np.arange(len(placed))
    layers_ms = float(times[rows, slowest].sum())
    base = setting.backbone.compute_ms + DISPATCH_MS * len(placed)
    chance = 1 - (1 - np.minimum(shares, 1.0)) ** used
    is_remote = np.array([not holder.offer.is_coordinator for holder in setting.holders])
    row_bytes = setting.backbone.costs.inventory.shape.hidden_size * _F32_BYTES
    messages = float(chance[:, is_remote].sum())
    pairs = float((shares * used)[:, is_remote].sum())
    return Forecast(
        token_ms=base + layers_ms,
        network_ms=float(network[rows, slowest].sum()),
        layers_ms=layers_ms,
        typical_ms=base + _typical_ms(setting, shares * used, chance, each),
        round_trip_count=int(is_asked[:, is_remote].any(axis=1).sum()),
        sent_bytes=messages * (row_bytes + FRAME_BYTES) + pairs * PAIR_BYTES,
        received_bytes=messages * FRAME_BYTES + pairs * row_bytes,
        work_shares=shares.mean(axis=0),
        holder_compute_ms=compute.sum(axis=0),
        holder_network_ms=network.sum(axis=0),
    )


def _typical_ms(setting: Setting, work: Floats, chance: Floats, each: Floats) -> float:
    """Mean of the slowest answer: a holder decides if it is asked and no slower one is."""
    asked = np.maximum(work / np.maximum(chance, 1e-12), 1.0)
    times = np.where(chance > 0, setting.problem.fixed_ms + asked * each, 0.0)
    order = np.argsort(-times, axis=1, kind="stable")
    times = np.take_along_axis(times, order, axis=1)
    chance = np.take_along_axis(chance, order, axis=1)
    no_slower = np.ones_like(chance)
    no_slower[:, 1:] = np.cumprod(1 - chance, axis=1)[:, :-1]
    return float((times * chance * no_slower).sum())
