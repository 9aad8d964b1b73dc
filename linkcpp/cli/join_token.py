"""A join token, however a person hands it over: exchanged, and out of the process list again."""

import asyncio
import os
import sys
from pathlib import Path

import typer

from linkcpp.cli.output import working
from linkcpp.cli.own_command import own_command
from linkcpp.cluster.config import load_config
from linkcpp.cluster.identity import Identity, load_identity
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import expand_home
from linkcpp.registry.client import join_hub
from linkcpp.registry.credentials import HubCredentials, joined_name, load_credentials
from linkcpp.registry.keys import load_keys
from linkcpp.registry.records import Role

TOKEN_VARIABLE = "LINKCPP_JOIN_TOKEN"  # noqa: S105 - the name of a variable, no secret
_MAX_TOKEN_BYTES = 4096


def own_identity(name: str | None, url: str) -> Identity:
    """Say who this machine is at a hub: by ``name``, its settings, or what it joined as.

    Raises:
        LinkcppError: the settings, the credentials or the id of this machine cannot be used.
    """
    return load_identity(name or load_config().name or joined_name(url))


def credentials_of(
    url: str, token: str | None, identity: Identity, *, roles: tuple[Role, ...], plain: bool
) -> HubCredentials:
    """Exchange a join token where one was given, else use what an earlier one was exchanged for.

    A token for none of ``roles`` is refused, and keeps its use. One that stands in the process list
    is exchanged, and the command starts anew without it.

    Raises:
        LinkcppError: the hub cannot be reached or does not take the token, or there is none and
            this machine did not join that hub before.
    """
    secret = read_join_token(token)
    if secret is None:
        kind = f" --role {roles[0].value}" if len(roles) == 1 else ""
        made = f"`linkcpp hub token create{kind}`"
        return load_credentials(url, hint=f"Add --token -, and give it a token that {made} made.")
    with working("joining the hub"):
        joining = join_hub(
            url, secret, identity=identity, keys=load_keys(), roles=roles, allow_plain=plain
        )
        credentials = asyncio.run(joining)
    if token is not None and is_literal(token):
        restart_without_token()
    return credentials


def is_literal(value: str) -> bool:
    """Whether an option holds the token itself, which everybody on the machine can then read."""
    return value != "-" and not value.startswith("@")


def read_join_token(value: str | None) -> str | None:
    """Read a token from ``-`` (standard input or a question), ``@FILE``, itself, or the variable.

    Returns ``None`` where none was given.

    Raises:
        LinkcppError: the file cannot be read, or nothing was entered.
    """
    if value is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    if value == "-":
        return _from_stdin()
    if value.startswith("@"):
        return _from_file(expand_home(Path(value[1:])))
    return value


def _from_stdin() -> str:
    if sys.stdin is not None and sys.stdin.isatty():
        text = str(typer.prompt("Join token", hide_input=True))
    else:
        text = sys.stdin.read(_MAX_TOKEN_BYTES) if sys.stdin is not None else ""
    if not text.strip():
        raise LinkcppError(
            "No join token came on standard input.",
            hint="`linkcpp hub token create` on the hub makes one.",
        )
    return text.strip()


def _from_file(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_MAX_TOKEN_BYTES).strip()
    except OSError as error:
        raise LinkcppError(
            f"The join token's file {path} cannot be read: {error.strerror}.",
            hint="Name a file with the token in it: --token @FILE.",
        ) from error


def restart_without_token() -> None:
    """Put this very command in this process's place, without ``--token`` and the variable.

    A process cannot change its own arguments; a new program in the same process has others.
    """
    environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, own_command(), environment)  # noqa: S606 - this very program
