"""The truth about deployments: what the state's file says, held against what really runs."""

import time
from enum import StrEnum

import psutil

from linkcpp.common.errors import LinkcppError
from linkcpp.common.processes import descendants_of, is_alive
from linkcpp.common.records import Record
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.records import DeploymentState, Phase


class Condition(StrEnum):
    """What a deployment really is."""

    RUNNING = "running"
    STARTING = "starting"
    STOPPED = "stopped"
    FAILED = "failed"
    CRASHED = "crashed"
    UNREADABLE = "unreadable"


class MemoryHere(Record):
    """This machine's RAM in bytes: what all programs of a deployment have, and what was planned.

    Pages that several of them share count once. ``allowed_bytes`` is what the plan was given.
    """

    used_bytes: int
    planned_bytes: int
    allowed_bytes: int


class DeploymentReport(Record):
    """One deployment as ``status`` shows it. ``advice`` says what to do, where there is something.

    ``uptime_seconds`` counts since the API became ready the last time. ``memory`` is told of a
    deployment that somebody looks after.
    """

    name: str
    condition: Condition
    explanation: str | None
    advice: str | None
    uptime_seconds: float | None
    state: DeploymentState | None
    memory: MemoryHere | None = None


def report_on(folder: DeploymentFolder) -> DeploymentReport:
    """Tell how a deployment is."""
    # Before the state, so that a supervisor that ends meanwhile has written its last word.
    has_supervisor = folder.has_supervisor()
    try:
        state = folder.read_state()
    except LinkcppError as error:
        return DeploymentReport(
            name=folder.name,
            condition=Condition.UNREADABLE,
            explanation=error.message,
            advice=error.hint,
            uptime_seconds=None,
            state=None,
        )
    report = judge(
        state,
        has_supervisor=has_supervisor,
        was_restarted=state.supervisor is not None and state.supervisor.is_of_earlier_boot,
        engine_is_alive=is_alive(state.llama_server),
        now=time.time(),
    )
    if state.supervisor is None or not has_supervisor or not is_alive(state.supervisor):
        return report
    changes: dict[str, object] = {"memory": _memory_of(folder, state.supervisor.pid)}
    if _is_stopped(state.supervisor.pid):
        changes["explanation"] = "A signal stopped its supervisor: nobody looks after it."
        changes["advice"] = (
            f"`kill -CONT {state.supervisor.pid}` lets it go on, `linkcpp stop {state.name}` ends "
            "it."
        )
    return report.model_copy(update=changes)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _memory_of(folder: DeploymentFolder, pid: int) -> MemoryHere | None:
    try:
        planned = folder.read_plan().coordinator_memory
        programs = [psutil.Process(pid), *descendants_of(pid)]
    except (LinkcppError, psutil.Error):
        return None
    return MemoryHere(
        used_bytes=sum(map(_share_of_memory, programs)),
        planned_bytes=planned.used_bytes,
        allowed_bytes=planned.available_bytes,
    )


def _share_of_memory(program: psutil.Process) -> int:
    """Return a process's memory, its part of what it shares with others; only Linux tells that."""
    try:
        memory = program.memory_full_info()
        return int(getattr(memory, "pss", memory.uss))
    except psutil.Error:
        return 0


def judge(
    state: DeploymentState,
    *,
    has_supervisor: bool,
    was_restarted: bool,
    engine_is_alive: bool,
    now: float,
) -> DeploymentReport:
    """Hold the state against the facts. Pure; ``now`` in seconds since 1970.

    ``was_restarted`` tells that the machine was, since its supervisor was seen.
    """
    explanation, advice = state.detail, state.hint
    if state.phase is Phase.FAILED:
        condition = Condition.FAILED
    elif state.phase is Phase.STOPPED:
        condition = Condition.STOPPED
    elif not has_supervisor:
        condition = Condition.CRASHED
        explanation, advice = _crash(
            state, was_restarted=was_restarted, engine_is_alive=engine_is_alive
        )
    elif state.phase is Phase.READY:
        condition = Condition.RUNNING
    else:
        condition = Condition.STARTING
    ready_at = state.ready_at if condition is Condition.RUNNING else None
    return DeploymentReport(
        name=state.name,
        condition=condition,
        explanation=explanation,
        advice=advice,
        # The clock may have been set back since.
        uptime_seconds=None if ready_at is None else max(0.0, now - ready_at),
        state=state,
    )


def _crash(
    state: DeploymentState, *, was_restarted: bool, engine_is_alive: bool
) -> tuple[str, str]:
    again = f"`linkcpp stop {state.name}` cleans up, then `linkcpp launch` starts it again."
    if was_restarted:
        return "This machine was restarted since; nothing of it runs any more.", again
    if engine_is_alive:
        return "Its supervisor is gone; llama-server still runs, unwatched.", again
    return "Its supervisor is gone, and llama-server with it.", again
