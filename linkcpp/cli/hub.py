"""``linkcpp hub``: the hub itself, and what its operator or an admin asks of it."""

import asyncio
import contextlib
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from linkcpp.cli import hub_models, hub_tokens
from linkcpp.cli.hub_access import (
    DATA_OPTION,
    HUB_OPTION,
    JSON_OPTION,
    ask,
    data_folder_of,
    note_address,
)
from linkcpp.cli.hub_report import print_nodes
from linkcpp.cli.output import console, print_json, status_console
from linkcpp.cli.verb import verb
from linkcpp.cluster.config import node_url
from linkcpp.common.errors import LinkcppError
from linkcpp.common.logs import log_as_json
from linkcpp.common.serving import BoundedHttpProtocol
from linkcpp.common.sockets import listen
from linkcpp.hub.app import create_app
from linkcpp.hub.own_gateway import own_gateway
from linkcpp.hub.service import open_hub
from linkcpp.hub.serving import DEFAULT_HUB_PORT, serve_hub, tune_collector
from linkcpp.registry.client import HubClient
from linkcpp.registry.records import NodeList

app = verb(help="Run a hub, or manage one.")
app.add_typer(hub_tokens.app, name="token")
app.add_typer(hub_models.app, name="models")


@app.callback(invoke_without_command=True)
def hub(
    context: typer.Context,
    *,
    data: DATA_OPTION = None,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="LINKCPP_DATABASE",
            help="URL of a PostgreSQL database, like postgresql+psycopg://user@host/name; SQLite "
            "in the data folder if not given.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = DEFAULT_HUB_PORT,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Relay between machines too, on the same port.")
    ] = False,
) -> None:
    """Serve a hub until Ctrl-C: the registry where machines behind address translations meet.

    It listens on loopback, for a proxy with a certificate in front of it; docs/operations.md shows
    one. The log is on stderr, one JSON object a line.
    """
    context.obj = data
    if context.invoked_subcommand is not None:
        return
    if database is not None:
        _check_no_password(context, database)
    folder = data_folder_of(data)
    log_as_json()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(opened) for opened in listen(host, port)]
        uvloop.run(_serve(folder, database, sockets, host, with_gateway=gateway))


def _check_no_password(context: typer.Context, database: str) -> None:
    source = context.get_parameter_source("database")
    if source is None or source.name != "COMMANDLINE":
        return
    try:
        password = make_url(database).password
    except ArgumentError:
        password = None
    if password:
        raise LinkcppError(
            "The password of the database would stay in the process list.",
            hint="Put it into ~/.pgpass or PGPASSWORD, or the whole URL into LINKCPP_DATABASE.",
        )


async def _serve(
    folder: Path,
    database: str | None,
    sockets: list[socket.socket],
    host: str,
    *,
    with_gateway: bool,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    url = node_url(host, sockets[0].getsockname()[1])
    async with await open_hub(folder, database) as opened, contextlib.AsyncExitStack() as stack:
        token_file = await opened.make_first_token()
        http = BoundedHttpProtocol
        if with_gateway:
            http = await stack.enter_async_context(own_gateway(opened))
        note_address(folder, url)
        tune_collector()
        await serve_hub(
            opened,
            create_app(opened),
            sockets,
            stop,
            http=http,
            on_ready=lambda: _announce(url, folder, token_file, with_gateway=with_gateway),
        )
    status_console().print("stopped; machines come back by themselves when it runs again")


def _announce(url: str, folder: Path, token_file: Path | None, *, with_gateway: bool) -> None:
    out = console()
    what = "a hub and gateway" if with_gateway else "a hub"
    out.print(f"{url} is {what}; its data is in {folder}", markup=False, soft_wrap=True)
    if token_file is not None:
        out.print(
            f"  a join token for the first admin is in {token_file}; on this machine none is "
            "needed",
            markup=False,
            soft_wrap=True,
        )
    data = f" --data {folder}" if folder != data_folder_of(None) else ""
    out.print(
        f"  linkcpp hub token create{data}    lets a machine in", markup=False, soft_wrap=True
    )
    out.print("  Ctrl-C stops it.")


@app.command()
def nodes(
    context: typer.Context,
    *,
    data: DATA_OPTION = None,
    hub_url: HUB_OPTION = None,
    as_json: JSON_OPTION = False,
) -> None:
    """List the machines that joined."""

    async def listed(client: HubClient) -> NodeList:
        return await client.nodes()

    answer = ask(listed, data=data or context.obj, hub_url=hub_url)
    if as_json:
        print_json(answer)
    else:
        print_nodes(answer)


@app.command()
def revoke(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="Name or id of the machine.")],
    *,
    data: DATA_OPTION = None,
    hub_url: HUB_OPTION = None,
) -> None:
    """Cut a machine off: its tokens and links end at once.

    It may join again with a join token that is made later.
    """

    async def revoked(client: HubClient) -> str:
        found = [
            one
            for one in (await client.nodes()).nodes
            if node in (one.node_id, one.name) and not one.is_revoked
        ]
        if len(found) != 1:
            many = "Several machines have" if found else "No machine of this hub has"
            raise LinkcppError(
                f"{many} the name or id {node!r}.",
                hint="`linkcpp hub nodes` lists them with their ids.",
            )
        await client.revoke_node(found[0].node_id)
        return found[0].name

    name = ask(revoked, data=data or context.obj, hub_url=hub_url)
    console().print(f"{name} is revoked.", markup=False)
