"""One try to bring a plan of mode ``experts`` up, watched until what must not end has ended."""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

from linkcpp.cluster.limits import usable_cores
from linkcpp.common.errors import LinkcppError
from linkcpp.dispatch.access import ControlAccess
from linkcpp.dispatch.process import DispatchConfig
from linkcpp.launch.attempt import Attempt, cancel_all
from linkcpp.launch.decisions import Failure, Observed, Step
from linkcpp.launch.events import EngineStopped, Noticed, PhaseEntered
from linkcpp.launch.experts.decisions import (
    coverage_hint,
    next_step_of,
    uncovered_sentence,
    unproved_experts,
)
from linkcpp.launch.experts.dispatching import Dispatcher
from linkcpp.launch.experts.events import BackboneCopied, DispatchSeen, FallbackChosen
from linkcpp.launch.experts.fallback import fallback_room
from linkcpp.launch.experts.files import Backbone, ExpertFiles
from linkcpp.launch.experts.member import Circumstances, Member
from linkcpp.launch.experts.members import members_of
from linkcpp.launch.experts.records import ExpertsState
from linkcpp.launch.experts.watching import watch_dispatcher
from linkcpp.launch.failing import BrokenError, NeverError, NodeMissingError, StepRefusedError
from linkcpp.launch.finding import FoundNode, find_node
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.journal import Journal
from linkcpp.launch.programs import watch_program
from linkcpp.launch.records import Phase
from linkcpp.launch.rendering import with_slots
from linkcpp.launch.surroundings import Surroundings
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.records import ExpertShare, Plan

COVER_POLL_SECONDS = 0.5


class ExpertsAttempt(Attempt):
    """Holds everything that belongs to one run of the backbone; workers come and go meanwhile."""

    def __init__(
        self, folder: DeploymentFolder, surroundings: Surroundings, plan: Plan, journal: Journal
    ) -> None:
        super().__init__(surroundings, plan, journal)
        self._folder = folder
        self._dispatcher: Dispatcher | None = None
        self._files: ExpertFiles | None = None
        self._backbone: Backbone | None = None
        self._members: list[Member] = []

    @property
    def _experts(self) -> ExpertsState:
        experts = self._journal.state.experts
        if experts is None:
            raise LinkcppError("The plan has no experts to share out.", hint="Make it again.")
        return experts

    def _next(self, observed: Observed) -> Step:
        return next_step_of(observed.done)

    async def _do(self, step: Step, observed: Observed) -> Observed:
        await self._actions()[step]()
        return replace(observed, done=observed.done | {step})

    def _actions(self) -> dict[Step, Callable[[], Awaitable[object]]]:
        nothing = Observed()
        return {
            Step.CHECK_MODEL: lambda: self._check_model(nothing),
            Step.CHECK_ENGINE: lambda: self._check_engine(nothing),
            Step.MAKE_BACKBONE: self._make_backbone,
            Step.START_DISPATCH: self._start_dispatch,
            Step.START_WORKERS: self._start_workers,
            Step.START_ENGINE: self._start_backbone,
            Step.AWAIT_ENGINE: lambda: self._await_engine(nothing),
            Step.ASK: lambda: self._ask(nothing),
            Step.PROVE_SPLIT: self._prove,
        }

    async def _make_backbone(self) -> None:
        self._journal.emit(PhaseEntered(Phase.PREPARING))
        files = await self._surroundings.expert_files()

        def tell(backbone: Backbone, done_bytes: int) -> None:
            path, file_bytes, copied_bytes = backbone
            self._journal.emit(BackboneCopied(path, file_bytes, copied_bytes, done_bytes))

        self._backbone = await files.backbone(tell)
        tell(self._backbone, self._backbone.copied_bytes)
        room = fallback_room(
            self._plan,
            asked_bytes=self._request.fallback_bytes,
            min_bytes=files.min_fallback_bytes,
            hub_url=files.only_hub_url,
        )
        self._journal.emit(FallbackChosen(room.size_bytes, room.why_not))
        if room.warning:
            self._journal.emit(Noticed(room.warning))
        self._files = files

    async def _start_dispatch(self) -> None:
        assert self._files is not None and self._backbone is not None  # noqa: S101 - steps in order
        request = self._request
        engine = await self._surroundings.engine()
        config = DispatchConfig(
            engine=engine.location,
            model=str(self._backbone.path),
            fallback_model=str(self._files.full_model) if self._experts.has_fallback else None,
            fallback_bytes=self._experts.fallback_bytes,
            check_model_digest=self._files.digest,
            control_token=secrets.token_urlsafe(32),
            log_folder=self._folder.path,
            threads=usable_cores(),
            patience_seconds=request.patience_seconds,
            spot_check_rate=request.spot_check_rate,
            zero_missing=True,
            failure_counter=self._folder.failure_counter,
            routing_counts=self._folder.routing_counts_file,
        )
        dispatcher = await Dispatcher.start(
            config, folder=self._folder.path, log_path=self._folder.dispatch_log
        )
        self._dispatcher = dispatcher
        access = ControlAccess(port=dispatcher.control_port, token=dispatcher.token)
        await asyncio.to_thread(self._folder.write_control, access)
        self._watch(watch_program(dispatcher.program))
        self._watch(
            watch_dispatcher(
                dispatcher,
                self._journal.emit,
                lambda: self._experts,
                interval=self._interval_seconds,
            )
        )

    async def _start_workers(self) -> None:
        self._journal.emit(PhaseEntered(Phase.STARTING_SERVERS))
        assert self._files is not None and self._dispatcher is not None  # noqa: S101 - as above
        engine = await self._surroundings.engine()
        around = Circumstances(
            deployment=self._request.name,
            files=self._files,
            engine=engine.location,
            folder=self._folder.path,
            dispatcher=self._dispatcher,
            find=self._find,
            emit=self._journal.emit,
            experts=lambda: self._experts,
        )
        self._members = members_of(self._plan.expert_shares, around)
        for member in self._members:
            self._watch(member.run())
        outcomes = await asyncio.gather(
            *(asyncio.shield(member.first_try) for member in self._members)
        )
        failures = {
            share.node_name: error
            for share, error in zip(self._plan.expert_shares, outcomes, strict=True)
            if error is not None
        }
        await self._see_to_coverage(failures)

    async def _find(self, share: ExpertShare) -> FoundNode:
        known = [*self._plan.node_urls.get(share.node_id, ()), *self._request.node_urls]
        return await find_node(
            share.node_id,
            share.node_name,
            connector=self._surroundings.connector,
            urls=known,
            discover=lambda: self._surroundings.advertised_urls(share.node_id),
        )

    async def _see_to_coverage(self, failures: dict[str, LinkcppError]) -> None:
        """Go on where every expert can be computed; wait until it is so, except at a first try."""
        dispatcher = self._dispatcher
        assert dispatcher is not None and self._files is not None  # noqa: S101 - as above
        reasons = {name: error.message for name, error in sorted(failures.items())}
        for name, why in reasons.items():
            self._journal.emit(Noticed(f"{name} does not take part yet: {why.rstrip('.')}"))
        has_told = False
        while not self._experts.has_fallback:
            status = await dispatcher.status()
            self._journal.emit(DispatchSeen(status))
            if not status.missing_expert_count:
                return
            sentence = uncovered_sentence(status.missing_expert_count, reasons)
            if failures and not self.keeps_trying:
                ids = {s.node_id for s in self._plan.expert_shares if s.node_name in failures}
                raise StepRefusedError(
                    sentence,
                    hint=coverage_hint(
                        self._plan.options.replicas,
                        has_experts=self._files.has_experts,
                        hints=[
                            error.hint
                            for error in failures.values()
                            if error.hint and not isinstance(error, NodeMissingError)
                        ],
                    ),
                    nodes=frozenset(ids),
                )
            if self.keeps_trying and not has_told:
                has_told = True
                self._journal.emit(Noticed(f"waiting: {sentence}"))
            await asyncio.sleep(COVER_POLL_SECONDS)

    async def _start_backbone(self) -> None:
        self._journal.emit(PhaseEntered(Phase.LOADING))
        dispatcher, backbone = self._dispatcher, self._backbone
        assert dispatcher is not None and backbone is not None  # noqa: S101 - as above
        slots = self._folder.path / "slots"
        slots.mkdir(mode=0o700, parents=True, exist_ok=True)
        placement = server_arguments(self._plan, {}, experts_at=dispatcher.endpoint)
        await self._run_engine(with_slots(placement, slots), str(backbone.path))

    async def _prove(self) -> None:
        self._journal.emit(PhaseEntered(Phase.PROVING))
        assert self._dispatcher is not None  # noqa: S101 - as above
        self._journal.emit(DispatchSeen(await self._dispatcher.status()))
        problems = unproved_experts(self._experts)
        if problems:
            raise NeverError(
                f"The experts are not computed as planned: {'; '.join(problems)}.",
                hint="`linkcpp logs` shows what the programs said; a template of your own can be "
                "the reason.",
            )
        computed_here = self._experts.dispatch.fallback_pair_count
        if computed_here:
            self._journal.emit(
                Noticed(f"{computed_here} pairs were computed here, since no worker had them")
            )

    async def _diagnose(self, broken: BrokenError) -> Failure:
        """Only this machine's own programs can end a deployment: no node is to blame."""
        return await super()._diagnose(replace_nodes(broken))

    async def aclose(self) -> None:
        """Give everything back; the user of each thing before the thing itself."""
        if self._resources.llama_server is not None:
            await self._resources.llama_server.stop()
            self._resources.llama_server = None
        await cancel_all(self._watchers)
        self._folder.control_file.unlink(missing_ok=True)
        if self._dispatcher is not None:
            with contextlib.suppress(LinkcppError):
                await self._dispatcher.stop()
        self._journal.emit(EngineStopped())


def replace_nodes(broken: BrokenError) -> BrokenError:
    """Return the same without nodes."""
    return BrokenError(broken.reason, hint=broken.hint)
