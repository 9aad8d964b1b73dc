"""One verification: the text against the whole model, then every worker's rows."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from linkcpp.common.errors import LinkcppError
from linkcpp.front.api_keys import read_api_key
from linkcpp.launch.experts.records import ExpertsState, WorkerPhase
from linkcpp.launch.folder import DeploymentFolder, current_deployments
from linkcpp.launch.records import Phase
from linkcpp.launch.status import Condition, DeploymentReport, report_on
from linkcpp.model.inventory import read_inventory
from linkcpp.model.slices.hollow import has_no_experts
from linkcpp.model.slices.writing import open_whole_model
from linkcpp.planning.documents import check_plan_model
from linkcpp.planning.records import Plan, PlanMode
from linkcpp.registry.hub_location import parse_hub_location
from linkcpp.registry.model_lookup import is_elsewhere, require_here
from linkcpp.verify.generation import TextServer, compare_prompt
from linkcpp.verify.records import PromptReport, VerifyOptions, VerifyReport, WorkerReport
from linkcpp.verify.reference import reference_log, running_reference
from linkcpp.verify.rows import RowChecker
from linkcpp.verify.silence import SilentError
from linkcpp.verify.statistics import Comparison, summarize, summary_of, verdict_of

_BEGINNING_CHARACTERS = 40
_NOTICED_SECONDS = 3.0
_POLL_SECONDS = 0.1

OnProgress = Callable[[str, int, int], None]
"""Told what is being done, and how many of how many of it are done."""


def deployment_of_plan(plan: Plan) -> DeploymentFolder:
    """Return the live deployment that was launched from a plan.

    Raises:
        LinkcppError: there is none, or several.
    """
    found = [folder for folder in current_deployments() if _was_launched_from(folder, plan)]
    if not found:
        raise LinkcppError(
            "No live deployment was launched from this plan.",
            hint="Launch it first: linkcpp launch PLAN",
        )
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise LinkcppError(
            "Several deployments were launched from this plan.", hint=f"Name one of: {names}."
        )
    return found[0]


def _was_launched_from(folder: DeploymentFolder, plan: Plan) -> bool:
    try:
        return folder.read_request().plan == plan
    except LinkcppError:
        return False


async def verify(
    folder: DeploymentFolder, options: VerifyOptions, on_progress: OnProgress
) -> VerifyReport:
    """Compare a running deployment with its model in one process.

    Raises:
        LinkcppError: it does not run, the reference cannot, or nothing can be compared.
    """
    report = report_on(folder)
    if report.condition is not Condition.RUNNING or report.state is None:
        raise LinkcppError(f"{folder.name!r} does not run.", hint=_hint(report))
    verification = _Verification(folder, report.state.api_url or "", options, on_progress)
    try:
        return await verification.run()
    except SilentError as error:
        raise await _stopped_answering(folder, error) from error


class _Verification:
    """One run; ``notes`` grow with what is left out."""

    def __init__(
        self,
        folder: DeploymentFolder,
        api_url: str,
        options: VerifyOptions,
        on_progress: OnProgress,
    ) -> None:
        self._folder = folder
        self._api_url = api_url
        self._options = options
        self._on_progress = on_progress
        self._request = folder.read_request()
        self._plan = folder.read_plan()
        self._notes: list[str] = []

    async def run(self) -> VerifyReport:
        prompts = await self._compare_text()
        comparisons = [comparison for _, found in prompts for comparison in found]
        text = summarize(comparisons, len(prompts)) if comparisons else None
        workers = await self._check_rows()
        verdict = verdict_of(text, workers)
        if verdict is None:
            if self._plan.mode is not PlanMode.EXPERTS:
                raise LinkcppError(
                    "Nothing can be compared: this machine does not have the whole model.",
                    hint="Name its GGUF with --model.",
                )
            raise LinkcppError(
                "Nothing can be compared: this machine has no whole model, and no expert has two "
                "workers.",
                hint="Name the whole model with --model, or plan with --replicas 2.",
            )
        return VerifyReport(
            name=self._folder.name,
            mode=self._plan.mode.value,
            verdict=verdict,
            summary=summary_of(verdict, text, workers),
            text=text,
            prompts=tuple(report for report, _ in prompts),
            workers=tuple(workers),
            notes=tuple(self._notes),
        )

    async def _compare_text(self) -> list[tuple[PromptReport, list[Comparison]]]:
        """Compare all prompts, none where there is no whole model."""
        location = self._request.model_path
        if self._options.model is not None:
            location = self._options.model
            require_here(location, "verify")
        model = await asyncio.to_thread(whole_model, location, self._plan)
        if model is None:
            place = parse_hub_location(location)
            why = (
                f"the model lies at {place.hub_url} only"
                if place
                else "this machine has no whole model, only a hollow one or an address"
            )
            self._notes.append(
                f"The text was not compared: {why}. --model FILE names one that has all weights."
            )
            return []
        self._on_progress("loading the whole model", 0, 1)
        async with running_reference(
            self._folder, self._request, self._plan, model
        ) as reference_at:
            self._on_progress("loading the whole model", 1, 1)
            key_file = self._request.api_key_file
            key = read_api_key(Path(key_file)) if key_file else None
            url, reference_key = reference_at
            log = f"The log of its llama-server: {reference_log(self._folder)}"
            async with (
                TextServer(self._api_url, "The deployment", key) as deployment,
                TextServer(url, "The whole model", reference_key, hint=log) as reference,
            ):
                return await self._compare_prompts(deployment, reference)

    async def _compare_prompts(
        self, deployment: TextServer, reference: TextServer
    ) -> list[tuple[PromptReport, list[Comparison]]]:
        prompts, count = self._options.prompts, self._options.token_count
        most = self._plan.options.context_tokens - count
        if most < 1:
            raise LinkcppError(
                f"{count} tokens do not fit into a context of {most + count}.",
                hint="Compare fewer with --tokens.",
            )
        results = []
        for number, prompt in enumerate(prompts):
            self._on_progress("comparing prompts", number, len(prompts))
            tokens = await reference.tokenize(prompt)
            if len(tokens) > most:
                self._notes.append(
                    f"Prompt {number + 1} was cut from {len(tokens)} to {most} tokens."
                )
                tokens = tokens[:most]
            found = await compare_prompt(deployment, reference, tokens, count)
            report = PromptReport(
                beginning=" ".join(prompt[:_BEGINNING_CHARACTERS].split()),
                prompt_tokens=len(tokens),
                agreement=summarize(found, 1),
            )
            results.append((report, found))
        self._on_progress("comparing prompts", len(prompts), len(prompts))
        return results

    async def _check_rows(self) -> list[WorkerReport]:
        """Check all workers, of which there are some in mode ``experts`` only."""
        if self._plan.mode is not PlanMode.EXPERTS:
            return []
        checker = RowChecker(self._folder.read_control(), self._options.expert_count)
        workers = await checker.check_all(
            lambda done, total: self._on_progress("checking layers of workers", done, total)
        )
        unchecked = [worker.name for worker in workers if worker.verdict is None]
        if unchecked:
            self._notes.append(
                f"There was nothing to compare the rows of {', '.join(unchecked)} with: neither "
                "the whole model here nor another worker with the same experts."
            )
        if note := absence_note(self._folder.read_state().experts):
            self._notes.append(note)
        return workers


def absence_note(experts: ExpertsState | None) -> str | None:
    """Name the nodes whose rows nobody can check now, ``None`` where there are none. Pure."""
    shares = experts.workers if experts is not None else ()
    absent = [share.node_name for share in shares if share.phase is not WorkerPhase.UP]
    if not absent:
        return None
    return f"No rows of {', '.join(dict.fromkeys(absent))} were checked: no worker is up there."


def whole_model(location: str, plan: Plan) -> str | None:
    """Return the model's (first) file if it has all weights, ``None`` if it is hollow or away.

    Raises:
        LinkcppError: it cannot be read, or is not the plan's model.
    """
    if is_elsewhere(location):
        return None
    inventory = read_inventory(location)
    check_plan_model(plan, inventory)
    if plan.mode is PlanMode.EXPERTS:
        with open_whole_model(location) as files:
            if has_no_experts(files):
                return None
    return inventory.source


async def _stopped_answering(folder: DeploymentFolder, error: SilentError) -> LinkcppError:
    """Say what is known of a deployment that fell silent; of anything else, what was said."""
    if error.hint is not None:
        return error
    hint = f"See how it is with `linkcpp status {folder.name}`; verify again once it runs."
    report = report_on(folder)
    # Its supervisor notices a moment after those who asked it.
    until = time.monotonic() + _NOTICED_SECONDS
    while report.condition is Condition.RUNNING and time.monotonic() < until:
        await asyncio.sleep(_POLL_SECONDS)
        report = report_on(folder)
    if report.state is not None and report.state.phase is Phase.RECOVERING:
        return LinkcppError(f"{error.message} It is recovering.", hint=hint)
    if report.condition is not Condition.RUNNING and report.explanation:
        return LinkcppError(f"{error.message} {report.explanation}", hint=hint)
    return LinkcppError(error.message, hint=hint)


def _hint(report: DeploymentReport) -> str:
    if report.condition is Condition.STARTING:
        return "Wait until `linkcpp status` says that it runs."
    return report.advice or "Start it with `linkcpp launch PLAN`."
