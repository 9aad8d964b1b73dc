"""``linkcpp hub models``: the models whose weights a hub gives to its machines."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from linkcpp.cli.hub_access import DATA_OPTION, HUB_OPTION, JSON_OPTION, ask, data_folder_of
from linkcpp.cli.output import byte_bar, console, print_json, status_console
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.paths import expand_home
from linkcpp.common.text import did_you_mean, printable, shell_command
from linkcpp.common.units import format_bytes
from linkcpp.hub.errors import ApiError
from linkcpp.hub.identity import is_hub_folder
from linkcpp.hub.weights.adding import Addition, add_model, name_for
from linkcpp.hub.weights.catalogue import Catalogue, check_name, models_folder
from linkcpp.model.parts import is_url
from linkcpp.model.web_source import public_url
from linkcpp.registry.client import HubClient
from linkcpp.registry.models import ServedModel

# Only so that whoever knows --hub from the verbs beside these is told where to go.
_ELSEWHERE = Annotated[str | None, typer.Option("--hub", hidden=True)]

app = verb(help="Add, list and remove the models of a hub.", no_args_is_help=True)


@app.command()
def add(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A GGUF file, any part of a split one, or an http(s) URL.")
    ],
    *,
    name: Annotated[
        str | None, typer.Option(help="What the hub calls it; the file's name if left out.")
    ] = None,
    copy: Annotated[
        bool,
        typer.Option("--copy", help="Copy the files into the data folder, and serve these."),
    ] = False,
    data: DATA_OPTION = None,
    hub_url: _ELSEWHERE = None,
    as_json: JSON_OPTION = False,
) -> None:
    """Hash a model, expert by expert, and serve it from now on; a running hub sees it at once.

    A file stays where it is and must not change. A URL is read once for its hashes; machines then
    take the weights from there, unless they were copied. After an interruption the same command
    goes on where it stopped.
    """
    named = data or context.obj
    folder = data_folder_of(named)
    is_new = not is_hub_folder(folder)
    catalogue = _catalogue(named, hub_url, may_be_new=named is not None)
    wanted = Addition(
        location=model if is_url(model) else str(expand_home(Path(model))),
        name=check_name(name) if name is not None else name_for(model),
        copies=copy,
        unix_time=time.time(),
    )
    try:
        entry = add_model(catalogue, wanted, byte_bar)
    except KeyboardInterrupt:
        status_console().print("The same command goes on from here.")
        raise
    if is_new:
        command = shell_command("linkcpp", "hub", "--data", folder)
        status_console().print(
            f"{folder} is a hub's data folder now: `{command}` serves it.", soft_wrap=True
        )
    if as_json:
        print_json(_public(entry.model))
        return
    console().print(Text.assemble((entry.model.name, "bold"), f"  {_summary(entry.model)}"))


@app.command(name="list")
def list_models(
    context: typer.Context,
    *,
    data: DATA_OPTION = None,
    hub_url: HUB_OPTION = None,
    as_json: JSON_OPTION = False,
) -> None:
    """List the hub's models."""
    if hub_url is not None:
        models = ask(HubClient.models, data=None, hub_url=hub_url).models
        listed = [_public(model) for model in models]
    else:
        entries = _catalogue(data or context.obj, None).entries()
        models = tuple(entry.model for entry in entries)
        listed = [
            {**_public(entry.model), "paths": [str(file.path) for file in entry.files]}
            for entry in entries
        ]
    if as_json:
        print_json({"models": listed})
    else:
        _print_models(models)


def _print_models(models: Sequence[ServedModel]) -> None:
    if not models:
        console().print("There are no models. `linkcpp hub models add MODEL.gguf` adds one.")
        return
    table = WholeTable("name", "size", "experts' part", "weights", "added", box=None)
    for model in models:
        backbone = sum(part.backbone_bytes for part in model.parts)
        added = datetime.fromtimestamp(model.added_at, UTC).astimezone()
        table.add_row(
            model.name,
            format_bytes(model.file_bytes),
            format_bytes(model.file_bytes - backbone),
            Text(model.problem, "red") if model.problem else _where(model),
            f"{added:%Y-%m-%d %H:%M}",
        )
    console(80).print(table)


@app.command()
def remove(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What the hub calls it.")],
    *,
    data: DATA_OPTION = None,
    hub_url: _ELSEWHERE = None,
) -> None:
    """Take a model out of the hub; its own files stay, copies in the data folder are deleted."""
    catalogue = _catalogue(data or context.obj, hub_url)
    try:
        catalogue.remove(name)
    except ApiError as error:
        if error.code not in ("unknown_model", "invalid_name"):
            raise
        raise _unknown(name, catalogue.names()) from error
    console().print(
        f"Removed {printable(name)}. Plans that name it cannot be launched any more.",
        soft_wrap=True,
    )


def _catalogue(data: Path | None, hub_url: str | None, *, may_be_new: bool = False) -> Catalogue:
    """Open the models of a hub's folder; one that ``may_be_new`` is for a hub yet to be started."""
    folder = data_folder_of(data)
    if hub_url is not None or not (may_be_new or is_hub_folder(folder)):
        here = f"; {folder} is not a hub's data folder" if hub_url is None else ""
        raise LinkcppError(
            f"Models are added to a hub and removed on its own machine{here}.",
            hint="Run the same there without --hub, and with --data FOLDER if the hub has that.",
        )
    return Catalogue(models_folder(folder))


def _unknown(name: str, names: list[str]) -> LinkcppError:
    return LinkcppError(
        f"This hub has no model {printable(name)!r}.",
        hint=f"{did_you_mean(name, names)}`linkcpp hub models list` lists those that it has.",
    )


def _summary(model: ServedModel) -> str:
    return f"{format_bytes(model.file_bytes)}, weights {_where(model)}, digest {model.digest[:12]}"


def _where(model: ServedModel) -> str:
    has_url = any(part.url for part in model.parts)
    if not model.has_weights:
        return "from the web"
    return "from this hub or the web" if has_url else "from this hub"


def _public(model: ServedModel) -> dict[str, object]:
    """The record without what addresses hold of secrets."""
    told = model.model_dump(mode="json")
    for part in told["parts"]:
        if part["url"] is not None:
            part["url"] = public_url(part["url"])
    return told
