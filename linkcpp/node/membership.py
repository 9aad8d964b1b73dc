"""A node's place in a hub: heartbeats, what it tells of itself, and the edges it is asked into.

Everything goes out from here, so that a machine behind an address translation needs no open port.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from time import monotonic
from typing import Protocol

from linkcpp.cluster.records import NodeRecord
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.registry.client import HubClient
from linkcpp.registry.connection import HubError, HubRefusedError
from linkcpp.registry.edges import CloseEvent, EdgeEvent, EdgeOffer, HubEvent, ProbeEvent
from linkcpp.registry.fields import MAX_EDGES_PER_NODE
from linkcpp.registry.records import HEARTBEAT_SECONDS, Heartbeat, HeldUnits, NodeState
from linkcpp.registry.relay_rtt import relay_rtts_ms

MEASURE_SECONDS = 120.0

# After a deployment has ended somebody may plan the next one at once.
_LOOK_SECONDS = 2.0
_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 30.0
# Nodes that were started together must not come all at once for ever.
_SPREAD = 0.1
_LEAVING_SECONDS = 2.0
_NOTABLE_MEMORY_SHARE = 0.02
_NOTABLE_RTT_SHARE = 0.25

_log = logging.getLogger(__name__)


class EdgeTaker(Protocol):
    """What takes part in edges for this node."""

    @property
    def edge_ids(self) -> tuple[str, ...]:
        """The edges that it takes part in."""
        ...

    async def offer(self, offer: EdgeOffer) -> None:
        """Take part in an edge, or take another way for a known one.

        Raises:
            LinkcppError: this node does not.
        """
        ...

    async def close_link(self, link_id: str) -> None:
        """End an edge."""
        ...


class RevokedError(LinkcppError):
    """The hub does not want this machine any more."""


class Membership:
    """Keeps a node known to its hub, through whatever happens to either of them.

    ``describe`` and ``held`` tell the node's state as it is now; ``direct_urls`` are where its
    agent may be tried without a relay.
    """

    def __init__(
        self,
        client: HubClient,
        edges: EdgeTaker,
        *,
        describe: Callable[[], Awaitable[NodeRecord]],
        held: Callable[[], Iterable[HeldUnits]],
        direct_urls: Callable[[], tuple[str, ...]],
    ) -> None:
        self._client = client
        self._edges = edges
        self._describe = describe
        self._held = held
        self._direct_urls = direct_urls
        self._rtts_ms: dict[str, float] = {}
        self._is_away = False
        self._wake = asyncio.Event()
        self._heard = asyncio.Event()

    async def run(self) -> None:
        """Stay until cancelled, then say goodbye.

        Raises:
            RevokedError: an admin of the hub turned this machine out.
        """
        loops = (self._keep_beating(), self._keep_listening(), self._keep_measuring())
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            # Only then: a heartbeat that came later would bring the node back.
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave()

    async def _leave(self) -> None:
        """Tell the hub at once what it would else learn from missed heartbeats."""
        with contextlib.suppress(HubError, TimeoutError):
            async with asyncio.timeout(_LEAVING_SECONDS):
                await self._client.leave()

    async def _keep_beating(self) -> None:
        told: NodeState | None = None
        sequence = 0
        while True:
            pause_seconds = HEARTBEAT_SECONDS / 2
            # Whoever wakes it from here on wants a heartbeat that begins later than this one.
            self._wake.clear()
            state = await self._state()
            news = state if told is None or has_news(told, state) else None
            edges = self._edges.edge_ids[:MAX_EDGES_PER_NODE]
            beat = Heartbeat(sequence=sequence, state=news, edges=edges)
            try:
                answer = await self._client.heartbeat(beat)
            except HubError as error:
                self._note_failure(error)
            else:
                self._note_success()
                told = None if answer.wants_state else news or told
                pause_seconds = 0.0 if answer.wants_state else answer.interval_seconds
                for offer in answer.offers:
                    await self._take_part(offer)
                for edge_id in answer.close_edges:
                    await self._edges.close_link(edge_id)
            sequence += 1
            await self._wait_for_news(told, pause_seconds)

    async def _wait_for_news(self, told: NodeState | None, max_seconds: float) -> None:
        """Wait until the next heartbeat is due, or sooner where a plan would notice a change."""
        spread = max_seconds * random.uniform(1 - _SPREAD, 1 + _SPREAD)  # noqa: S311 - no secret
        due = monotonic() + max(spread, 0.05)
        while (left := due - monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                    await self._wake.wait()
            if self._wake.is_set() or (told is not None and has_news(told, await self._state())):
                return

    async def _keep_listening(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._client.events() as events:
                    # What waited while nobody listened comes with the next heartbeat.
                    self._wake.set()
                    async for event in events:
                        pause_seconds = _FIRST_PAUSE_SECONDS
                        await self._take(event)
            except HubError as error:
                self._note_failure(error)
            self._heard.clear()
            with contextlib.suppress(TimeoutError):
                # Until a heartbeat tells that the hub is there again.
                async with asyncio.timeout(pause_seconds * random.uniform(0.5, 1.0)):  # noqa: S311
                    await self._heard.wait()
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    async def _take(self, event: HubEvent) -> None:
        if isinstance(event, EdgeEvent):
            await self._take_part(event.offer)
        elif isinstance(event, CloseEvent):
            await self._edges.close_link(event.edge_id)
        elif isinstance(event, ProbeEvent):
            self._wake.set()
        else:
            raise revoked(self._client.url)

    async def _take_part(self, offer: EdgeOffer) -> None:
        try:
            await self._edges.offer(offer)
        except LinkcppError as error:
            _log.warning("not in an edge with %s: %s", printable(offer.peer_name, 64), error)

    async def _keep_measuring(self) -> None:
        while True:
            with contextlib.suppress(HubError):
                listed = await self._client.gateways()
                self._rtts_ms = await relay_rtts_ms(listed.gateways)
                self._wake.set()
            await asyncio.sleep(MEASURE_SECONDS if self._rtts_ms else HEARTBEAT_SECONDS)

    async def _state(self) -> NodeState:
        return NodeState.model_validate(
            {
                "record": await self._describe(),
                "direct_urls": self._direct_urls(),
                "held": tuple(self._held()),
                "relay_rtts_ms": self._rtts_ms,
            }
        )

    def _note_failure(self, error: HubError) -> None:
        if isinstance(error, HubRefusedError) and error.is_final:
            raise revoked(self._client.url) from error
        if not self._is_away:
            _log.warning("%s Trying again until it answers; edges that are open stay.", error)
        self._is_away = True

    def _note_success(self) -> None:
        if self._is_away:
            _log.info("the hub at %s answers again", self._client.url)
            self._heard.set()
        self._is_away = False


def has_news(told: NodeState, now: NodeState) -> bool:
    """Whether a hub should hear the whole state again. Pure.

    Free memory moves with every breath of a machine, and round trips with every cloud: changes
    that no plan would notice are not told.
    """
    if told.direct_urls != now.direct_urls or told.held != now.held:
        return True
    if set(told.relay_rtts_ms) != set(now.relay_rtts_ms):
        return True
    if any(
        abs(now.relay_rtts_ms[gateway] - rtt) > max(1.0, _NOTABLE_RTT_SHARE * rtt)
        for gateway, rtt in told.relay_rtts_ms.items()
    ):
        return True
    return _memory_changed(told.record, now.record) or _without_memory(
        told.record
    ) != _without_memory(now.record)


def _memory_changed(told: NodeRecord, now: NodeRecord) -> bool:
    if len(told.devices) != len(now.devices):
        return True
    pairs = [
        (old.offered_bytes, new.offered_bytes)
        for old, new in zip(told.devices, now.devices, strict=True)
    ]
    pairs.append((told.slice_bytes or 0, now.slice_bytes or 0))
    return any(abs(new - old) > _NOTABLE_MEMORY_SHARE * max(new, old) for old, new in pairs)


def _without_memory(record: NodeRecord) -> NodeRecord:
    devices = tuple(
        device.model_copy(update={"offered_bytes": 0, "free_bytes": 0}) for device in record.devices
    )
    return record.model_copy(update={"devices": devices, "slice_bytes": None})


def revoked(url: str) -> RevokedError:
    """Say that the hub at ``url`` turned this machine out."""
    return RevokedError(
        f"The hub at {url} does not know this machine any more: an admin revoked it.",
        hint="Ask for a new join token, and `linkcpp join` again.",
    )
