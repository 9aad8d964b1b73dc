"""``linkcpp status``: what runs, where, and how well."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from linkcpp.cli.output import chat_sentence, console, print_json, window_text, without_ids
from linkcpp.cli.plan_files import save_counts
from linkcpp.cli.status_experts import experts_view
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import refuse_together, verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import shell_command
from linkcpp.common.units import format_bytes
from linkcpp.launch.api import ApiClient
from linkcpp.launch.experts.counts import routing_counts_of
from linkcpp.launch.folder import (
    DeploymentFolder,
    all_deployments,
    current_deployments,
    existing_deployment,
)
from linkcpp.launch.lookup import find_deployment
from linkcpp.launch.records import DeploymentState, StageState
from linkcpp.launch.status import Condition, DeploymentReport, report_on

app = verb()

_COLOURS = {
    Condition.RUNNING: "green",
    Condition.STARTING: "yellow",
    Condition.STOPPED: "dim",
    Condition.FAILED: "red",
    Condition.CRASHED: "red",
    Condition.UNREADABLE: "red",
}


@app.command()
def status(
    *,
    name: Annotated[
        str | None,
        typer.Argument(help="A deployment, or its plan file (JSON: one object)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show deployments that have ended as well.")
    ] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Ask llama-server for its own counters too.")
    ] = False,
    routing_counts: Annotated[
        Path | None,
        typer.Option(
            "--routing-counts",
            metavar="FILE",
            help="Write how often each expert was chosen, for `linkcpp plan --hot FILE`.",
        ),
    ] = None,
) -> None:
    """Show what runs, where, and whether it still works."""
    refuse_together({"--watch": watch, "--json": as_json})
    refuse_together({"--routing-counts": routing_counts, "--watch": watch, "--metrics": metrics})
    if routing_counts is not None:
        _write_counts(find_deployment(name), routing_counts, as_json=as_json)
        return
    if name is not None:
        name = find_deployment(name).name
    if watch:
        _watch(name, every=every)
        return
    reports = _reports(name, every=every)
    counters = {report.name: _metrics_of(report) for report in reports} if metrics else {}
    if as_json:
        plain = [_plain(report, counters.get(report.name)) for report in reports]
        print_json(plain[0] if name is not None else plain)
        return
    console().print(status_view(reports))
    if name is None and (ended := len(all_deployments()) - len(reports)):
        console().print(Text(f"{ended} more ended earlier: linkcpp status --all", "dim"))
    for deployment, values in counters.items():
        console().print(_metrics_table(deployment, values))


def _write_counts(folder: DeploymentFolder, path: Path, *, as_json: bool) -> None:
    counts = routing_counts_of(folder)
    save_counts(counts, path)
    if as_json:
        print_json(counts)
        return
    pairs = sum(sum(experts.values()) for experts in counts.layers.values())
    model = folder.read_request().model_path
    command = shell_command("linkcpp", "plan", "--model", model, "--mode", "experts", "--hot", path)
    text = (
        f"{path} tells of {pairs:,} choices of experts in {len(counts.layers)} layers. Place the "
        f"often chosen ones nearby with: {command}"
    )
    console().print(text, soft_wrap=True)


def _reports(name: str | None, *, every: bool) -> list[DeploymentReport]:
    return [report_on(folder) for folder in _folders(name, every=every)]


def _folders(name: str | None, *, every: bool) -> list[DeploymentFolder]:
    if name is not None:
        return [existing_deployment(name)]
    return all_deployments() if every else current_deployments()


def _plain(report: DeploymentReport, counters: dict[str, float] | None) -> dict[str, object]:
    plain = report.model_dump(mode="json")
    return plain if counters is None else {**plain, "metrics": counters}


def _metrics_of(report: DeploymentReport) -> dict[str, float]:
    state = report.state
    if report.condition is not Condition.RUNNING or state is None or state.api_url is None:
        return {}
    return asyncio.run(_ask_metrics(state.api_url, state.api_key_file))


async def _ask_metrics(url: str, api_key_file: str | None) -> dict[str, float]:
    try:
        async with ApiClient(url, api_key_file) as api:
            return await api.metrics()
    except LinkcppError:
        return {}


def _watch(name: str | None, *, every: bool) -> None:
    first = status_view(_reports(name, every=every))
    with Live(first, console=console(), auto_refresh=False) as live:
        while True:
            time.sleep(1.0)
            live.update(status_view(_reports(name, every=every)), refresh=True)


def status_view(reports: list[DeploymentReport]) -> RenderableType:
    """Lay deployments out for people."""
    if not reports:
        return "There is no deployment. `linkcpp launch PLAN` makes one."
    return Group(*(part for report in reports for part in _report_view(report)))


def _report_view(report: DeploymentReport) -> list[RenderableType]:
    condition = (report.condition.value, _COLOURS[report.condition])
    head = Text.assemble((report.name, "bold"), " ", condition)
    state = report.state
    if state is None or report.condition not in (Condition.RUNNING, Condition.STARTING):
        return [head, *_explanation(report)]
    if report.uptime_seconds is not None:
        head.append(f" for {_duration(report.uptime_seconds)} at {state.api_url}")
    if report.condition is Condition.STARTING:
        head.append(f": {state.phase.value.replace('_', ' ')}")
    experts = experts_view(state.experts) if state.experts else []
    ways = [f"  {stage.node_name}: {without_ids(stage.way)}" for stage in state.stages if stage.way]
    facts = [*_explanation(report), _facts(state), *_memory(report)]
    if state.chat_url:
        sentence = chat_sentence(state.chat_url, needs_key=bool(state.api_key_file))
        facts.append(f"  {sentence}")
    return [head, *facts, _stage_table(state), *ways, *experts]


def _explanation(report: DeploymentReport) -> list[RenderableType]:
    return [f"  {text}" for text in (report.explanation, report.advice) if text]


def _facts(state: DeploymentState) -> str:
    facts = [f"model {state.model_name}", f"mode {state.mode}"]
    if state.tokens_per_second is not None:
        facts.append(f"last answer {state.tokens_per_second:.1f} tokens/s")
    if state.prompt_tokens_per_second is not None:
        facts.append(f"last prompt {state.prompt_tokens_per_second:.1f} tokens/s")
    facts.append(f"restarts {state.restart_count}")
    if state.excluded_nodes:
        facts.append(f"without {', '.join(state.excluded_nodes)}")
    return f"  {', '.join(facts)}"


def _memory(report: DeploymentReport) -> list[RenderableType]:
    memory = report.memory
    if memory is None:
        return []
    return [
        f"  RAM here: {format_bytes(memory.used_bytes)} in use, "
        f"{format_bytes(memory.planned_bytes)} planned, "
        f"{format_bytes(memory.allowed_bytes)} allowed"
    ]


def _stage_table(state: DeploymentState) -> Table:
    table = WholeTable("node", box=None, padding=(0, 1), header_style="dim")
    for title in ("device", "layers"):
        table.add_column(title, no_wrap=True)
    for title in ("planned", "held", "memory", "in use", "rtt", "carried"):
        table.add_column(title, justify="right", no_wrap=True)
    for stage in state.stages:
        table.add_row(*_stage_cells(stage))
    return table


def _stage_cells(stage: StageState) -> list[str]:
    held = stage.model_buffer_bytes if stage.is_coordinator else stage.held_weight_bytes
    return [
        f"{stage.node_name}{' (here)' if stage.is_coordinator else ''}",
        stage.device,
        window_text(stage.first_layer, stage.layer_count, holds_output=stage.holds_output)
        or "none",
        format_bytes(stage.planned_weight_bytes),
        "-" if held is None else format_bytes(held),
        format_bytes(stage.allocated_bytes or stage.planned_memory_bytes),
        format_bytes(stage.resident_bytes) if stage.resident_bytes else "-",
        "-" if stage.rtt_ms is None else f"{stage.rtt_ms:.2f} ms",
        "-" if stage.is_coordinator else format_bytes(stage.carried_bytes),
    ]


def _metrics_table(deployment: str, counters: dict[str, float]) -> Table:
    table = WholeTable("counter", "value", box=None, padding=(0, 2), header_style="dim")
    table.title = f"llama-server of {deployment}" + ("" if counters else ": no counters")
    for counter, value in sorted(counters.items()):
        table.add_row(counter, f"{value:g}")
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    shown = [f"{value} {unit}" for value, unit in parts if value] or ["0 s"]
    return " ".join(shown[:2])
