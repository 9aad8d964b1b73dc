"""How the verbs below ``linkcpp hub`` reach the hub: as its operator, or as an admin that joined.

Whoever can read the data folder is the operator: a short-lived token is signed with the hub's own
key. Everybody else names the hub's URL and needs to have joined as admin.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.text import Text

from linkcpp.cli.output import console, status_console
from linkcpp.common.errors import LinkcppError, NotNowError
from linkcpp.common.files import write_atomically
from linkcpp.common.lockfile import held_lock
from linkcpp.common.paths import data_folder, expand_home
from linkcpp.common.text import shell_command
from linkcpp.hub.identity import load_hub_identity
from linkcpp.registry.client import HubClient, joined_client
from linkcpp.registry.connection import HubConnection, HubError
from linkcpp.registry.records import HubHealth, NodeToken, Role


def _named_folder(text: str) -> Path:
    # As a path it would be the folder where the program runs, which nobody named.
    if not text:
        raise typer.BadParameter("it names no folder")
    return Path(text)


DATA_OPTION = Annotated[
    Path | None,
    typer.Option(
        "--data",
        parser=_named_folder,
        metavar="PATH",
        help="The hub's data folder; default: hub, per user.",
    ),
]
HUB_OPTION = Annotated[
    str | None, typer.Option("--hub", help="A hub elsewhere that this machine joined as admin.")
]
JSON_OPTION = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

_OPERATOR_SECONDS = 300.0
_MIN_ID_CHARACTERS = 8
_T = TypeVar("_T")


def data_folder_of(data: Path | None) -> Path:
    """Return the data folder that is meant."""
    return (expand_home(data) if data is not None else data_folder() / "hub").absolute()


def only_hub(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of a hub's data folder: two hubs would each keep machines in its own memory.

    Raises:
        LinkcppError: a hub runs with this folder already.
    """
    taken = NotNowError(
        f"A hub runs already with the data folder {folder}.",
        hint="Stop that one first, or give another folder with --data.",
    )
    return held_lock(folder / "hub.lock", taken)


def note_address(folder: Path, url: str) -> None:
    """Keep where the hub listens, for the verbs of its operator."""
    write_atomically(_address_path(folder), url + "\n")


def is_start_of_id(word: str, whole_id: str) -> bool:
    """Whether enough of an id was written to know it by."""
    return len(word) >= _MIN_ID_CHARACTERS and whole_id.startswith(word)


def ask(
    question: Callable[[HubClient], Awaitable[_T]], *, data: Path | None, hub_url: str | None
) -> _T:
    """Put a question to the hub at ``hub_url``, or else to the one of the data folder.

    Raises:
        LinkcppError: the hub does not run, or does not take this machine as admin.
    """

    async def answer() -> _T:
        async with _client(data, hub_url) as client:
            return await question(client)

    return asyncio.run(answer())


def print_taken_away(sentence: str, remark: str | None) -> None:
    """Say that something was taken away, and on stderr what the hub remarks about it."""
    console().print(sentence)
    if remark:
        status_console().print(Text(remark, style="yellow"), soft_wrap=True)


def _client(data: Path | None, hub_url: str | None) -> HubClient:
    if hub_url is not None:
        return joined_client(hub_url)
    folder = data_folder_of(data)
    command = shell_command("linkcpp", "hub", "--data", folder)
    identity = load_hub_identity(folder)
    try:
        url = _address_path(folder).read_text().strip()
    except OSError:
        raise LinkcppError(
            f"The hub of {folder} never ran.",
            hint=f"`{command}` runs it.",
        ) from None

    async def sign(_: HubConnection, health: HubHealth) -> NodeToken:
        if health.hub_id != identity.hub_id:
            raise HubError(
                f"Another hub than that of {folder} answers at {url}.",
                hint=f"See that `{command}` runs.",
                code="other_hub",
            )
        return identity.issue(
            identity.hub_id, Role.ADMIN, now=health.time, lifetime_seconds=_OPERATOR_SECONDS
        )

    # The hub itself, on this machine.
    return HubClient(url, renew=sign, allow_plain=True)


def _address_path(folder: Path) -> Path:
    return folder / "listens-at"
