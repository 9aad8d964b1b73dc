"""``linkcpp hub``: the hub itself, and what its operator or an admin asks of it."""

from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.text import Text

from linkcpp.cli import hub_models, hub_tokens
from linkcpp.cli.hub_access import (
    DATA_OPTION,
    HUB_OPTION,
    JSON_OPTION,
    ask,
    data_folder_of,
    is_start_of_id,
    print_taken_away,
)
from linkcpp.cli.output import console, print_json
from linkcpp.cli.own_command import print_own_unit
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.common.errors import LinkcppError
from linkcpp.common.installation import needing_extra
from linkcpp.common.text import printable
from linkcpp.common.units import format_bytes
from linkcpp.registry.client import HubClient
from linkcpp.registry.records import NodeList, Presence, RegisteredNode
from linkcpp.registry.trust import DEFAULT_HUB_PORT

_STYLES = {Presence.ONLINE: "green", Presence.STALE: "yellow", Presence.GONE: "red"}
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
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = DEFAULT_HUB_PORT,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Relay between machines too, on the same port.")
    ] = False,
    unit: Annotated[
        bool, typer.Option("--systemd-unit", help="Print a systemd unit that runs this, and end.")
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
        _check_no_password(context, database, is_for_unit=unit)
    if unit:
        print_own_unit("hub", "linkcpp hub")
        return
    # Only here: the verbs below, which make one call, need not load a database and a framework.
    with needing_extra("hub", "hub"):
        from linkcpp.cli.hub_serve import serve  # noqa: PLC0415

    serve(data_folder_of(data), database, host, port, with_gateway=gateway)


def _check_no_password(context: typer.Context, database: str, *, is_for_unit: bool) -> None:
    if not urlsplit(database).password:
        return
    if is_for_unit:
        raise LinkcppError(
            "The password of the database would be in the unit's file.",
            hint="Put it into ~/.pgpass, and leave it out of the URL.",
        )
    source = context.get_parameter_source("database")
    if source is not None and source.name == "COMMANDLINE":
        raise LinkcppError(
            "The password of the database would stay in the process list.",
            hint="Put it into ~/.pgpass or PGPASSWORD, or the whole URL into LINKCPP_DATABASE.",
        )


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

    async def revoked(client: HubClient) -> tuple[str, str | None]:
        found = [
            one
            for one in (await client.nodes()).nodes
            if _is_meant(node, one) and not one.is_revoked
        ]
        if len(found) != 1:
            many = "Several machines have" if found else "No machine of this hub has"
            raise LinkcppError(
                f"{many} the name or id {node!r}.",
                hint="`linkcpp hub nodes` lists them with their ids.",
            )
        return found[0].name, await client.revoke_node(found[0].node_id)

    name, remark = ask(revoked, data=data or context.obj, hub_url=hub_url)
    print_taken_away(f"{name} is revoked.", remark)


def _is_meant(word: str, node: RegisteredNode) -> bool:
    """Whether a person means this machine: by its name, its id, or the start of it."""
    return word == node.name or is_start_of_id(word, node.node_id)


def print_nodes(answer: NodeList) -> None:
    """Print it; a machine that never sends heartbeats, such as a coordinator, has no state."""
    table = WholeTable(box=None)
    for heading in ("name", "role", "state", "seen", "offers", "engine", "key"):
        table.add_column(heading)
    table.add_column("id", no_wrap=True)
    for node in answer.nodes:
        table.add_row(
            printable(node.name),
            node.role,
            _state(node),
            _seen(node, answer.hub_time),
            _offer(node),
            _engine(node),
            node.key_fingerprint[:9],
            # Enough to tell machines apart; `--json` has all of it.
            node.node_id[:8],
        )
    console(80).print(table)


def _state(node: RegisteredNode) -> Text:
    if node.is_revoked:
        return Text("revoked", "red")
    if node.last_seen is None:
        return Text("")
    if node.has_left:
        return Text("left", "dim")
    return Text(node.presence, _STYLES[node.presence])


def _seen(node: RegisteredNode, hub_time: float) -> str:
    return f"{max(0.0, hub_time - node.last_seen):.0f} s ago" if node.last_seen else ""


def _offer(node: RegisteredNode) -> str:
    if node.state is None:
        return ""
    return format_bytes(sum(device.offered_bytes for device in node.state.record.devices))


def _engine(node: RegisteredNode) -> str:
    if node.state is None:
        return ""
    record = node.state.record
    if record.engine_problem is not None:
        return printable(record.engine_problem.code)
    return printable(record.engine.label) if record.engine else ""
