"""``linkcpp token``: the secret that the machines of a cluster share."""

import sys
from typing import Annotated

import typer

from linkcpp.cli.output import console
from linkcpp.cli.verb import verb
from linkcpp.cluster.token import create_token, load_token, store_token, token_path
from linkcpp.common.errors import LinkcppError

_MAX_INPUT_CHARACTERS = 4096
_HOW_TO_SHARE = (
    "Every machine of the cluster needs the same one. To bring it to another machine:\n"
    "  linkcpp token --show | ssh OTHER linkcpp token set\n"
    "or run `linkcpp token set` there and paste what `linkcpp token --show` prints here.\n"
    "A node that waits for the token goes on by itself."
)

app = verb(help="Show, create or set the cluster token.")


@app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    show_token: Annotated[
        bool, typer.Option("--show", help="Print the token itself, and nothing else.")
    ] = False,
) -> None:
    """Say where the token is; with --show print it, for a pipe to `linkcpp token set`."""
    if context.invoked_subcommand is not None:
        return
    token = load_token()
    if show_token:
        typer.echo(token)
        return
    _say(f"The cluster token is in {token_path()}.", _HOW_TO_SHARE)


@app.command()
def create(
    replace: Annotated[
        bool, typer.Option("--replace", help="Make a new token although there is one.")
    ] = False,
) -> None:
    """Make a new random token of 256 bits."""
    create_token(replace=replace)
    _say(f"Made a new cluster token in {token_path()}.", _HOW_TO_SHARE)


@app.command(name="set")
def take_over(
    replace: Annotated[
        bool, typer.Option("--replace", help="Put it in the place of another token.")
    ] = False,
) -> None:
    """Take over another machine's token, read from standard input."""
    # Not an argument: those are in the process list and in the shell's history.
    if sys.stdin is None:
        text = ""
    elif sys.stdin.isatty():
        text = typer.prompt("Token", hide_input=True)
    else:
        text = sys.stdin.read(_MAX_INPUT_CHARACTERS)
    if not text.strip():
        raise LinkcppError(
            "No cluster token came on standard input; nothing was changed.",
            hint="On a machine that has the token: linkcpp token --show | ssh OTHER linkcpp token "
            f"set{' --replace' if replace else ''}",
        )
    took_the_place = store_token(text, replace=replace)
    instead = ", in place of another one" if took_the_place else ""
    _say(f"Stored the cluster token in {token_path()}{instead}.")


def _say(*lines: str) -> None:
    for line in lines:
        console().print(line, soft_wrap=True)
