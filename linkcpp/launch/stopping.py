"""Ending a deployment, whether its supervisor lives or has crashed; doing it twice does no harm."""

import asyncio
import contextlib
import os
import signal
import time
from enum import StrEnum

import psutil

from linkcpp.common.errors import LinkcppError
from linkcpp.launch.events import EngineStopped, PhaseEntered, apply
from linkcpp.launch.experts.records import WorkerState
from linkcpp.launch.folder import DeploymentFolder, is_alive
from linkcpp.launch.records import DeploymentState, Phase, ProcessIdentity
from linkcpp.node.reaching import Reach

# A supervisor gives llama-server ten seconds and each node as many.
PATIENCE_SECONDS = 45.0
IDENTITY_SECONDS = 5.0
NODE_SECONDS = 5.0
POLL_SECONDS = 0.05


class StopResult(StrEnum):
    """What there was to do."""

    STOPPED = "stopped"
    CLEANED_UP = "cleaned_up"
    WAS_STOPPED = "was_stopped"


def stop_deployment(
    folder: DeploymentFolder, *, patience_seconds: float = PATIENCE_SECONDS
) -> StopResult:
    """End a deployment and wait until nothing of it is left.

    A supervisor that does not end in time is killed, and what it left is cleaned up.

    Raises:
        LinkcppError: the state cannot be read or written.
    """
    if folder.has_supervisor():
        _end_supervisor(folder, patience_seconds)
        if folder.read_state().phase.is_final:
            return StopResult.STOPPED
    state = folder.read_state()
    if state.phase.is_final and state.llama_server is None:
        return StopResult.WAS_STOPPED
    with folder.lock():
        asyncio.run(_clean_up(state))
        state = apply(folder.read_state(), EngineStopped(), now=time.time())
        text = "stopped after its supervisor had gone"
        folder.write_state(apply(state, PhaseEntered(Phase.STOPPED, text), now=time.time()))
    return StopResult.CLEANED_UP


def _end_supervisor(folder: DeploymentFolder, patience_seconds: float) -> None:
    supervisor = _supervisor_of(folder)
    if supervisor is None:
        return
    # One that is stopped hears nothing until it goes on.
    for number in (signal.SIGTERM, signal.SIGCONT):
        _signal(supervisor, number)
    deadline = time.monotonic() + patience_seconds
    while folder.has_supervisor() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if folder.has_supervisor():
        _signal(supervisor, signal.SIGKILL)
        while is_alive(supervisor):
            time.sleep(POLL_SECONDS)


def _supervisor_of(folder: DeploymentFolder) -> ProcessIdentity | None:
    """Return the supervisor; one that has only just been started has not signed the state yet."""
    deadline = time.monotonic() + IDENTITY_SECONDS
    while folder.has_supervisor() and time.monotonic() < deadline:
        supervisor = folder.read_state().supervisor
        if is_alive(supervisor):
            return supervisor
        time.sleep(POLL_SECONDS)
    return None


def _signal(process: ProcessIdentity, number: signal.Signals) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def _clean_up(state: DeploymentState) -> None:
    """End what a crashed supervisor may have left: its llama-server, and servers on nodes.

    Both end by themselves soon; this only makes it certain and quick.
    """
    llama_server = state.llama_server
    if llama_server is not None and is_alive(llama_server):
        _signal(llama_server, signal.SIGTERM)
        _, alive = await asyncio.to_thread(
            psutil.wait_procs, [psutil.Process(llama_server.pid)], NODE_SECONDS
        )
        if alive:
            _signal(llama_server, signal.SIGKILL)
    workers = state.experts.workers if state.experts else ()
    async with contextlib.aclosing(Reach()) as reach:
        await asyncio.gather(
            *(_delete(state, index, reach) for index in range(len(state.stages))),
            *(_delete_worker(worker, reach) for worker in workers),
        )


async def _delete(state: DeploymentState, index: int, reach: Reach) -> None:
    stage = state.stages[index]
    if stage.url is None or stage.server_id is None:
        return
    with contextlib.suppress(LinkcppError):
        async with await reach.open(stage.url, timeout_seconds=NODE_SECONDS) as client:
            await client.delete(stage.server_id)


async def _delete_worker(worker: WorkerState, reach: Reach) -> None:
    if worker.url is None or worker.worker_id is None:
        return
    with contextlib.suppress(LinkcppError):
        async with await reach.open(worker.url, timeout_seconds=NODE_SECONDS) as client:
            await client.delete_worker(worker.worker_id)
