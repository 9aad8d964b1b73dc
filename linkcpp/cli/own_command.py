"""The command that this process is, for whoever runs it again: a unit of systemd, or itself."""

import sys
from collections.abc import Sequence

from linkcpp.cli.output import console
from linkcpp.common.systemd import systemd_unit

LINKCPP = (sys.executable, "-m", "linkcpp.cli.main")


def own_command() -> list[str]:
    """Return this process's command, without a join token."""
    return [*LINKCPP, *without_token(sys.argv[1:])]


def without_token(words: Sequence[str]) -> list[str]:
    """Return the words of a command without ``--token`` and its value. Pure."""
    kept: list[str] = []
    given = iter(words)
    for word in given:
        if word == "--token":
            next(given, None)
        elif not word.startswith("--token="):
            kept.append(word)
    return kept


def print_own_unit(name: str, description: str) -> None:
    """Print a systemd unit that runs this process's command."""
    command = [word for word in own_command() if word != "--systemd-unit"]
    console().print(systemd_unit(name, description, command), end="", soft_wrap=True)
