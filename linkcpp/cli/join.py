"""``linkcpp join``: this machine in a hub, as what its join token says."""

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Annotated

import typer

from linkcpp.cli.join_token import credentials_of, own_identity
from linkcpp.cli.log_format import LogFormatOption
from linkcpp.cli.node_run import check_options, look_at_machine, serve
from linkcpp.cli.output import console, status_console
from linkcpp.cli.own_command import print_own_unit
from linkcpp.cli.verb import verb
from linkcpp.cluster.config import DEFAULT_AGENT_PORT, load_config
from linkcpp.cluster.identity import Identity
from linkcpp.cluster.limits import usable_cores
from linkcpp.cluster.token import load_token
from linkcpp.common.errors import LinkcppError
from linkcpp.common.logs import LogFormat, choose_format, log_for_people
from linkcpp.common.paths import expand_home
from linkcpp.common.sockets import listen
from linkcpp.common.units import parse_bytes
from linkcpp.node.agent import AgentOptions, NodeAgent
from linkcpp.node.join_options import JoinOptions, load_join_options, save_join_options
from linkcpp.node.joining import Joining
from linkcpp.node.lockfile import only_agent
from linkcpp.node.membership import revoked
from linkcpp.registry.client import joined_client
from linkcpp.registry.connection import HubError, HubRefusedError
from linkcpp.registry.credentials import HubCredentials
from linkcpp.registry.encoding import fingerprint
from linkcpp.registry.keys import load_keys
from linkcpp.registry.records import Role

app = verb()

_LOOPBACK = "127.0.0.1"
# A gateway joins by its own verb.
_ROLES = (Role.NODE, Role.BACKBONE, Role.ADMIN)
_NEXT_STEPS = {
    Role.BACKBONE: (
        "This machine may use the nodes of the hub:",
        "linkcpp discover --hub {url}",
        "linkcpp plan --model MODEL --mode experts --hub {url} -o p.json",
    ),
    Role.ADMIN: (
        "This machine may manage the hub:",
        "linkcpp hub nodes --hub {url}",
        "linkcpp hub token create --hub {url}",
    ),
    Role.GATEWAY: (
        "This machine may relay for the hub:",
        "linkcpp gateway --hub {url}",
    ),
}


@app.command()
def join(
    url: Annotated[str, typer.Argument(help="The hub, such as https://hub.example.")],
    *,
    token: Annotated[
        str | None,
        typer.Option(
            help="The join token: - asks for it, @FILE reads it, or the token itself; also "
            "LINKCPP_JOIN_TOKEN. Not needed again later."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name to show; default: the earlier one, or the host name.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Most memory that this machine gives, such as 6GB.")
    ] = None,
    slices: Annotated[
        str | None, typer.Option(help="The most disk space for slices, like 20GB; 0: none.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="Offer only this device; may be repeated.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The most threads of each rpc-server and worker; all usable cores if not given.",
        ),
    ] = None,
    engine: Annotated[
        Path | None, typer.Option(help="Folder of the llama.cpp programs to use.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address for direct links; all interfaces, if not given.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Port for direct links; 0 takes a free one, {DEFAULT_AGENT_PORT} if not given.",
        ),
    ] = None,
    no_listen: Annotated[
        bool, typer.Option("--no-listen", help="Take no direct links: only outbound connections.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Allow a hub without TLS beyond loopback. Not safe.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget the options given before.")
    ] = False,
    log_format: LogFormatOption = LogFormat.PLAIN,
    unit: Annotated[
        bool, typer.Option("--systemd-unit", help="Print a systemd unit that runs this, and end.")
    ] = False,
) -> None:
    """Join a hub. A node then serves it until Ctrl-C, and needs no open port.

    Where machines can reach each other directly they do; else the hub's gateway relays what only
    the two can read.

    The options of a node are remembered: next time `linkcpp join URL` is enough. --forget begins
    with the defaults again.
    """
    if unit:
        print_own_unit("join", "linkcpp, joined to a hub")
        return
    identity = own_identity(name, url)
    given = JoinOptions(
        memory_limit_bytes=parse_bytes(memory) if memory is not None else None,
        slices_limit_bytes=parse_bytes(slices) if slices is not None else None,
        devices=tuple(device) if device else None,
        threads=threads,
        engine=expand_home(engine).absolute() if engine else None,
        host=host,
        port=port,
        no_listen=no_listen or None,
    )
    roles = _ROLES if given == JoinOptions() else (Role.NODE,)
    credentials = credentials_of(url, token, identity, roles=roles, plain=plain)
    role = credentials.node_token.role
    if role is not Role.NODE:
        _tell_what_next(credentials)
        return
    asyncio.run(_see_that_it_is_wanted(credentials.url))
    chosen = given if forget else given.over(load_join_options(credentials.hub_id))
    _run_node(chosen, given, credentials, identity, log_format)


def _run_node(
    chosen: JoinOptions,
    given: JoinOptions,
    credentials: HubCredentials,
    identity: Identity,
    log_format: LogFormat,
) -> None:
    config = load_config()
    options = AgentOptions(
        host=_LOOPBACK if chosen.no_listen else chosen.host,
        memory_limit_bytes=chosen.memory_limit_bytes or config.memory_limit_bytes,
        devices=chosen.devices,
        mdns=False,
        slices_limit_bytes=chosen.slices_limit_bytes,
    )
    port = DEFAULT_AGENT_PORT if chosen.port is None else chosen.port
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_agent())
        sockets = [stack.enter_context(opened) for opened in listen(_LOOPBACK, 0)]
        if not chosen.no_listen:
            sockets += [stack.enter_context(opened) for opened in listen(chosen.host, port)]
        choose_format(log_format)
        log_for_people()
        engine, overhead_bytes = look_at_machine(chosen.engine or config.engine)
        check_options(options, engine, overhead_bytes)
        # Only what works is worth to be remembered.
        save_join_options(credentials.hub_id, chosen)
        if as_before := [word for word in chosen.words() if word not in given.words()]:
            told = f"As before: {' '.join(as_before)} (--forget begins with the defaults)"
            status_console().print(told, soft_wrap=True)
        agent = NodeAgent(
            token=_agent_token(),
            identity=identity,
            engine=engine,
            options=options,
            overhead_bytes=overhead_bytes,
            core_count=min(chosen.threads or usable_cores(), usable_cores()),
        )
        direct_port = None if chosen.no_listen else sockets[-1].getsockname()[1]
        joining = Joining(credentials, host=chosen.host, direct_port=direct_port)
        asyncio.run(serve(agent, sockets, chosen.host, joining))


async def _see_that_it_is_wanted(url: str) -> None:
    """Refuse to start where the hub has turned this machine out; a hub that is away may come."""
    async with joined_client(url) as hub:
        try:
            await hub.token()
        except HubRefusedError as error:
            if error.is_final:
                raise revoked(url) from error
        except HubError:
            pass


def _agent_token() -> str:
    """Return the cluster token, or one that nobody knows where this machine has none."""
    try:
        return load_token()
    except LinkcppError:
        return secrets.token_urlsafe(32)


def _tell_what_next(credentials: HubCredentials) -> None:
    out = console()
    first, *commands = _NEXT_STEPS[credentials.node_token.role]
    out.print(first)
    for command in commands:
        out.print(f"  {command.format(url=credentials.url)}", soft_wrap=True)
    key = fingerprint(load_keys().edge_public)
    out.print(f"Key fingerprint (compare with `linkcpp hub nodes`): {key}", soft_wrap=True)
