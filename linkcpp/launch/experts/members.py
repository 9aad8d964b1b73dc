"""Each share of the plan's experts with a worker for it, brought back as often as it goes away.

A member that has no worker is no failure of the deployment: replicas or the fallback compute its
experts meanwhile, or requests that need them are refused.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from linkcpp.cluster.limits import usable_cores
from linkcpp.common.errors import LinkcppError
from linkcpp.engine.records import EngineLocation
from linkcpp.launch.events import Noticed
from linkcpp.launch.experts.decisions import absence_clause, back_sentence, lost_sentence
from linkcpp.launch.experts.delivery import Delivery
from linkcpp.launch.experts.dispatching import Dispatcher, holder_name
from linkcpp.launch.experts.events import DispatchSeen, WorkerFound, WorkerMoved, WorkerStarted
from linkcpp.launch.experts.files import ExpertFiles
from linkcpp.launch.experts.programs import start_program
from linkcpp.launch.experts.records import ExpertsState, WorkerPhase
from linkcpp.launch.failing import NodeMissingError
from linkcpp.launch.finding import FoundNode
from linkcpp.launch.watch import RENEW_SECONDS, Emit
from linkcpp.node.client import NodeClient, NodeError, NodeRefusedError
from linkcpp.node.records import NewWorker, ServerState, WorkerId, WorkerRequest
from linkcpp.node.worker_tunnel import WorkerTunnel
from linkcpp.planning.records import ExpertShare
from linkcpp.worker.process import READY_PATTERN, WorkerConfig

log = logging.getLogger("linkcpp.launch")

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 10.0
# A link that hiccups opens again by itself; a node that went away has to be found anew.
SILENCE_SECONDS = 3.0
LOOK_SECONDS = 0.25
LINK_SECONDS = 60.0
LINK_POLL_SECONDS = 0.1
GIVE_BACK_SECONDS = 5.0
_SLOWEST_LOAD_BYTES_PER_SECOND = 20e6

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
                log.exception("defect in linkcpp")
                reason = self._note_failure(LinkcppError(f"Defect in linkcpp: {error!r}."))
            self._note_loss(reason)
            is_stable = time.monotonic() - began > LONGEST_PAUSE_SECONDS
            pause_seconds = FIRST_PAUSE_SECONDS if is_stable else pause_seconds
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)

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
        self, port: int, token: str, worker_id: WorkerId | None, slab_bytes: int | None
    ) -> AsyncIterator[None]:
        """Have the worker at a port used while the block runs.

        Raises:
            LinkcppError: it is refused, or cannot be linked to.
        """
        dispatcher = self._around.dispatcher
        started = self._around.experts().workers[self._index].start_count + 1
        name = holder_name(self._share.node_name, self._index, started)
        await dispatcher.add(name, port, token)
        try:
            self._emit(WorkerStarted(self._index, name, worker_id, slab_bytes))
            await self._linked(name)
            self._note_return()
            yield
        finally:
            with contextlib.suppress(LinkcppError):
                # The last counts of a worker go with it.
                self._emit(DispatchSeen(await dispatcher.status()))
                await dispatcher.remove(name)

    async def _linked(self, name: str) -> None:
        give_up_at = time.monotonic() + LINK_SECONDS
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
            if time.monotonic() > give_up_at:
                raise LinkcppError(f"{self._share.node_name} cannot be linked to: {worker.detail}.")
            await asyncio.sleep(LINK_POLL_SECONDS)


class RemoteMember(Member):
    """A share on a node."""

    _last_worker: WorkerId | None = None

    async def _serve(self) -> str:
        node = await self._around.find(self._share)
        try:
            self._emit(WorkerFound(self._index, node.url, node.rtt_ms, node.client.way()))
            if problem := node.record.engine_problem:
                raise LinkcppError(
                    f"The engine of {node.record.name} cannot be used: {problem.message}",
                    hint=problem.hint,
                )
            self._move(WorkerPhase.SLICING)
            delivery = Delivery(self._index, self._share, node, self._around.files, self._emit)
            slice_id = await delivery.run()
            self._move(WorkerPhase.STARTING)
            request = WorkerRequest(
                deployment=self._around.deployment,
                slice_ids=(slice_id,),
                device=self._share.device,
            )
            async with self._worker(node.client, request) as new:
                return await self._use(node, new)
        finally:
            await node.client.aclose()

    @asynccontextmanager
    async def _worker(self, client: NodeClient, request: WorkerRequest) -> AsyncIterator[NewWorker]:
        if self._last_worker is not None:
            # It may have outlived a lost link, and takes memory that the next one needs.
            await client.delete_worker(self._last_worker)
        creation = asyncio.create_task(client.create_worker(request))
        try:
            new = await asyncio.shield(creation)
        except asyncio.CancelledError:
            # The node goes on creating it, so its id must be had to give it back.
            with contextlib.suppress(NodeError):
                await _give_back(client, (await creation).worker.worker_id)
            raise
        self._last_worker = new.worker.worker_id
        try:
            yield new
        finally:
            await _give_back(client, new.worker.worker_id)

    async def _use(self, node: FoundNode, new: NewWorker) -> str:
        worker_id = new.worker.worker_id
        ready = await node.client.wait_worker(worker_id)
        async with (
            await WorkerTunnel.open(node.client, worker_id) as tunnel,
            self._joined(tunnel.port, new.token, worker_id, ready.slab_bytes),
        ):
            return await self._watch(node, worker_id, tunnel)

    async def _watch(self, node: FoundNode, worker_id: WorkerId, tunnel: WorkerTunnel) -> str:
        """Renew the lease; returns why the worker, or the way to it, is gone."""
        gone = asyncio.create_task(tunnel.wait_gone())
        try:
            silent_since: float | None = None
            renew_at = time.monotonic()
            while True:
                await asyncio.wait({gone}, timeout=LOOK_SECONDS)
                if gone.done():
                    return gone.result()
                now = time.monotonic()
                if tunnel.is_up and now < renew_at:
                    continue
                renew_at = now + RENEW_SECONDS
                if not tunnel.is_up:
                    silent_since = silent_since or now
                    if now - silent_since > SILENCE_SECONDS:
                        return tunnel.lost_reason or "its link was lost"
                elif (end := await self._renew(node, worker_id)) is not None:
                    return end
                else:
                    silent_since = None
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _renew(self, node: FoundNode, worker_id: WorkerId) -> str | None:
        """Renew once; returns why the worker is gone, if it is."""
        asked_at = time.perf_counter()
        try:
            worker = await node.client.renew_worker(worker_id)
        except NodeRefusedError as error:
            return error.message
        except NodeError:
            # The link tells sooner than a call that was not answered whether the node is there.
            return None
        if worker.state in (ServerState.FAILED, ServerState.STOPPED):
            return f"its worker ended: {worker.detail or worker.state.value}"
        rtt_ms = (time.perf_counter() - asked_at) * 1000
        self._emit(WorkerFound(self._index, node.url, rtt_ms, node.client.way()))
        return None


class LocalMember(Member):
    """A share of the coordinator's own: a worker process here."""

    async def _serve(self) -> str:
        around, share = self._around, self._share
        if not around.files.has_experts:
            raise LinkcppError(
                "The model here is hollow, so this machine cannot compute experts of its own.",
                hint="Name the whole model with --model.",
            )
        slabs = around.files.full_model
        if slabs is None:
            self._move(WorkerPhase.SLICING)
            slabs = await around.files.kept_slice(share.segments, lambda _: None)
        self._move(WorkerPhase.STARTING)
        token = secrets.token_urlsafe(32)
        name = f"worker-{self._index}"
        config = WorkerConfig(
            name=share.node_name,
            engine=around.engine,
            slabs=str(slabs),
            segments=share.segments,
            token=token,
            log_path=around.folder / f"{name}-rpc.log",
            device=share.device,
            threads=usable_cores(),
        )
        weight_bytes = share.memory.weight_bytes
        program = await start_program(
            "linkcpp.worker",
            config,
            name="the expert worker",
            config_path=around.folder / f"{name}.json",
            log_path=around.folder / f"{name}.log",
            ready_pattern=READY_PATTERN,
            ready_seconds=LINK_SECONDS + weight_bytes / _SLOWEST_LOAD_BYTES_PER_SECOND,
        )
        try:
            async with self._joined(program.ports[0], token, None, weight_bytes):
                return await program.wait_for_end()
        finally:
            await program.stop()


def members_of(shares: Iterable[ExpertShare], around: Circumstances) -> list[Member]:
    """Return a member for each share of a plan."""
    return [
        (LocalMember if share.is_coordinator else RemoteMember)(index, share, around)
        for index, share in enumerate(shares)
    ]


async def _give_back(client: NodeClient, worker_id: WorkerId) -> None:
    """Stop a worker; on a node that does not answer it ends by its lease."""
    with contextlib.suppress(LinkcppError, TimeoutError):
        async with asyncio.timeout(GIVE_BACK_SECONDS):
            await client.delete_worker(worker_id)
