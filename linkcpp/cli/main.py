"""The ``linkcpp`` command: finds the verb, and turns expected failures into one sentence.

Exit codes: 0 done, 1 a defect of linkcpp, 2 something that the user can mend, 130 interrupted.
"""

import importlib
import os
import sys
import traceback
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from linkcpp import __version__
from linkcpp.common.errors import LinkcppError
from linkcpp.common.files import write_atomically
from linkcpp.common.paths import state_folder

# A verb's module is imported only when it is used: `linkcpp status` need not load the solver.
VERBS = (
    "doctor",
    "engine",
    "token",
    "node",
    "discover",
    "inspect",
    "slice",
    "plan",
    "launch",
    "status",
    "logs",
    "stop",
)


class _Verbs(TyperGroup):
    """Loads ``linkcpp.cli.<verb>`` and takes its ``app``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"linkcpp.cli.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Verbs,
    name="linkcpp",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    help="Serve one model from many machines, on stock llama.cpp.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"linkcpp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Take the options that stand before the verb."""


def main() -> None:
    """Run the command line; the entry point of the ``linkcpp`` program."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app()
    except LinkcppError as error:
        errors.print(f"[bold red]error:[/] {_escape(error.message)}")
        if error.hint:
            errors.print(f"[bold]way out:[/] {_escape(error.hint)}")
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away (`linkcpp discover | head`): nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if os.environ.get("LINKCPP_DEBUG"):
            raise
        report = state_folder() / "last-defect.txt"
        write_atomically(report, traceback.format_exc(), mode=0o600)
        errors.print(f"[bold red]defect in linkcpp:[/] {_escape(repr(error))}")
        errors.print(f"The details are in {report}; LINKCPP_DEBUG=1 prints them instead.")
        sys.exit(1)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    main()
