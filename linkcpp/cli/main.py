"""The ``linkcpp`` command: finds the verb, and turns expected failures into one sentence.

Exit codes: 0 done, 1 an internal error, 2 something that the user can mend, 75 the same where it
may also pass by itself (a port is taken, a model is not there, a disk is full), 130 interrupted.
"""

import contextlib
import importlib
import io
import os
import re
import signal
import sys
import traceback
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from linkcpp import __version__
from linkcpp.common.errors import EXIT_ERROR, EXIT_NOT_NOW, LinkcppError, is_passing
from linkcpp.common.files import keep_to_owner, write_atomically
from linkcpp.common.paths import own_folders, state_folder
from linkcpp.common.text import did_you_mean, printable

_MAX_LINE_CHARACTERS = 4096
# The class of wrong words on a command line, which Typer has under its own or under Click's name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# How Typer tells of a word that is none of an option's.
_NO_CHOICE = re.compile(r": (?P<word>[^,]+) is not one of (?P<choices>.+)$")

# A verb's module is imported only when it is used: `linkcpp status` need not load the solver.
VERBS = (
    "doctor",
    "config",
    "engine",
    "token",
    "node",
    "join",
    "hub",
    "gateway",
    "discover",
    "inspect",
    "slice",
    "worker",
    "plan",
    "launch",
    "status",
    "verify",
    "logs",
    "stop",
)


class _Verbs(TyperGroup):
    """Loads ``linkcpp.cli.<verb>`` and takes its ``app``."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
        except typer.Abort:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # The reader of our output went away (`linkcpp discover | head`): nothing is wrong.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit from None
        return result

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word in VERBS or word.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        raise LinkcppError(
            f"There is no verb {word!r}.",
            hint=did_you_mean(word, VERBS, form="`linkcpp {}`")
            + "`linkcpp --help` lists the verbs.",
        )

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type_of_flags(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"linkcpp.cli.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        _tidy_help(command, ctx)
        return command


def _tidy_help(command: Any, ctx: Any) -> None:
    """Let no flag of a verb, and of the verbs below it, look as if it took a value."""
    _without_type_of_flags(command.get_params(ctx))
    for below in getattr(command, "commands", {}).values():
        _tidy_help(below, ctx)


def _without_type_of_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""  # Typer would show `--json <bool>`
    return params


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


def _end_as_by_ctrl_c(_: int, frame: FrameType | None) -> None:
    # Called and not raised: a shell starts its background jobs with SIGINT ignored.
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)


def main() -> None:
    """Run the command line; the entry point of the ``linkcpp`` program.

    SIGTERM ends a verb as Ctrl-C does, so that it leaves as little behind.
    """
    signal.signal(signal.SIGTERM, _end_as_by_ctrl_c)
    for stream in (sys.stdout, sys.stderr):
        # A terminal without Unicode gets question marks instead of an encoding error.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        keep_to_owner(own_folders())
        # An exit code where a verb ended by one, else nothing.
        code = app(prog_name="linkcpp", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _UsageError as error:
        _tell_about_usage(errors, error)
        sys.exit(EXIT_ERROR)
    except typer.Abort:
        errors.print("interrupted")
        sys.exit(130)
    except LinkcppError as error:
        _tell(errors, "error", error.message)
        if error.hint:
            _tell(errors, "hint", error.hint)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
    except Exception as error:
        if os.environ.get("LINKCPP_DEBUG"):
            raise
        if isinstance(error, OSError):
            # A full disk behind `> file`, a folder of another user: not ours to mend.
            _tell(errors, "error", f"The system refuses: {error}.")
            _tell(errors, "hint", "Mend that; LINKCPP_DEBUG=1 shows where it happens.")
            sys.exit(EXIT_NOT_NOW if is_passing(error) else EXIT_ERROR)
        _tell(errors, "internal error", repr(error))
        _tell(errors, "hint", f"LINKCPP_DEBUG=1 prints the details.{_report_defect()}")
        sys.exit(1)


def _tell_about_usage(errors: Console, error: Any) -> None:
    """Say what is wrong with the words of a command line, as every other error is told."""
    command = error.ctx.command_path if error.ctx else "linkcpp"
    if type(error).__name__ == "NoArgsIsHelpError":  # a group alone: it has shown its verbs
        return
    message = error.format_message().rstrip(".").replace(": Value error, ", ": ", 1)
    near = ""
    if wrong := _NO_CHOICE.search(message):
        choices = [choice.strip("'\"") for choice in wrong["choices"].split(", ")]
        near = did_you_mean(wrong["word"].strip("'\""), choices)
    _tell(errors, "error", message if message.endswith("?") else f"{message}.")
    _tell(errors, "hint", f"{near}`{command} --help` lists what it takes.")


def _tell(errors: Console, what: str, text: str) -> None:
    # Text and not markup, line by line printable: it may have names from outside in it.
    lines = (printable(line, _MAX_LINE_CHARACTERS) for line in text.split("\n"))
    style = "bold" if what == "hint" else "bold red"
    with contextlib.suppress(OSError):  # where even that finds no room, the exit code tells
        errors.print(Text.assemble((f"{what}: ", style), "\n".join(lines)))


def _report_defect() -> str:
    """Keep the traceback in a file, and say where; nothing where that is not possible."""
    try:
        report = state_folder() / "last-defect.txt"
        write_atomically(report, traceback.format_exc(), mode=0o600)
    except LinkcppError:
        return ""
    return f" They are in {report}, too."


if __name__ == "__main__":
    main()
