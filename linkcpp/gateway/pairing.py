"""Who is paired with whom: connections of edges come and go, and what follows from it. Pure.

Every connection that takes part gets a seat with a number of its own, its generation. A newer
connection of the same side takes the place of the older one, whose end, when it is heard of at
last, then changes nothing.
"""

from typing import NamedTuple

from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.relay import RelayCloseCode


class Seat(NamedTuple):
    """One connection's part in an edge."""

    edge_id: str
    role: EdgeRole
    generation: int


class Paired(NamedTuple):
    """Both sides are there."""

    newer: Seat
    older: Seat


class Ended(NamedTuple):
    """A connection has to be closed; it has no seat any more."""

    seat: Seat
    code: int
    reason: str


Event = Paired | Ended


class PairingTable:
    """The seats of all edges; an edge without a seat is forgotten."""

    def __init__(self) -> None:
        self._seats: dict[str, dict[EdgeRole, Seat]] = {}
        self._generation = 0
        self.pair_count = 0

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, edge_id: str) -> bool:
        return edge_id in self._seats

    @property
    def edge_ids(self) -> tuple[str, ...]:
        """All edges that have a seat."""
        return tuple(self._seats)

    def attach(self, edge_id: str, role: EdgeRole) -> tuple[Seat, list[Event]]:
        """Give a new connection its seat."""
        events: list[Event] = []
        if (older := self._seats.get(edge_id, {}).get(role)) is not None:
            events = [
                Ended(older, RelayCloseCode.REPLACED, "a newer connection of this side is here"),
                *self._leave(older, RelayCloseCode.PEER_GONE, "the other side dialled anew"),
            ]
        self._generation += 1
        seat = Seat(edge_id, role, self._generation)
        sides = self._seats.setdefault(edge_id, {})
        events += [Paired(seat, other) for other in sides.values()]
        sides[role] = seat
        self.pair_count += len(sides) == 2
        return seat, events

    def detach(self, seat: Seat, code: int, reason: str) -> list[Ended]:
        """A connection is gone; the other side, if it was paired, ends with ``code``."""
        if self._seats.get(seat.edge_id, {}).get(seat.role) != seat:
            return []
        return self._leave(seat, code, reason)

    def close(self, edge_id: str, code: int, reason: str) -> list[Ended]:
        """End an edge."""
        sides = self._seats.pop(edge_id, {})
        self.pair_count -= len(sides) == 2
        return [Ended(seat, code, reason) for seat in sides.values()]

    def _leave(self, seat: Seat, code: int, reason: str) -> list[Ended]:
        # Both seats go: what the other side said was meant for this connection and no later one.
        return [event for event in self.close(seat.edge_id, code, reason) if event.seat != seat]
