"""``linkcpp stop``: end deployments, here and on every node."""

from typing import Annotated

import typer

from linkcpp.cli.output import console, print_json
from linkcpp.cli.verb import verb
from linkcpp.common.errors import LinkcppError
from linkcpp.launch.folder import all_deployments
from linkcpp.launch.lookup import find_deployment
from linkcpp.launch.stopping import StopResult, stop_deployment

app = verb()

_WORDS = {
    StopResult.STOPPED: "stopped",
    StopResult.CLEANED_UP: "cleaned up (its supervisor was gone)",
    StopResult.WAS_STOPPED: "was stopped already",
    StopResult.FORGOTTEN: "its state was damaged; nothing of it runs, and it is off the list",
}


@app.command()
def stop(
    name: Annotated[
        str | None,
        typer.Argument(help="The deployment or its plan file; not needed if there is only one."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all deployments.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Stop a deployment completely, here and on its nodes."""
    if every and name is not None:
        raise LinkcppError("Give a name or --all, not both.")
    folders = all_deployments() if every else [find_deployment(name)]
    results = {}
    problems = []
    for folder in folders:
        try:
            results[folder.name] = stop_deployment(folder)
        except LinkcppError as error:
            # One that cannot be read must not keep the others running.
            problems.append(error)
            continue
        was_live = results[folder.name] is not StopResult.WAS_STOPPED
        if not as_json and (was_live or not every):
            console().print(f"{folder.name}: {_WORDS[results[folder.name]]}")
    if as_json:
        print_json({deployment: result.value for deployment, result in results.items()})
    elif every and not problems and set(results.values()) <= {StopResult.WAS_STOPPED}:
        console().print("There is nothing to stop.")
    if problems:
        messages = " ".join(error.message for error in problems)
        raise LinkcppError(messages, hint=problems[0].hint)
