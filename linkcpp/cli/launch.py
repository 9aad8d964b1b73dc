"""``linkcpp launch``: from a plan to an API that answers."""

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from linkcpp.cli.log_format import LogFormatOption
from linkcpp.cli.output import chat_sentence, console, print_json, status_console, task_name
from linkcpp.cli.own_command import LINKCPP
from linkcpp.cli.plan_files import load_plan
from linkcpp.cli.verb import refuse_together, verb
from linkcpp.cluster.addresses import own_addresses
from linkcpp.cluster.config import load_config, node_url, parse_node_url
from linkcpp.common.errors import LinkcppError
from linkcpp.common.logs import LogFormat, choose_format
from linkcpp.common.systemd import systemd_unit
from linkcpp.common.units import format_bytes, format_percent, parse_bytes, parse_percent
from linkcpp.engine.check import choose_engine
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.preview import Preview, preview
from linkcpp.launch.progress import Bar, bars_of
from linkcpp.launch.records import (
    DEFAULT_PATIENCE_SECONDS,
    DeploymentState,
    LaunchRequest,
    Phase,
)
from linkcpp.launch.start import make_request, prepared, start_detached, states_until_up
from linkcpp.launch.stopping import stop_deployment
from linkcpp.launch.supervisor import log_to, run_until_stopped
from linkcpp.planning.records import PlanMode
from linkcpp.worker.sampling import DEFAULT_RATE

app = verb()

_WILDCARDS = ("0.0.0.0", "::")
_LOOPBACK = ("127.", "::1")


@app.command()
def launch(
    *,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan of `linkcpp plan`.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="The GGUF file, if it is not where it was planned."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The deployment's name; default: the model's.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Where the API listens; beyond loopback it needs a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The API's port; 0 picks a free one.")
    ] = 8080,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with API keys, one per line.")
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", help="Another address to look for nodes at.")
    ] = None,
    no_mdns: Annotated[
        bool, typer.Option("--no-mdns", help="Do not look for nodes on the local network.")
    ] = False,
    templates: Annotated[
        str | None, typer.Option("--templates", help="Folder with your own templates.")
    ] = None,
    fallback_memory: Annotated[
        str | None,
        typer.Option(
            "--fallback-memory",
            help="Mode experts: RAM of this machine for computing experts whose nodes are all "
            "away; default: what the plan leaves free, 0: not at all.",
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            "--patience",
            min=0,
            max=3600,
            help="Mode experts: seconds that a request waits for a node when nobody can compute "
            "what it needs; then it fails with status 503.",
        ),
    ] = DEFAULT_PATIENCE_SECONDS,
    spot_checks: Annotated[
        str,
        typer.Option(
            "--spot-checks",
            help="Mode experts: how much of the workers' work another worker or this machine does "
            "too, to compare; 0: nothing.",
        ),
    ] = format_percent(DEFAULT_RATE),
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground",
            help="Stay attached and wait for what is missing, as service managers expect.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every command and file, and do nothing.")
    ] = False,
    log_format: LogFormatOption = LogFormat.PLAIN,
    unit: Annotated[
        bool, typer.Option("--systemd-unit", help="Print a unit for this launch, and do nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Start what a plan describes, check that it is so, and print the API's URL."""
    refuse_together({"--foreground": foreground, "--dry-run": dry_run})
    refuse_together({"--foreground": foreground, "--json": as_json})
    refuse_together({"--systemd-unit": unit, "--dry-run": dry_run})
    refuse_together({"--systemd-unit": unit, "--json": as_json})
    plan = load_plan(plan_file)
    _refuse_for_mode(
        plan.mode,
        {
            "--fallback-memory": fallback_memory is not None,
            "--patience": patience != DEFAULT_PATIENCE_SECONDS,
            "--spot-checks": spot_checks != format_percent(DEFAULT_RATE),
        },
    )
    request = make_request(
        plan,
        model=model,
        name=name,
        host=host,
        port=port,
        api_key_file=api_key_file,
        templates=templates,
        node_urls=tuple(parse_node_url(url) for url in node or ()),
        use_mdns=not no_mdns,
        fallback_bytes=None if fallback_memory is None else parse_bytes(fallback_memory),
        patience_seconds=patience,
        spot_check_rate=parse_percent(spot_checks),
        keeps_trying=foreground,
    )
    choose_format(log_format)
    if unit:
        print(_unit(request, plan_file), end="")
    elif dry_run:
        _show_preview(preview(request, program=_program()), as_json=as_json)
    elif foreground:
        _run_in_foreground(request)
    else:
        _run_detached(request, as_json=as_json)


def _refuse_for_mode(mode: PlanMode, options: dict[str, bool]) -> None:
    """Refuse options about experts, each with whether it is given, for a plan without experts."""
    given = [name for name, is_given in options.items() if is_given]
    if given and mode is not PlanMode.EXPERTS:
        raise LinkcppError(
            f"{given[0]} is for mode experts, and this plan is of mode {mode}.",
            hint=f"Omit {' and '.join(given)}, or plan with --mode experts.",
        )


def _run_detached(request: LaunchRequest, *, as_json: bool) -> None:
    with prepared(request) as (folder, inherited):
        supervisor = start_detached(folder, inherited)
    try:
        state = _show_progress(folder, supervisor)
    except BaseException:
        # Ctrl-C among others: what was begun is not left half done.
        screen = status_console()
        screen.print("stopping what was started")
        stop_deployment(folder)
        supervisor.wait()
        _forget_if_nothing_ran(folder)
        screen.print("stopped; nothing of it is left running")
        raise
    if state.phase is Phase.FAILED:
        _forget_if_nothing_ran(folder)
        raise LinkcppError(state.detail or "The launch failed.", hint=state.hint)
    if state.phase is Phase.STOPPED:
        raise LinkcppError("The deployment was stopped while it started.")
    if as_json:
        print_json(state)
    else:
        _show_result(state, request.host)


def _forget_if_nothing_ran(folder: DeploymentFolder) -> None:
    """Leave no deployment behind where a launch was refused before it did anything."""
    state = folder.read_state()
    if state.phase.is_final and not state.has_loaded:
        folder.forget()


def _show_progress(
    folder: DeploymentFolder, supervisor: "subprocess.Popen[bytes]"
) -> DeploymentState:
    screen = status_console()
    # The ^C that a terminal echoes must not break a line, or a part of the bars is left behind.
    screen.width = max(screen.width - len("^C") - 1, 1)
    said: set[str] = set()
    with _bars(screen) as progress:
        tasks: dict[str, TaskID] = {}
        for state in states_until_up(folder, supervisor):
            bars = bars_of(state)
            _update(progress, tasks, bars)
            # Why it failed is said at the end, with the way out.
            told = {state.detail} if state.phase is Phase.FAILED else set()
            news = [n.text for n in state.notices if n.text not in said and n.text not in told]
            done = [bar.label for bar in bars if bar.is_complete and bar.label not in said]
            said.update(news, done)
            # A terminal has the bars; a log file gets a line for each stage that is done.
            for line in news + ([] if screen.is_terminal else done):
                progress.console.print(line)
    return state


def _bars(screen: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text=Text("✓", "green")),
        task_name(),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        console=screen,
        disable=not screen.is_terminal,
    )


def _update(progress: Progress, tasks: dict[str, TaskID], bars: list[Bar]) -> None:
    labels = {bar.label for bar in bars}
    for gone in [label for label in tasks if label not in labels]:
        progress.remove_task(tasks.pop(gone))
    for bar in bars:
        if bar.label not in tasks:
            tasks[bar.label] = progress.add_task(bar.label, total=bar.total, amount="")
        progress.update(tasks[bar.label], completed=bar.done, total=bar.total, amount=_amount(bar))


def _amount(bar: Bar) -> str:
    if bar.is_bytes:
        return f"{format_bytes(bar.done)} of {format_bytes(bar.total)}"
    return f"{bar.done} of {bar.total}" if bar.total > 1 else ""


def _show_result(state: DeploymentState, host: str) -> None:
    url = state.api_url or ""
    words = ["curl", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    command = shlex.join([*words, "-d", body])
    if state.api_key_file:
        # Read by the shell when it is typed, so that the key itself is on no screen.
        command += f' -H "Authorization: Bearer $(head -n 1 {shlex.quote(state.api_key_file)})"'
    out = console()
    answers = ((state.name, "bold"), " answers at ", (f"{url}/v1", "bold"), " (OpenAI API)")
    out.print(Text.assemble(*answers), soft_wrap=True)
    for address in _addresses_for_others(host):
        other = node_url(address, int(url.rpartition(":")[2]))
        out.print(f"  for other machines: {other}/v1", soft_wrap=True)
    if state.api_key_file:
        out.print(f"  Every request needs the API key in {state.api_key_file}", soft_wrap=True)
    out.print(f"  {command}", soft_wrap=True)
    if state.chat_url:
        chat = chat_sentence(state.chat_url, needs_key=bool(state.api_key_file))
        out.print(f"  {chat}", soft_wrap=True)
    for word in ("status", "logs", "stop"):
        out.print(f"  linkcpp {word} {state.name}", soft_wrap=True)


def _addresses_for_others(host: str) -> tuple[str, ...]:
    """Return where other machines reach an API that listens on all interfaces."""
    if host not in _WILDCARDS:
        return ()
    try:
        addresses = own_addresses(host)
    except OSError:
        return ()
    return tuple(address for address in addresses if not address.startswith(_LOOPBACK))


def _run_in_foreground(request: LaunchRequest) -> None:
    with prepared(request) as (folder, _):
        log_to(folder, attached=True)
        state = run_until_stopped(folder)
        _forget_if_nothing_ran(folder)
    if state.phase is Phase.FAILED:
        raise LinkcppError(state.detail or "The deployment failed.", hint=state.hint)


def _program() -> str:
    """Return llama-server's path, or a placeholder where this machine has no engine (yet)."""
    try:
        return str(choose_engine(load_config().engine).location.llama_server)
    except LinkcppError:
        return "<llama-server>"


def _show_preview(plan: Preview, *, as_json: bool) -> None:
    if as_json:
        print_json(plan)
        return

    def say(title: str, rest: str = "") -> None:
        screen.print(Text.assemble((title, "bold"), rest), soft_wrap=True)

    screen = console()
    say(plan.name, ": what a launch would do; it did nothing.")
    for server in plan.servers:
        address = server.urls[0] if server.urls else "<address>"
        say(f"\non {server.node_name}", f", asked by POST {address}/v1/servers")
        say("", server.request.model_dump_json())
        say("", f"$ {shlex.join(server.command)}")
    for worker in plan.workers:
        where = "here, in an rpc-server that the virtual device drives"
        if worker.urls:
            where = f"in a worker, asked for by POST {worker.urls[0]}/v1/workers"
        experts = f"{format_bytes(worker.slice_bytes)} (layers:experts {' '.join(worker.experts)})"
        say(f"\nexperts on {worker.node_name} {worker.device}", f", {where}: {experts}")
        say("", f"$ {shlex.join(worker.command)}")
    say("\nhere")
    for program in plan.programs:
        say("", f"$ {shlex.join(program)}")
    say("", f"$ {_shell_words(plan.command)}")
    say("\nfiles")
    for file in plan.files:
        say("", f"{file.path}  ({file.purpose})")
        if file.content is not None:
            say("", file.content)


def _shell_words(command: tuple[str, ...]) -> str:
    """Write a command with one option a line."""
    lines = [shlex.quote(command[0])]
    for word in command[1:]:
        if word.startswith("-") and not word[1:2].isdigit():
            lines.append(f"  {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def _unit(request: LaunchRequest, plan_file: Path) -> str:
    command = [*LINKCPP, "launch", str(plan_file.absolute())]
    command += ["--foreground", "--name", request.name, "--model", request.model_path]
    command += ["--host", request.host, "--port", str(request.port)]
    if request.api_key_file:
        command += ["--api-key-file", request.api_key_file]
    if request.templates_folder:
        command += ["--templates", request.templates_folder]
    if request.plan.mode is PlanMode.EXPERTS:
        if request.fallback_bytes is not None:
            command += ["--fallback-memory", f"{request.fallback_bytes}B"]
        command += ["--patience", f"{request.patience_seconds:g}"]
        command += ["--spot-checks", format_percent(request.spot_check_rate)]
    for url in request.node_urls:
        command += ["--node", url]
    if not request.use_mdns:
        command += ["--no-mdns"]
    what = f"linkcpp deployment {request.name}"
    return systemd_unit(request.name, what, command, own_templates=request.templates_folder)
