"""``linkcpp verify``: what a deployment computes, against one process with the whole model."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID
from rich.text import Text

from linkcpp.cli.output import ProgressLines, console, print_json, status_console, task_name
from linkcpp.cli.plan_files import load_plan
from linkcpp.cli.verb import verb
from linkcpp.cli.verify_report import verification_view
from linkcpp.launch.folder import DeploymentFolder, existing_deployment
from linkcpp.planning.records import PlanMode
from linkcpp.verify.prompts import load_prompts
from linkcpp.verify.records import VerifyOptions, VerifyReport
from linkcpp.verify.run import deployment_of_plan
from linkcpp.verify.run import verify as run_verification
from linkcpp.worker.agreement import Verdict

app = verb()


@app.command()
def verify(
    *,
    target: Annotated[
        str | None,
        typer.Argument(metavar="[PLAN|NAME]", help="A running deployment, or the plan it is of."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Own prompts: one a line, or a JSON list of texts."),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Tokens to compare after each prompt.")
    ] = 32,
    experts: Annotated[
        int,
        typer.Option("--experts", min=1, max=64, help="Experts to check of each worker's layer."),
    ] = 4,
    model: Annotated[
        str | None, typer.Option("--model", help="The whole model, if not where it was launched.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a running deployment with the whole model; exit code 1 where they differ."""
    options = VerifyOptions(
        prompts=load_prompts(prompts), token_count=tokens, expert_count=experts, model=model
    )
    report = _run(_deployment(target), options)
    if as_json:
        print_json(report)
    else:
        console(80).print(verification_view(report))
    if report.verdict is Verdict.DIFFERS:
        raise typer.Exit(1)


def _deployment(target: str | None) -> DeploymentFolder:
    if target is not None and ("/" in target or target.endswith(".json")):
        return deployment_of_plan(load_plan(Path(target)))
    return existing_deployment(target)


def _run(folder: DeploymentFolder, options: VerifyOptions) -> VerifyReport:
    screen = status_console()
    if not screen.is_terminal:
        lines = ProgressLines(screen)
        lines.say(_what_will_be_done(folder.name, folder.read_plan().mode, options))
        return asyncio.run(run_verification(folder, options, lines.tell))
    with Progress(
        SpinnerColumn(finished_text=Text("✓", "green")),
        task_name(),
        BarColumn(),
        MofNCompleteColumn(),
        console=screen,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        return asyncio.run(run_verification(folder, options, tell))


def _what_will_be_done(name: str, mode: PlanMode, options: VerifyOptions) -> str:
    prompts, tokens = len(options.prompts), options.token_count
    text = (
        f"verifying {name}: {prompts} {'prompt' if prompts == 1 else 'prompts'} with {tokens} "
        "tokens after each"
    )
    if mode is not PlanMode.EXPERTS:
        return text
    return f"{text}, then {options.expert_count} experts of each layer of every worker"
