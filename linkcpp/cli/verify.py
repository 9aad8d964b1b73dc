"""``linkcpp verify``: what a deployment computes, against one process with the whole model."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table

from linkcpp.cli.output import console, print_json, status_console
from linkcpp.cli.plan_files import load_plan
from linkcpp.cli.verb import verb
from linkcpp.launch.folder import DeploymentFolder, existing_deployment
from linkcpp.verify.prompts import load_prompts
from linkcpp.verify.records import TextAgreement, VerifyOptions, VerifyReport, WorkerReport
from linkcpp.verify.run import deployment_of_plan
from linkcpp.verify.run import verify as run_verification
from linkcpp.worker.agreement import Verdict

app = verb()

_COLOURS = {Verdict.EXACT: "green", Verdict.EQUIVALENT: "yellow", Verdict.DIFFERS: "red"}


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
        console().print(_view(report))
    if report.verdict is Verdict.DIFFERS:
        raise typer.Exit(1)


def _deployment(target: str | None) -> DeploymentFolder:
    if target is not None and ("/" in target or target.endswith(".json")):
        return deployment_of_plan(load_plan(Path(target)))
    return existing_deployment(target)


def _run(folder: DeploymentFolder, options: VerifyOptions) -> VerifyReport:
    screen = status_console()
    with Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=screen,
        disable=not screen.is_terminal,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        return asyncio.run(run_verification(folder, options, tell))


def _view(report: VerifyReport) -> RenderableType:
    parts: list[RenderableType] = []
    if report.text is not None:
        parts.append(_text_table(report))
    if report.workers:
        parts.append(_worker_table(report.workers))
    parts += [
        f"{escape(worker.name)}: {escape(worker.problem)}"
        for worker in report.workers
        if worker.problem
    ]
    parts += [f"[dim]{escape(note)}[/]" for note in report.notes]
    parts.append(
        f"[bold]{escape(report.name)}[/]: [{_COLOURS[report.verdict]}]{escape(report.summary)}[/]"
    )
    return Group(*parts)


def _text_table(report: VerifyReport) -> Table:
    table = Table("prompt", box=None, padding=(0, 1), header_style="dim")
    table.columns[0].overflow = "ellipsis"
    titles = ("tokens", "compared", "equal", "largest diff", "top-1", "top-8", "mean KL", "verdict")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for prompt in report.prompts:
        cells = _text_cells(prompt.agreement)
        table.add_row(escape(prompt.beginning), str(prompt.prompt_tokens), *cells)
    if report.text is not None:
        total = sum(prompt.prompt_tokens for prompt in report.prompts)
        table.add_row("[bold]all[/]", str(total), *_text_cells(report.text))
    return table


def _text_cells(found: TextAgreement) -> list[str]:
    return [
        str(found.position_count),
        str(found.equal_count),
        f"{found.largest_difference:.3g}",
        f"{found.top1_share:.2%}",
        f"{found.top8_share:.2%}",
        f"{found.mean_divergence:.2g}",
        _coloured(found.verdict),
    ]


def _worker_table(workers: tuple[WorkerReport, ...]) -> Table:
    table = Table("worker", box=None, padding=(0, 1), header_style="dim")
    table.add_column("against", overflow="fold")
    for title in ("layers", "rows", "least cosine", "largest diff", "relative", "verdict"):
        table.add_column(title, justify="right", no_wrap=True)
    for worker in workers:
        found = worker.agreement
        table.add_row(
            escape(worker.name),
            escape(", ".join(worker.against)) or "nobody",
            str(worker.layer_count),
            "-" if found is None else str(found.row_count),
            "-" if found is None else f"{found.least_cosine:.6f}",
            _number(None if found is None else found.largest_difference),
            _number(None if found is None else found.relative_error),
            "unchecked" if worker.verdict is None else _coloured(worker.verdict),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _coloured(verdict: Verdict) -> str:
    return f"[{_COLOURS[verdict]}]{verdict.value}[/]"
