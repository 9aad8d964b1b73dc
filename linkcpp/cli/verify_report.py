"""The tables of ``linkcpp verify``, which fit into 80 columns."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from linkcpp.cli.tables import WholeTable
from linkcpp.common.text import printable
from linkcpp.verify.records import TextAgreement, VerifyReport, WorkerReport
from linkcpp.worker.agreement import Verdict

_COLOURS = {Verdict.EXACT: "green", Verdict.EQUIVALENT: "yellow", Verdict.DIFFERS: "red"}


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
