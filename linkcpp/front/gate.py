"""Lets requests through to llama-server, except while it has something to forget."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx

from linkcpp.common.errors import LinkcppError
from linkcpp.common.network_errors import in_words
from linkcpp.dispatch.failures import FailureCounter
from linkcpp.front.upstream import Upstream

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
CLEAN_SECONDS = 60.0
WAIT_SECONDS = 90.0
RETRY_SECONDS = 0.5
_MAX_ROUNDS = 10


class GateShutError(Exception):
    """A request waited too long for the gate to open again."""


class InFlightRequest:
    """A request under way; what was counted before it began is not its fault."""

    def __init__(self, counter: FailureCounter) -> None:
        self._counter = counter
        self._before = counter.value
        self.failure_seen = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        """Whether any call has failed since the request began, as of this very moment."""
        return self._counter.value != self._before


class Gate:
    """Keeps count of the requests under way, and shuts after a failure until all is clean.

    Requests that failed end first; then ``clean`` makes llama-server forget. ``watch`` must run.
    """

    def __init__(self, counter: FailureCounter, clean: Callable[[], Awaitable[None]]) -> None:
        self._counter = counter
        self._clean = clean
        self._clean_count = counter.value
        self._in_flight: set[InFlightRequest] = set()
        self._opened = asyncio.Condition()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[InFlightRequest]:
        """Pass as soon as the gate is open.

        Raises:
            GateShutError: it stays shut.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS), self._opened:
                await self._opened.wait_for(lambda: self._counter.value == self._clean_count)
        except TimeoutError:
            raise GateShutError("llama-server is busy forgetting a failed request.") from None
        request = InFlightRequest(self._counter)
        self._in_flight.add(request)
        try:
            yield request
        finally:
            self._in_flight.discard(request)

    async def watch(self) -> None:
        """Look for failures for ever.

        Raises:
            LinkcppError: llama-server cannot be made to forget, so it must be started again.
        """
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._counter.value != self._clean_count:
                await self._recover()

    async def _recover(self) -> None:
        give_up_at = time.monotonic() + CLEAN_SECONDS
        for request in self._in_flight:
            request.failure_seen.set()
        while self._in_flight:
            if time.monotonic() > give_up_at:
                raise LinkcppError("Requests that failed do not end.")
            await asyncio.sleep(LOOK_SECONDS)
        for _ in range(_MAX_ROUNDS):
            count = self._counter.value
            # A batch that is being computed may still fail, and is over when this returns.
            await self._clean()
            if self._counter.value == count:
                _log.info("llama-server has forgotten what it kept of failed requests")
                async with self._opened:
                    self._clean_count = count
                    self._opened.notify_all()
                return
        raise LinkcppError("llama-server goes on with requests that failed.")


class SlotEraser:
    """Erases llama-server's slots: what they keep of prompts would be used again."""

    def __init__(self, upstream: Upstream, slot_count: int) -> None:
        self._upstream = upstream
        self._slot_count = slot_count

    async def erase_all(self) -> None:
        """Erase every slot; llama-server does so between two batches, once a slot is idle.

        Raises:
            LinkcppError: it does not.
        """
        for slot in range(self._slot_count):
            # Another process's readiness cannot be awaited, only asked for.
            while (answer := await self._erase(slot)) is None:  # noqa: ASYNC110
                await asyncio.sleep(RETRY_SECONDS)
            if answer.status_code != httpx.codes.OK:
                raise LinkcppError(f"Slot {slot} cannot be erased: {answer.text[:300]}")

    async def _erase(self, slot: int) -> httpx.Response | None:
        """Ask once; ``None`` where llama-server is still loading, when there is nothing to lose."""
        target = f"/slots/{slot}?action=erase"
        try:
            answer = await self._upstream.post(target, timeout_seconds=CLEAN_SECONDS)
        except httpx.ConnectError:
            return None
        except httpx.HTTPError as error:
            raise LinkcppError(f"Slot {slot} cannot be erased: {in_words(error)}.") from error
        return None if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE else answer
