"""Nonces that were used: no proof is taken twice."""

from collections import deque

from linkcpp.registry.proofs import PROOF_WINDOW_SECONDS

_MOST = 200_000


class NonceMemory:
    """Remembers nonces for as long as a proof with them could be in time. Pure: time is given."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._seen: set[str] = set()
        self._order: deque[tuple[float, str]] = deque()

    def is_new(self, nonce: str, proof_time: float, now: float) -> bool:
        """Note a nonce; tell whether it was never seen.

        A proof from before the hub's start may have been used then, so it counts as seen; machines
        take their time from the hub, so they have no such proofs. Where there are too many nonces
        to remember, none is new.
        """
        while self._order and self._order[0][0] < now:
            self._seen.discard(self._order.popleft()[1])
        if proof_time < self._started or nonce in self._seen or len(self._order) >= _MOST:
            return False
        self._seen.add(nonce)
        self._order.append((now + 2 * PROOF_WINDOW_SECONDS, nonce))
        return True
