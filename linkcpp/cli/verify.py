"""``linkcpp verify``: what a deployment computes, against one process with the whole model."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID
from rich.table import Table
from rich.text import Text

from linkcpp.cli.output import ProgressLines, console, print_json, status_console, task_name
from linkcpp.cli.plan_files import load_plan
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.common.text import printable
from linkcpp.launch.folder import DeploymentFolder, existing_deployment
from linkcpp.planning.records import PlanMode
from linkcpp.verify.prompts import load_prompts
from linkcpp.verify.records import TextAgreement, VerifyOptions, VerifyReport, WorkerReport
from linkcpp.verify.run import deployment_of_plan
from linkcpp.verify.run import verify as run_verification
from linkcpp.worker.agreement import Verdict

_COLOURS = {Verdict.EXACT: "green", Verdict.EQUIVALENT: "yellow", Verdict.DIFFERS: "red"}
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
    """Compare a running deployment with the whole model; exit code 1 if they differ."""
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


def verification_view(report: VerifyReport) -> RenderableType:
    """Lay out what was found: the text, the workers, what was left out, the verdict."""
    parts: list[RenderableType] = []
    if report.text is not None:
        parts.append(_text_table(report, report.text))
    if report.workers:
        parts.append(_worker_table(report.workers))
    parts += [
        f"{printable(worker.name)}: {worker.problem}" for worker in report.workers if worker.problem
    ]
    parts += [Text(note, "dim") for note in report.notes]
    name, verdict = (printable(report.name), "bold"), (report.summary, _COLOURS[report.verdict])
    parts.append(Text.assemble(name, ": ", verdict))
    return Group(*parts)


def _text_table(report: VerifyReport, text: TextAgreement) -> Table:
    table = _table("prompt")
    _add_numbers(table, "tokens", "equal", "largest\ndiff", "top-1", "top-8", "mean\nKL", "verdict")
    for prompt in report.prompts:
        cells = _text_cells(prompt.agreement)
        # The column may be narrowed, but a prompt stays on its line.
        beginning = Text(printable(prompt.beginning), no_wrap=True, overflow="ellipsis")
        table.add_row(beginning, str(prompt.prompt_tokens), *cells)
    total = sum(prompt.prompt_tokens for prompt in report.prompts)
    table.add_row(Text("all", "bold"), str(total), *_text_cells(text))
    return table


def _text_cells(found: TextAgreement) -> list[str | Text]:
    return [
        f"{found.equal_count} of {found.position_count}",
        f"{found.largest_difference:.2g}",
        _share(found.top1_share),
        _share(found.top8_share),
        f"{found.mean_divergence:.2g}",
        _coloured(found.verdict),
    ]


def _worker_table(workers: tuple[WorkerReport, ...]) -> Table:
    table = _table("worker")
    table.add_column("against")
    _add_numbers(table, "layers", "rows", "least\ncosine", "largest\ndiff", "relative", "verdict")
    for worker in workers:
        found = worker.agreement
        table.add_row(
            printable(worker.name),
            ", ".join(worker.against) or "nobody",
            str(worker.layer_count),
            "-" if found is None else str(found.row_count),
            "-" if found is None else f"{found.least_cosine:.6f}",
            _number(None if found is None else found.largest_difference),
            _number(None if found is None else found.relative_error),
            "unchecked" if worker.verdict is None else _coloured(worker.verdict),
        )
    return table


def _table(first: str) -> Table:
    table = WholeTable(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(first)
    return table


def _add_numbers(table: Table, *titles: str) -> None:
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)


def _share(share: float) -> str:
    return "100 %" if share == 1 else f"{share:.2%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _coloured(verdict: Verdict) -> Text:
    return Text(verdict.value, _COLOURS[verdict])
