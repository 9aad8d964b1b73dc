"""Ending a deployment, whether its supervisor lives or has crashed; doing it twice does no harm."""

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable
from enum import StrEnum

from linkcpp.common.errors import LinkcppError
from linkcpp.common.processes import ProcessIdentity, is_alive
from linkcpp.launch.events import EngineStopped, PhaseEntered, apply
from linkcpp.launch.experts.records import WorkerState
from linkcpp.launch.folder import DamagedError, DeploymentFolder
from linkcpp.launch.records import DeploymentState, Phase
from linkcpp.node.connector import NodeConnector

# A supervisor gives llama-server ten seconds and each node as many.
PATIENCE_SECONDS = 45.0
IDENTITY_SECONDS = 5.0
NODE_SECONDS = 5.0
KILL_SECONDS = 5.0
POLL_SECONDS = 0.05


class StopResult(StrEnum):
    """What there was to do."""

    STOPPED = "stopped"
    CLEANED_UP = "cleaned_up"
    WAS_STOPPED = "was_stopped"
    FORGOTTEN = "forgotten"


def stop_deployment(
    folder: DeploymentFolder, *, patience_seconds: float = PATIENCE_SECONDS
) -> StopResult:
    """End a deployment and wait until nothing of it is left.

    A supervisor that does not end in time is killed, and what it left is cleaned up. A deployment
    whose state is damaged is forgotten.

    Raises:
        LinkcppError: the supervisor cannot be ended, or the state not be read or written.
    """
    if folder.has_supervisor():
        _end_supervisor(folder, patience_seconds)
        if (state := _readable_state(folder)) is not None and state.phase.is_final:
            return StopResult.STOPPED
    if (state := _readable_state(folder)) is None:
        # Without its supervisor nothing of it runs on: all that it started ends by itself.
        with folder.lock():
            folder.forget()
        return StopResult.FORGOTTEN
    if state.phase.is_final and state.llama_server is None:
        return StopResult.WAS_STOPPED
    with folder.lock():
        asyncio.run(_clean_up(state))
        state = apply(state, EngineStopped(), now=time.time())
        text = "stopped after its supervisor had gone"
        folder.write_state(apply(state, PhaseEntered(Phase.STOPPED, text), now=time.time()))
    return StopResult.CLEANED_UP


def _readable_state(folder: DeploymentFolder) -> DeploymentState | None:
    try:
        return folder.read_state()
    except DamagedError:
        return None


def _end_supervisor(folder: DeploymentFolder, patience_seconds: float) -> None:
    if supervisor := _supervisor_of(folder):
        # One that is stopped hears nothing until it goes on.
        for number in (signal.SIGTERM, signal.SIGCONT):
            _signal(supervisor, number)
        if not _within(patience_seconds, lambda: not folder.has_supervisor()):
            _signal(supervisor, signal.SIGKILL)
            _within(KILL_SECONDS, lambda: not is_alive(supervisor))
    if folder.has_supervisor():
        raise LinkcppError(
            f"The deployment {folder.name!r} runs, but its supervisor does not end or is not to be "
            "found.",
            hint=f"`fuser {shlex.quote(str(folder.lock_file))}` names the process: end that one.",
        )


def _supervisor_of(folder: DeploymentFolder) -> ProcessIdentity | None:
    """Return the supervisor; one that has only just been started has not signed yet."""
    _within(IDENTITY_SECONDS, lambda: is_alive(folder.signed_by()) or not folder.has_supervisor())
    supervisor = folder.signed_by()
    return supervisor if is_alive(supervisor) else None


def _within(seconds: float, is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not (so := is_so()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return so


def _signal(process: ProcessIdentity, number: signal.Signals) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


async def _clean_up(state: DeploymentState) -> None:
    """End what a crashed supervisor may have left: its llama-server, and servers on nodes.

    Both end by themselves soon; this only makes it certain and quick.
    """
    llama_server = state.llama_server
    if llama_server is not None and is_alive(llama_server):
        _signal(llama_server, signal.SIGTERM)
        if not await asyncio.to_thread(_within, KILL_SECONDS, lambda: not is_alive(llama_server)):
            _signal(llama_server, signal.SIGKILL)
    workers = state.experts.workers if state.experts else ()
    async with contextlib.aclosing(NodeConnector()) as connector:
        await asyncio.gather(
            *(_delete(state, index, connector) for index in range(len(state.stages))),
            *(_delete_worker(worker, connector) for worker in workers),
        )


async def _delete(state: DeploymentState, index: int, connector: NodeConnector) -> None:
    stage = state.stages[index]
    if stage.url is None or stage.server_id is None:
        return
    with contextlib.suppress(LinkcppError):
        async with await connector.open(stage.url, timeout_seconds=NODE_SECONDS) as client:
            await client.delete(stage.server_id)


async def _delete_worker(worker: WorkerState, connector: NodeConnector) -> None:
    if worker.url is None or worker.worker_id is None:
        return
    with contextlib.suppress(LinkcppError):
        async with await connector.open(worker.url, timeout_seconds=NODE_SECONDS) as client:
            await client.delete_worker(worker.worker_id)
