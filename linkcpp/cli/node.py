"""``linkcpp node``: this machine's node agent, until Ctrl-C."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from linkcpp.cli.log_format import LogFormatOption
from linkcpp.cli.node_run import check_options, look_at_machine, serve
from linkcpp.cli.output import status_console, working
from linkcpp.cli.own_command import print_own_unit
from linkcpp.cli.verb import verb
from linkcpp.cluster.config import DEFAULT_AGENT_PORT, load_config
from linkcpp.cluster.identity import host_name, load_identity
from linkcpp.cluster.limits import usable_cores
from linkcpp.cluster.token import find_token, token_path
from linkcpp.common.logs import LogFormat, choose_format, log_for_people
from linkcpp.common.sockets import listen
from linkcpp.common.units import parse_bytes
from linkcpp.node.agent import AgentOptions, NodeAgent
from linkcpp.node.lockfile import only_agent

app = verb(help="Run this machine's node agent.")

_TOKEN_SECONDS = 1.0


@app.callback(invoke_without_command=True)
def node(
    *,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; all interfaces, IPv4 and IPv6, if not given."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = DEFAULT_AGENT_PORT,
    name: Annotated[str | None, typer.Option(help="Name to show; default: the host name.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Most memory that this machine gives, such as 6GB. The agent itself, 100 MB, "
            "and an rpc-server, about 90 MB for each deployment, come out of it."
        ),
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(help="The most disk space for slices of models, like 20GB; 0 takes none."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="The most threads of each rpc-server and worker; all usable cores if not given.",
        ),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="Offer only this device; may be repeated.")
    ] = None,
    engine: Annotated[
        Path | None, typer.Option(help="Folder of the llama.cpp programs to use.")
    ] = None,
    no_mdns: Annotated[
        bool, typer.Option("--no-mdns", help="Do not advertise on the local network.")
    ] = False,
    log_format: LogFormatOption = LogFormat.PLAIN,
    unit: Annotated[
        bool, typer.Option("--systemd-unit", help="Print a systemd unit that runs this, and end.")
    ] = False,
) -> None:
    """Measure this machine, offer it to the cluster, and run engine processes on request.

    Without a cluster token it waits for one: `linkcpp token create` makes the first, `linkcpp token
    set` takes over that of another machine.

    Every call but the proof of life needs the cluster token, so the agent may listen on all
    interfaces. Engine processes listen on loopback only. While a deployment runs, the offer is
    smaller by what its plan says and by what its rpc-server takes for itself.
    """
    if unit:
        print_own_unit("node", "linkcpp node agent")
        return
    config = load_config()
    limit = parse_bytes(memory) if memory is not None else config.memory_limit_bytes
    options = AgentOptions(
        host=host,
        memory_limit_bytes=limit,
        devices=tuple(device) if device else None,
        mdns=config.mdns and not no_mdns,
        slices_limit_bytes=parse_bytes(slices) if slices is not None else None,
    )
    identity = load_identity(name or config.name)
    token = find_token()
    with contextlib.ExitStack() as stack:
        # Before the checks, which take seconds: these are told at once.
        stack.enter_context(only_agent())
        sockets = [stack.enter_context(opened) for opened in listen(host, port)]
        choose_format(log_format)
        log_for_people()
        chosen, overhead_bytes = look_at_machine(engine or config.engine)
        check_options(options, chosen, overhead_bytes)
        agent = NodeAgent(
            token=token or _wait_for_token(),
            identity=identity,
            engine=chosen,
            options=options,
            overhead_bytes=overhead_bytes,
            core_count=min(threads or usable_cores(), usable_cores()),
        )
        asyncio.run(serve(agent, sockets, host))


def _wait_for_token() -> str:
    """Return the cluster token as soon as there is one: one of its own nobody else would have."""
    status_console().print(
        "This machine has no cluster token yet and waits for it: run `linkcpp token create` here "
        f"if it is the first of your machines, else `linkcpp token --show | ssh {host_name()} "
        "linkcpp token set` on one that has the token.",
        soft_wrap=True,
    )
    with working(f"waiting for {token_path()}"):
        while (token := find_token()) is None:
            time.sleep(_TOKEN_SECONDS)
    return token
