"""One try to bring a plan up: the I/O of each step of the chain, watched until something breaks."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from linkcpp.cluster.records import NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.launch.api import ApiClient
from linkcpp.launch.decisions import (
    Failure,
    Observed,
    Step,
    next_step,
    remote_nodes,
    remote_stages,
    unproved_stages,
)
from linkcpp.launch.enginelog import Buffer, Milestone, Speed, read_line
from linkcpp.launch.events import (
    ChatPageSeen,
    EngineStarted,
    EngineStopped,
    ForwardOpened,
    Logged,
    NodeFound,
    PhaseEntered,
    ServerSeen,
)
from linkcpp.launch.failing import BrokenError, NeverError, StepRefusedError
from linkcpp.launch.finding import FoundNode, find_nodes
from linkcpp.launch.journal import Journal
from linkcpp.launch.programs import watch_program
from linkcpp.launch.records import Phase
from linkcpp.launch.resources import Resources
from linkcpp.launch.surroundings import Surroundings
from linkcpp.launch.watch import (
    PROGRESS_SECONDS,
    RENEW_SECONDS,
    watch_engine,
    watch_link,
    watch_server,
    watch_traffic,
)
from linkcpp.link.forward import Forward
from linkcpp.node.client import NodeError, NodeUnreachableError
from linkcpp.node.records import ServerRequest, server_target
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.records import Plan, Stage

log = logging.getLogger("linkcpp.launch")

HEALTH_POLL_SECONDS = 0.2
# A node that dies takes its link with it; what was seen first need not be the cause.
SETTLE_SECONDS = 1.0


class Attempt:
    """Holds everything that belongs to one plan; ``run`` returns when it has failed."""

    def __init__(self, surroundings: Surroundings, plan: Plan, journal: Journal) -> None:
        self._request = surroundings.request
        self._plan = plan
        self._surroundings = surroundings
        self._journal = journal
        self._resources = Resources()
        # ``of_prompt`` of the speeds still to come that are those of our own first completion.
        self._own_speeds = {True, False}
        self._watchers: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[BrokenError] = asyncio.get_running_loop().create_future()
        self._served_since: float | None = None
        self.keeps_trying = self._request.keeps_trying or journal.state.restart_count > 0

    async def run(self) -> Failure:
        """Go through the chain and serve; returns why that ended.

        Raises:
            LinkcppError: a step cannot be done (``StepRefusedError`` where nodes are to blame).
        """
        observed = Observed()
        try:
            while (step := self._next(observed)) is not Step.SERVE:
                log.debug("step %s", step.value)
                observed = await self._unless_broken(self._do(step, observed))
            self._served_since = time.monotonic()
            self._journal.emit(PhaseEntered(Phase.READY))
            broken = await self._broken
        except BrokenError as error:
            broken = error
        except StepRefusedError:
            raise
        except LinkcppError as error:
            broken = await self._cause_of(error)
        return await self._diagnose(broken)

    @property
    def has_served(self) -> bool:
        """Whether the API was ready."""
        return self._served_since is not None

    @property
    def served_seconds(self) -> float:
        """For how long the API has been ready; 0 where it never was."""
        return 0.0 if self._served_since is None else time.monotonic() - self._served_since

    def _next(self, observed: Observed) -> Step:
        return next_step(self._plan, observed)

    async def _cause_of(self, error: LinkcppError) -> BrokenError:
        """Return what broke under a step that failed; ``error`` itself where nothing did."""
        await asyncio.wait({self._broken}, timeout=SETTLE_SECONDS)
        if not self._broken.done():
            raise error
        return self._broken.result()

    async def aclose(self) -> None:
        """Give everything back; nothing of this attempt runs anywhere afterwards."""
        await cancel_all(self._watchers)
        await self._resources.give_back()
        self._journal.emit(EngineStopped())

    async def _unless_broken(self, step: Coroutine[Any, Any, Observed]) -> Observed:
        task = asyncio.create_task(step)
        try:
            either: set[asyncio.Future[Any]] = {task, self._broken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                raise self._broken.result()
            return task.result()
        finally:
            await cancel_all({task})

    async def _do(self, step: Step, observed: Observed) -> Observed:
        actions = {
            Step.CHECK_MODEL: self._check_model,
            Step.CHECK_ENGINE: self._check_engine,
            Step.FIND_NODES: self._find_nodes,
            Step.START_SERVERS: self._start_servers,
            Step.OPEN_FORWARDS: self._open_forwards,
            Step.START_ENGINE: self._start_engine,
            Step.AWAIT_ENGINE: self._await_engine,
            Step.PROVE_SPLIT: self._prove_split,
            Step.ASK: self._ask,
        }
        return await actions[step](observed)

    async def _check_model(self, observed: Observed) -> Observed:
        self._journal.emit(PhaseEntered(Phase.CHECKING))
        await self._surroundings.check_model(self._plan)
        return replace(observed, model_is_right=True)

    async def _check_engine(self, observed: Observed) -> Observed:
        await self._surroundings.check_engine(self._plan)
        return replace(observed, engine_is_right=True)

    async def _find_nodes(self, observed: Observed) -> Observed:
        if remote_nodes(self._plan):
            self._journal.emit(PhaseEntered(Phase.FINDING_NODES))
        found = await find_nodes(
            self._plan,
            connector=self._surroundings.connector,
            more_urls=self._request.node_urls,
            discover=self._surroundings.discover_urls,
        )
        self._resources.nodes = found
        for node in found.values():
            way = node.client.way()
            self._journal.emit(NodeFound(node.record.node_id, node.url, node.rtt_ms, way))
        return replace(observed, found_nodes=frozenset(found))

    async def _start_servers(self, observed: Observed) -> Observed:
        self._journal.emit(PhaseEntered(Phase.STARTING_SERVERS))
        stages = remote_stages(self._plan)
        started = await asyncio.gather(
            *(self._start_server(stage) for stage in stages), return_exceptions=True
        )
        for result in started:
            if isinstance(result, BaseException):
                raise result
        return replace(observed, served_stages=frozenset(stages))

    async def _start_server(self, index: int) -> None:
        stage = self._plan.stages[index]
        node = self._resources.nodes[stage.node_id]
        request = ServerRequest(
            deployment=self._request.name,
            device=stage.device,
            memory_bytes=memory_to_ask_for(stage, node),
        )
        creation = asyncio.create_task(node.client.create_server(request))
        try:
            server = await asyncio.shield(creation)
        except asyncio.CancelledError:
            # The node goes on creating it, so its id must be had to give it back.
            with contextlib.suppress(NodeError):
                self._resources.servers[index] = (node, await creation)
            raise
        except NodeError as error:
            message = f"{stage.node_name} does not start an rpc-server: {error.told}"
            if error.code == "insufficient_memory":
                message = error.told
            raise StepRefusedError(
                message, hint=error.hint, nodes=frozenset({stage.node_id})
            ) from error
        self._resources.servers[index] = (node, server)
        self._journal.emit(ServerSeen(index, server))
        self._watch(
            watch_server(
                index, node, server.server_id, self._journal.emit, interval=self._interval_seconds
            )
        )

    def _interval_seconds(self) -> float:
        # While the model is loading, the node's counts are the progress that people see.
        return RENEW_SECONDS if self.has_served else PROGRESS_SECONDS

    async def _open_forwards(self, observed: Observed) -> Observed:
        for index, (node, server) in self._resources.servers.items():
            link = node.client.link
            forward = await Forward.open(link, server_target(server.server_id))
            self._resources.forwards[index] = forward
            self._journal.emit(ForwardOpened(index, forward.endpoint))
            self._watch(watch_link(link, forward, node))
        self._watch(
            watch_traffic(
                self._resources.forwards, self._journal.emit, interval=self._interval_seconds
            )
        )
        return replace(observed, forwarded_stages=frozenset(self._resources.forwards))

    async def _start_engine(self, observed: Observed) -> Observed:
        self._journal.emit(PhaseEntered(Phase.LOADING))
        endpoints = {index: forward.endpoint for index, forward in self._resources.forwards.items()}
        await self._run_engine(server_arguments(self._plan, endpoints))
        return replace(observed, engine_runs=True)

    async def _run_engine(self, placement: Sequence[str], model_path: str | None = None) -> None:
        """Start llama-server, and the front before it where that does not run yet."""
        server = await self._surroundings.start_llama_server(
            placement, self._note_line, model_path=model_path
        )
        self._resources.llama_server = server
        self._journal.emit(EngineStarted(server.identity))
        self._watch(watch_engine(server))
        self._watch(watch_program(await self._surroundings.front.ensure()))

    def _note_line(self, line: str) -> None:
        fact = read_line(line)
        if isinstance(fact, Speed) and fact.of_prompt in self._own_speeds:
            self._own_speeds.remove(fact.of_prompt)
        elif isinstance(fact, Buffer | Speed):
            self._journal.emit(Logged(fact))
        elif fact is Milestone.WARMING_UP:
            self._journal.emit(PhaseEntered(Phase.WARMING_UP))

    async def _await_engine(self, observed: Observed) -> Observed:
        async with self._surroundings.front.engine_client() as api:
            # Another process's readiness cannot be awaited, only asked for.
            while not await api.is_healthy():  # noqa: ASYNC110
                await asyncio.sleep(HEALTH_POLL_SECONDS)
        return replace(observed, engine_is_healthy=True)

    async def _prove_split(self, observed: Observed) -> Observed:
        self._journal.emit(PhaseEntered(Phase.PROVING))
        for index, (node, server) in self._resources.servers.items():
            try:
                seen = await node.client.server(server.server_id)
            except NodeError as error:
                raise BrokenError(
                    f"{node.record.name} does not tell what it holds ({error.message})",
                    nodes=frozenset({node.record.node_id}),
                ) from error
            self._journal.emit(ServerSeen(index, seen))
        problems = unproved_stages(self._plan, self._journal.state.stages)
        if problems:
            raise NeverError(
                f"The model is not split as planned: {'; '.join(problems)}.",
                hint=f"`linkcpp logs {self._request.name}` shows what llama-server did instead; a "
                "template of your own or a patched engine can be the reason.",
            )
        return replace(observed, split_is_proved=True)

    async def _ask(self, observed: Observed) -> Observed:
        async with self._api() as api:
            await api.complete()
            if await api.has_chat_page():
                self._journal.emit(ChatPageSeen())
        return replace(observed, has_answered=True)

    def _api(self) -> ApiClient:
        url = self._journal.state.api_url or ""
        return ApiClient(url, self._request.api_key_file)

    def _watch(self, watcher: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(watcher)
        self._watchers.add(task)
        task.add_done_callback(self._end_watch)

    def _end_watch(self, task: asyncio.Task[None]) -> None:
        self._watchers.discard(task)
        error = None if task.cancelled() else task.exception()
        if self._broken.done():
            return
        if isinstance(error, BrokenError):
            self._broken.set_result(error)
        elif error is not None:
            self._broken.set_exception(error)

    async def _diagnose(self, broken: BrokenError) -> Failure:
        """Find out which nodes are gone: their end is the cause, whatever was noticed first."""
        await asyncio.sleep(SETTLE_SECONDS)
        answers = await asyncio.gather(
            *(self._is_gone(node) for node in self._resources.nodes.values())
        )
        lost = frozenset(node for node in answers if node)
        links = {
            self._plan.stages[index].node_id
            for index, (node, _) in self._resources.servers.items()
            if not node.client.link.is_up
        }
        names = remote_nodes(self._plan)
        gone = " and ".join(sorted(names[node] for node in lost))
        server = self._resources.llama_server
        reason = f"{gone} went away" if lost else broken.reason
        if lost and server is not None and server.has_ended:
            reason += "; llama-server stopped"
        return Failure(
            at_seconds=time.monotonic(),
            reason=reason,
            hint=broken.hint,
            lost_nodes=lost,
            broken_links=(frozenset(links) | broken.nodes) - lost,
        )

    async def _is_gone(self, node: FoundNode) -> NodeId | None:
        try:
            await node.client.servers()
        except NodeUnreachableError:
            return node.record.node_id
        except NodeError:
            return None
        return None


def memory_to_ask_for(stage: Stage, node: FoundNode) -> int:
    """Return how much an rpc-server may allocate: the plan's need, and its reserve where it is.

    The reserve covers what compute buffers take beyond their estimate; a node that has lost a part
    of it since the plan was made can still do what it must.
    """
    needed = stage.memory.used_bytes
    offered = next(
        (device.offered_bytes for device in node.record.devices if device.name == stage.device), 0
    )
    return max(needed, min(needed + stage.memory.reserve_bytes, offered))


async def cancel_all(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
