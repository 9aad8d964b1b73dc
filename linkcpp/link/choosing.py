"""Which of two paths an edge takes, from measured round trips, in words. Pure.

A direct path is preferred where it is not clearly slower: it costs no gateway. Between the borders
at which one is given up for the other lies a gap, so that noise does not make an edge change to and
fro.
"""

from collections import deque
from enum import StrEnum
from typing import NamedTuple

THROUGH_COORDINATOR = "through the coordinator"
_LATELY = 3
# A path is slow where its round trips grew to this multiple of its best, and by this much.
_SLOW_FACTOR = 2.0
_SLOW_MS = 10.0


class PathKind(StrEnum):
    """How the two machines reach each other."""

    DIRECT = "direct"
    RELAY = "relay"


class Path(NamedTuple):
    """One way to the peer; a relay has its gateway's id, and its name where the hub told it.

    A relay without an id is the coordinator, which carries a link of two of its programs.
    """

    kind: PathKind
    gateway_id: str | None = None
    gateway_name: str | None = None

    @property
    def is_last_resort(self) -> bool:
        """Whether the coordinator carries it, who has better to do."""
        return self.kind is PathKind.RELAY and self.gateway_id is None

    def __str__(self) -> str:
        if self.kind is PathKind.DIRECT:
            return "direct"
        if self.gateway_id is None:
            return THROUGH_COORDINATOR
        if self.gateway_name is None:
            return f"relay through gateway {self.gateway_id}"
        return f"relay through {self.gateway_name} ({self.gateway_id})"


class Choice(NamedTuple):
    """Whether to change over, and why, in one sentence."""

    changes: bool
    why: str


class RoundTrips:
    """Round trips of one path in milliseconds: the best ever, and the best of the last few."""

    def __init__(self, first_ms: float) -> None:
        self.best_ms = first_ms
        self._lately: deque[float] = deque((first_ms,), maxlen=_LATELY)

    @property
    def now_ms(self) -> float:
        """What the path has lately."""
        return min(self._lately)

    @property
    def is_slow(self) -> bool:
        """Whether it has become much slower than it was."""
        is_full = len(self._lately) == _LATELY
        return is_full and self.now_ms > max(_SLOW_FACTOR * self.best_ms, self.best_ms + _SLOW_MS)

    def add(self, rtt_ms: float) -> None:
        """Take one more measurement."""
        self.best_ms = min(self.best_ms, rtt_ms)
        self._lately.append(rtt_ms)


def choose(current: Path, current_ms: float, other: Path, other_ms: float) -> Choice:
    """Decide between the path in use and another one that works."""
    both = f"{_ms(other_ms)} against {_ms(current_ms)}"
    if current.is_last_resort:
        is_better = other_ms <= 1.25 * current_ms + 2.0
    elif other.kind is current.kind:
        is_better = other_ms < 0.7 * current_ms - 2.0
    elif other.kind is PathKind.DIRECT:
        is_better = other_ms <= 1.25 * current_ms + 2.0
    else:
        is_better = other_ms < 0.6 * current_ms - 5.0
    if is_better:
        return Choice(True, f"{other}: {both} ({current})")
    return Choice(False, f"{current}: {_ms(current_ms)} against {_ms(other_ms)} ({other})")


def _ms(value: float) -> str:
    return f"{value:.1f} ms"
