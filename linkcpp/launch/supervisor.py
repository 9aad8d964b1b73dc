"""The process that owns a deployment: brings it up, watches it, starts it again, takes it down.

``python -m linkcpp.launch.supervisor FOLDER LOCK`` runs detached from any terminal; ``launch
--foreground`` runs the same code in the process of the verb. Whatever way this process ends,
nothing of the deployment stays: llama-server dies with its keeper, and the rpc-servers on the nodes
end with their links and leases.
"""

import asyncio
import contextlib
import logging
import logging.handlers
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import EXIT_ERROR, LinkcppError
from linkcpp.common.logs import log_to_handler
from linkcpp.common.processes import identity_of
from linkcpp.common.request_ids import begin_request
from linkcpp.launch.attempt import Attempt
from linkcpp.launch.decisions import Failure, GiveUp, History, pause_seconds, recover
from linkcpp.launch.events import (
    PhaseEntered,
    PlanAdopted,
    Restarted,
    SupervisorStarted,
    apply,
    first_state,
)
from linkcpp.launch.experts.attempt import ExpertsAttempt
from linkcpp.launch.failing import NeverError, StepRefusedError
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.journal import Journal
from linkcpp.launch.llamaserver import drop_overrides_from_environment
from linkcpp.launch.records import DeploymentState, Phase
from linkcpp.launch.surroundings import Surroundings
from linkcpp.planning.records import Plan, PlanMode

log = logging.getLogger("linkcpp.launch")

LOG_BYTES = 4 * 2**20
FOLDER_LOOK_SECONDS = 2.0


async def supervise(folder: DeploymentFolder) -> DeploymentState:
    """Look after a deployment until it is stopped (by cancellation) or has failed for good.

    The caller holds the folder's lock. Returns the final state, which is also in the file.
    """
    request = folder.read_request()
    log.info("calls to nodes and hubs have the request id %s", begin_request())
    journal = Journal(folder, first_state(request, now=time.time()))
    supervisor = identity_of(os.getpid())
    if supervisor is not None:
        folder.sign(supervisor)
        journal.emit(SupervisorStarted(supervisor))
    async with journal.keeping():
        try:
            async with contextlib.aclosing(Surroundings(folder, request)) as surroundings:
                await _Supervision(folder, surroundings, journal).run()
        except asyncio.CancelledError:
            journal.emit(PhaseEntered(Phase.STOPPED))
        except LinkcppError as error:
            journal.emit(PhaseEntered(Phase.FAILED, error.message, error.hint))
        except Exception as error:
            log.exception("internal error")
            hint = f"The details are in {folder.supervisor_log}."
            journal.emit(PhaseEntered(Phase.FAILED, f"Defect in linkcpp: {error!r}.", hint))
    return journal.state


class _Supervision:
    """Attempts, one after the other, until one is not to be followed by another."""

    def __init__(
        self,
        folder: DeploymentFolder,
        surroundings: Surroundings,
        journal: Journal,
    ) -> None:
        self._folder = folder
        self._surroundings = surroundings
        self._journal = journal
        self._has_served = False
        self._keeps_trying = surroundings.request.keeps_trying

    async def run(self) -> None:
        plan = self._surroundings.request.plan
        history = History()
        while True:
            # Also where the plan is the old one: what its stages held has gone with the attempt.
            self._journal.emit(PlanAdopted(plan, self._names(history.excluded)))
            ended = await self._attempt(plan)
            failure = replace(ended, keeps_trying=self._keeps_trying)
            recovery = recover(plan, history, failure)
            history, action = recovery.history, recovery.action
            if isinstance(action, GiveUp):
                logs = f"`linkcpp logs {self._folder.name}` shows what the programs said."
                hint = action.hint or logs
                self._journal.emit(PhaseEntered(Phase.FAILED, _sentence(action.reason), hint))
                return
            self._journal.emit(PhaseEntered(Phase.RECOVERING, action.sentence, failure.hint))
            self._journal.emit(Restarted())
            await asyncio.sleep(action.pause_seconds)
            if action.needs_new_plan:
                plan, history = await self._plan_anew(history, failure)

    async def _attempt(self, plan: Plan) -> Failure:
        attempt = self._new_attempt(plan)
        try:
            # A disk that is full may have room again at the next try.
            self._folder.write_plan(plan)
            failure = await attempt.run()
        except asyncio.CancelledError:
            self._journal.emit(PhaseEntered(Phase.STOPPING))
            # Clients are told, and llama-server, which they leave, ends at once.
            await self._surroundings.front.aclose()
            raise
        except LinkcppError as error:
            failure = self._refused(error)
        except Exception as error:
            # What worked before may work again, whatever went wrong here.
            if not self._keeps_trying:
                raise
            log.exception("internal error")
            failure = Failure(time.monotonic(), f"internal error: {error!r}")
        finally:
            self._has_served |= attempt.has_served
            self._keeps_trying |= attempt.has_served
            served_seconds = attempt.served_seconds
            await attempt.aclose()
        return replace(failure, served_seconds=served_seconds)

    def _refused(self, error: LinkcppError) -> Failure:
        """Say why a step could not be done, and of which nodes to do without."""
        nodes = error.nodes if isinstance(error, StepRefusedError) else frozenset()
        return Failure(
            at_seconds=time.monotonic(),
            reason=error.message,
            hint=error.hint,
            # At the first launch a node that is not as planned is for the user to decide about.
            lost_nodes=nodes if self._has_served else frozenset(),
            is_final=isinstance(error, NeverError) or not self._keeps_trying,
        )

    def _new_attempt(self, plan: Plan) -> Attempt:
        if plan.mode is PlanMode.EXPERTS:
            return ExpertsAttempt(self._folder, self._surroundings, plan, self._journal)
        return Attempt(self._surroundings, plan, self._journal)

    async def _plan_anew(self, history: History, failure: Failure) -> tuple[Plan, History]:
        """Plan without the nodes that were dropped; where that fits nowhere, wait for them."""
        tries = 0
        while True:
            try:
                return await self._surroundings.plan_without(history.excluded), history
            except LinkcppError as error:
                problem = error
            told = (
                f"{_sentence(failure.reason)} Without it the model cannot be served: "
                f"{problem.message}"
            )
            if not self._keeps_trying:
                raise LinkcppError(told, hint=problem.hint) from problem
            # Rather a node that failed before than none.
            history = replace(history, excluded=frozenset())
            tries += 1
            told = f"{told} Waiting until it can be again."
            self._journal.emit(PhaseEntered(Phase.RECOVERING, told, problem.hint))
            await asyncio.sleep(pause_seconds(tries))

    def _names(self, nodes: frozenset[NodeId]) -> tuple[str, ...]:
        first = self._surroundings.request.plan
        names = {stage.node_id: stage.node_name for stage in first.stages}
        return tuple(sorted(names.get(node, node) for node in nodes))


def _sentence(clause: str) -> str:
    # Its first word may be a node's name, which stays as its owner writes it.
    return clause if clause.endswith((".", "!", "?")) else f"{clause}."


def run_until_stopped(folder: DeploymentFolder) -> DeploymentState:
    """Supervise in this process until SIGTERM or SIGINT; the caller holds the lock."""
    drop_overrides_from_environment()
    return asyncio.run(_supervise_with_signals(folder))


async def _supervise_with_signals(folder: DeploymentFolder) -> DeploymentState:
    task = asyncio.create_task(supervise(folder))
    loop = asyncio.get_running_loop()
    is_stopping = False

    def stop() -> None:
        # A second signal must not interrupt the clean-up that the first one started.
        nonlocal is_stopping
        if not is_stopping:
            is_stopping = True
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    looking = asyncio.create_task(_wait_until_removed(folder))
    looking.add_done_callback(lambda _: stop())
    state = await task
    if looking.done():
        removed = PhaseEntered(Phase.STOPPED, f"{folder.path} was removed")
        folder.write_state(state := apply(state, removed, now=time.time()))
    return state


async def _wait_until_removed(folder: DeploymentFolder) -> None:
    """Wait until somebody has removed the folder: no other program finds its supervisor then."""
    supervisor = identity_of(os.getpid())
    while supervisor is None or not folder.was_taken_from(supervisor):  # noqa: ASYNC110
        await asyncio.sleep(FOLDER_LOOK_SECONDS)


def log_to(folder: DeploymentFolder, *, attached: bool = False) -> None:
    """Write what the supervisor does to its log file, and to stderr where it is ``attached``."""
    handler = logging.handlers.RotatingFileHandler(
        folder.supervisor_log, maxBytes=LOG_BYTES, backupCount=1
    )
    log_to_handler(handler)
    if attached:
        log_to_handler(logging.StreamHandler(), "%(message)s")


def main() -> None:
    """Supervise the deployment whose folder and locked descriptor the launcher hands over."""
    folder = DeploymentFolder(Path(sys.argv[1]))
    os.set_inheritable(int(sys.argv[2]), False)
    log_to(folder)
    state = run_until_stopped(folder)
    sys.exit(EXIT_ERROR if state.phase is Phase.FAILED else 0)


if __name__ == "__main__":
    main()
