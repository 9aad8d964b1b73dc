"""Each share of the plan's experts with a worker for it, brought back as often as it goes away.

A member that has no worker is not a failure of the deployment: replicas or the fallback compute its
experts meanwhile, or requests that need them are refused.
"""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from linkcpp.common.errors import LinkcppError
from linkcpp.engine.records import EngineLocation
from linkcpp.launch.events import Noticed
from linkcpp.launch.experts.decisions import absence_clause, back_sentence, lost_sentence
from linkcpp.launch.experts.dispatching import Dispatcher, NewHolder, holder_name
from linkcpp.launch.experts.events import DispatchSeen, WorkerMoved, WorkerStarted
from linkcpp.launch.experts.files import ExpertFiles
from linkcpp.launch.experts.records import ExpertsState, WorkerPhase
from linkcpp.launch.failing import NodeMissingError
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.watch import Emit
from linkcpp.node.records import WorkerId
from linkcpp.planning.records import ExpertShare

log = logging.getLogger("linkcpp.launch")

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 10.0
LINK_SECONDS = 60.0
LINK_POLL_SECONDS = 0.1
# A link that fails opens again within seconds where the worker lives.
UNLINKED_SECONDS = 60.0
UNLINKED_POLL_SECONDS = 2.0

Find = Callable[[ExpertShare], Coroutine[Any, Any, FoundNode]]


@dataclass(frozen=True)
class Circumstances:
    """What all members of a deployment share. ``experts`` gives the state as it is now."""

    deployment: str
    files: ExpertFiles
    engine: EngineLocation
    folder: Path
    dispatcher: Dispatcher
    find: Find
    emit: Emit
    experts: Callable[[], ExpertsState]


class Linking(NamedTuple):
    """How long to wait for the link to a worker, and whether waiting is of no use any more."""

    within_seconds: float = LINK_SECONDS
    has_ended: Callable[[], bool] = lambda: False


class Member(ABC):
    """One share. ``first_try`` is done when its first worker computes, or has failed to."""

    def __init__(self, index: int, share: ExpertShare, around: Circumstances) -> None:
        self._index = index
        self._share = share
        self._around = around
        self._emit = around.emit
        self._has_served = False
        self._left_at: datetime | None = None
        self.first_try: asyncio.Future[LinkcppError | None] = (
            asyncio.get_running_loop().create_future()
        )

    async def run(self) -> None:
        """Keep a worker there, for ever."""
        pause_seconds = FIRST_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            try:
                reason = await self._serve()
            except LinkcppError as error:
                reason = self._note_failure(error)
            except Exception as error:
                # Whatever a node brings about, it must not end what the others serve.
                log.exception("internal error")
                reason = self._note_failure(LinkcppError(f"Defect in linkcpp: {error!r}."))
            self._note_loss(reason)
            is_stable = time.monotonic() - began > MAX_PAUSE_SECONDS
            pause_seconds = FIRST_PAUSE_SECONDS if is_stable else pause_seconds
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, MAX_PAUSE_SECONDS)

    def _note_failure(self, error: LinkcppError) -> str:
        if not self.first_try.done():
            self.first_try.set_result(error)
        if isinstance(error, NodeMissingError):
            return absence_clause(self._left_at, datetime.now().astimezone())
        return error.message

    @abstractmethod
    async def _serve(self) -> str:
        """Bring a worker up and watch it; returns why it went away.

        Raises:
            LinkcppError: it does not come up.
        """

    def _move(self, phase: WorkerPhase, detail: str | None = None) -> None:
        self._emit(WorkerMoved(self._index, phase, detail))

    def _note_loss(self, reason: str) -> None:
        """Say it once when a worker that computed does not any more."""
        before = self._around.experts().workers[self._index]
        self._move(WorkerPhase.AWAY, reason)
        if before.phase is WorkerPhase.UP:
            self._left_at = datetime.now().astimezone()
            self._emit(Noticed(lost_sentence(self._around.experts(), self._index, reason)))

    def _note_return(self) -> None:
        self._move(WorkerPhase.UP)
        if self._has_served:
            self._emit(Noticed(back_sentence(self._share)))
        self._has_served = True
        if not self.first_try.done():
            self.first_try.set_result(None)

    @asynccontextmanager
    async def _joined(
        self,
        holder: NewHolder,
        worker_id: WorkerId | None,
        slab_bytes: int | None,
        linking: Linking = Linking(),  # noqa: B008 - it is immutable
    ) -> AsyncIterator[None]:
        """Have a worker or an rpc-server used while the block runs.

        Raises:
            LinkcppError: it is refused, or cannot be linked to.
        """
        dispatcher = self._around.dispatcher
        name = holder.name
        await dispatcher.add(holder)
        try:
            self._emit(WorkerStarted(self._index, name, worker_id, slab_bytes))
            await self._linked(name, linking)
            self._note_return()
            yield
        finally:
            with contextlib.suppress(LinkcppError):
                # The last counts of a worker go with it.
                self._emit(DispatchSeen(await dispatcher.status()))
                await dispatcher.remove(name)

    async def _hang(self) -> str:
        """Wait until a worker that runs has answered nothing for long; returns that in a clause.

        One whose rows were refused does answer.
        """
        since: float | None = None
        while True:
            await asyncio.sleep(UNLINKED_POLL_SECONDS)
            worker = self._around.experts().workers[self._index]
            if worker.is_linked or worker.link == "refused":
                since = None
                continue
            since = since or time.monotonic()
            if (seconds := time.monotonic() - since) > UNLINKED_SECONDS:
                why = worker.link_detail or "no link"
                return f"it hung: it has answered nothing for {seconds:.0f} s ({why})"

    def _holder_name(self) -> str:
        started = self._around.experts().workers[self._index].start_count + 1
        return holder_name(self._share.node_name, self._index, started)

    async def _linked(self, name: str, linking: Linking) -> None:
        give_up_at = time.monotonic() + linking.within_seconds
        loaded_bytes = 0
        while True:
            status = await self._around.dispatcher.status()
            worker = next((entry for entry in status.workers if entry.name == name), None)
            if worker is None:
                raise LinkcppError("The dispatch process lost the worker.")
            if worker.state == "refused":
                raise LinkcppError(f"{self._share.node_name} is not used: {worker.detail}")
            if worker.state != "connecting":
                self._emit(DispatchSeen(status))
                return
            if worker.loaded_bytes != loaded_bytes:
                loaded_bytes = worker.loaded_bytes
                self._emit(DispatchSeen(status))
            if time.monotonic() > give_up_at or linking.has_ended():
                raise LinkcppError(f"{self._share.node_name} cannot be linked to: {worker.detail}.")
            await asyncio.sleep(LINK_POLL_SECONDS)
