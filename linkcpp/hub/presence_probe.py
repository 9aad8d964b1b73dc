"""Whether nodes are there at this moment: those that were not just heard of are asked.

A node that was killed is missed only after three heartbeats, and nobody may count on it meanwhile.
The question goes out as an event, and the answer is a heartbeat that comes at once.
"""

import asyncio
from collections.abc import Callable, Collection
from time import monotonic

from linkcpp.hub.events import EventSockets
from linkcpp.registry.edges import ProbeEvent
from linkcpp.registry.records import HEARTBEAT_SECONDS

ANSWER_SECONDS = 3.0
# After a start of the hub nodes are on their way back, and come with their next heartbeat at last.
_RETURN_SECONDS = 1.2 * HEARTBEAT_SECONDS
# Many nodes are asked so rarely that their answers are no more than so many a second.
_MAX_ANSWERS_PER_SECOND = 500


class PresenceProbe:
    """Asks nodes whether they are there. Needs a running event loop.

    Who was heard of within ``fresh_seconds`` is there.
    """

    def __init__(self, events: EventSockets, *, clock: Callable[[], float] = monotonic) -> None:
        self.fresh_seconds = 1.0
        self._events = events
        self._clock = clock
        self._started_at = clock()
        self._heard_at: dict[str, float] = {}
        self._answers: dict[str, asyncio.Future[None]] = {}
        events.on_end = self.lost

    def heard(self, node_id: str) -> None:
        """Note that a node told of itself."""
        self._heard_at[node_id] = self._clock()
        if answer := self._answers.pop(node_id, None):
            answer.set_result(None)

    def lost(self, node_id: str) -> None:
        """Note that a node's connection broke: what was heard before tells nothing any more."""
        self._heard_at.pop(node_id, None)

    async def silent(self, node_ids: Collection[str]) -> frozenset[str]:
        """Ask nodes whether they are there; return those that do not answer in time."""
        now = self._clock()
        fresh_since = now - max(self.fresh_seconds, len(node_ids) / _MAX_ANSWERS_PER_SECOND)
        asked = {
            node_id: self._ask(node_id)
            for node_id in node_ids
            if self._heard_at.get(node_id, fresh_since) <= fresh_since
        }
        if asked:
            returning_seconds = self._started_at + _RETURN_SECONDS - now
            await asyncio.wait(asked.values(), timeout=max(ANSWER_SECONDS, returning_seconds))
        return frozenset(node_id for node_id, answer in asked.items() if not answer.done())

    def _ask(self, node_id: str) -> "asyncio.Future[None]":
        """Ask, unless the answer to an earlier question is still to come."""
        answer = self._answers.get(node_id)
        if answer is None:
            answer = self._answers[node_id] = asyncio.get_running_loop().create_future()
            self._events.push(node_id, ProbeEvent())
        return answer
