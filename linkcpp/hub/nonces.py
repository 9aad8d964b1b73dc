"""Nonces that were used: no proof is taken twice."""

import heapq

from linkcpp.registry.proofs import PROOF_WINDOW_SECONDS

_MAX_NONCES = 200_000


class NonceMemory:
    """Remembers nonces for as long as a proof with them could be in time. Pure: time is given."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._seen: set[str] = set()
        # A heap, since the clock may be set back: what ends first comes first.
        self._order: list[tuple[float, str]] = []

    def note_time(self, now: float) -> None:
        """Note what a machine is told to be the time, before it makes a proof with it."""
        self._started = min(self._started, now)

    def is_new(self, nonce: str, proof_time: float, now: float) -> bool:
        """Note a nonce; tell whether it was never seen.

        A proof from before the hub's start may have been used then, so it counts as seen; machines
        take their time from the hub, so they have no such proofs. Where the clock was set back to
        before that start, the first moment of which this was told (``note_time``) takes its place.
        Where there are too many nonces to remember, none is new.
        """
        self.note_time(now)
        while self._order and self._order[0][0] < now:
            self._seen.discard(heapq.heappop(self._order)[1])
        if proof_time < self._started or nonce in self._seen or len(self._order) >= _MAX_NONCES:
            return False
        self._seen.add(nonce)
        # Also until a proof of a time to come, from before the clock was set back, is too old.
        until = max(now, proof_time) + 2 * PROOF_WINDOW_SECONDS
        heapq.heappush(self._order, (until, nonce))
        return True
