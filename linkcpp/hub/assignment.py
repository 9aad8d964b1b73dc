"""Which gateway an edge goes through. Pure."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

# An unmeasured way is taken to be this long: measured ways are preferred, bad ones not.
UNMEASURED_MS = 150.0
# Each edge that a gateway has makes it as unattractive as so much round trip time.
_MS_PER_EDGE = 0.05


class Candidate(NamedTuple):
    """A gateway that is online."""

    gateway_id: str
    edge_count: int


def choose_gateway(
    candidates: Iterable[Candidate],
    *,
    avoid: Collection[str] = (),
    rtts_ms: Iterable[Mapping[str, float]] = (),
) -> str | None:
    """Choose the gateway with the shortest way, counting how busy it is; ``None`` where none is.

    ``rtts_ms`` are the measured round trips of each side by gateway. Gateways to ``avoid`` are
    taken only where there is no other: better a way that failed once than none.
    """
    sides = tuple(rtts_ms)

    def cost(candidate: Candidate) -> tuple[bool, float, str]:
        way = sum(side.get(candidate.gateway_id, UNMEASURED_MS) for side in sides)
        load = candidate.edge_count * _MS_PER_EDGE
        return candidate.gateway_id in avoid, way + load, candidate.gateway_id

    best = min(candidates, key=cost, default=None)
    return best.gateway_id if best else None
