"""``linkcpp logs``: what the programs of a deployment said."""

import asyncio
from typing import Annotated

import typer
from rich.text import Text

from linkcpp.cli.output import console, print_json
from linkcpp.cli.verb import refuse_together, verb
from linkcpp.common.errors import LinkcppError
from linkcpp.launch.folder import DeploymentFolder
from linkcpp.launch.logs import (
    LogPart,
    Remote,
    follow,
    local_tails,
    remote_programs,
    remote_tail,
)
from linkcpp.launch.lookup import find_deployment

app = verb()


@app.command()
def logs(
    *,
    name: Annotated[
        str | None,
        typer.Argument(help="The deployment or its plan file; not needed if there is only one."),
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="Only the programs on this node.")
    ] = None,
    tail: Annotated[int, typer.Option("--tail", min=0, help="How many lines of each.")] = 40,
    keep_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")
    ] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Print the lines alone, and whatever is in them as it is."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document: each program and its lines.")
    ] = False,
) -> None:
    """Show the logs of the supervisor, llama-server, and the programs on the nodes."""
    if raw and as_json:
        raise LinkcppError(
            "--raw and --json are two forms of the same lines.",
            hint="Give --raw for the lines alone, --json for one document.",
        )
    refuse_together({"--follow": keep_on, "--json": as_json})
    folder = find_deployment(name)
    programs = remote_programs(folder, node)
    parts = [] if node else list(local_tails(folder, tail))
    parts += asyncio.run(_remote_tails(programs, tail)) if tail else []
    if as_json:
        print_json([{"source": part.source, "lines": part.lines} for part in parts])
        return
    for part in parts:
        _show(part, raw=raw)
    if keep_on:
        asyncio.run(_follow(folder, programs, only_nodes=node is not None, raw=raw))


async def _remote_tails(programs: list[Remote], tail: int) -> list[LogPart]:
    return list(await asyncio.gather(*(remote_tail(program, tail) for program in programs)))


async def _follow(
    folder: DeploymentFolder, programs: list[Remote], *, only_nodes: bool, raw: bool
) -> None:
    async for part in follow(folder, programs):
        if not only_nodes or part.source.startswith(("rpc-server ", "worker ")):
            _show(part, raw=raw)


def _show(part: LogPart, *, raw: bool) -> None:
    screen = console()
    for line in part.lines:
        if raw:
            print(line, flush=True)
        else:
            # What programs print is text, whatever markup it looks like.
            screen.print(Text.assemble((f"{part.source} | ", "dim"), line), soft_wrap=True)
