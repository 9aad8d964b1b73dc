"""``linkcpp node``: this machine's node agent, until Ctrl-C."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from linkcpp.cli.output import console, status_console
from linkcpp.cli.verb import verb
from linkcpp.cluster.addresses import own_addresses
from linkcpp.cluster.config import DEFAULT_AGENT_PORT, load_config, node_url
from linkcpp.cluster.identity import load_identity
from linkcpp.cluster.limits import usable_cores
from linkcpp.cluster.measure import CPU, cpu_read_rate
from linkcpp.cluster.records import NodeDevice, NodeRecord
from linkcpp.cluster.token import ensure_token, token_path
from linkcpp.common.errors import LinkcppError
from linkcpp.common.service import systemd_unit
from linkcpp.common.sockets import listen
from linkcpp.common.text import printable
from linkcpp.common.units import format_bytes, parse_bytes
from linkcpp.engine.records import Engine
from linkcpp.node.agent import AgentOptions, NodeAgent, engine_or_problem, measure_overhead
from linkcpp.node.alone import only_agent

app = verb(help="Run this machine's node agent.")


@app.callback(invoke_without_command=True)
def node(
    *,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; all interfaces, IPv4 and IPv6, if not given."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = DEFAULT_AGENT_PORT,
    name: Annotated[str | None, typer.Option(help="Name to show; default: the host name.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="The most that this machine gives, like 6GB. What an rpc-server takes for itself, "
            "about 90 MB for each deployment, comes out of it."
        ),
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(help="The most disk space for slices of models, like 20GB; 0 takes none."),
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="Offer only this device; may be given several times.")
    ] = None,
    engine: Annotated[
        Path | None, typer.Option(help="Folder of the llama.cpp programs to use.")
    ] = None,
    no_mdns: Annotated[
        bool, typer.Option("--no-mdns", help="Do not advertise on the local network.")
    ] = False,
    unit: Annotated[
        bool, typer.Option("--systemd-unit", help="Print a systemd unit that runs this, and end.")
    ] = False,
) -> None:
    """Measure this machine, offer it to the cluster, and run engine processes on request.

    Every call but the proof of life needs the cluster token, so the agent may listen on all
    interfaces. Engine processes listen on loopback only. While a deployment runs, the offer is
    smaller by what its plan says and by what its rpc-server takes for itself.
    """
    if unit:
        console().print(
            systemd_unit("node", "linkcpp node agent", _unit_command()),
            end="",
            markup=False,
            soft_wrap=True,
        )
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
    token, is_new = ensure_token()
    with contextlib.ExitStack() as stack:
        # Before the checks, which take seconds: these are told at once.
        stack.enter_context(only_agent())
        sockets = [stack.enter_context(opened) for opened in listen(host, port)]
        _log_for_people()
        chosen, overhead_bytes = _look_at_machine(engine or config.engine)
        _check_options(options, chosen, overhead_bytes)
        agent = NodeAgent(
            token=token,
            identity=identity,
            engine=chosen,
            options=options,
            overhead_bytes=overhead_bytes,
            core_count=usable_cores(),
        )
        if is_new:
            _tell_about_token()
        asyncio.run(_serve(agent, sockets, host))


def _check_options(options: AgentOptions, engine: Engine, overhead_bytes: int) -> None:
    if engine.problem is not None:
        return
    limit = options.memory_limit_bytes
    if limit is not None and limit <= overhead_bytes:
        raise LinkcppError(
            f"A limit of {format_bytes(limit)} leaves nothing to offer: an rpc-server takes "
            f"{format_bytes(overhead_bytes)} for itself.",
            hint="Give more with --memory (or memory_limit in config.toml), such as --memory 2GB.",
        )
    known = list(dict.fromkeys([*(device.name for device in engine.devices), CPU]))
    for name in options.devices or ():
        if name not in known:
            raise LinkcppError(
                f"This machine has no device {printable(name)!r}.",
                hint=f"Offer one of: {', '.join(known)}.",
            )


def _look_at_machine(explicit: Path | None) -> tuple[Engine, int]:
    screen = status_console()
    with screen.status("checking the engine by running it"):
        engine = engine_or_problem(explicit)
    if engine.problem is not None:
        screen.print(f"[bold red]engine problem:[/] {_plain(engine.problem.message)}")
        screen.print(f"[bold]way out:[/] {_plain(engine.problem.hint)}")
        screen.print("The node runs all the same and tells this, but takes no work.")
    with screen.status("measuring this machine"):
        cpu_read_rate()
        return engine, asyncio.run(measure_overhead(engine))


async def _serve(agent: NodeAgent, sockets: list[socket.socket], host: str | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    urls = _urls(host, sockets[0].getsockname()[1])
    kept = agent.servers.overhead_bytes
    await agent.serve(sockets, stop, lambda record: _announce(record, urls, kept))
    status_console().print("stopped; nothing of this node is left running")


def _urls(host: str | None, port: int) -> list[str]:
    try:
        addresses = own_addresses(host or "::")
    except OSError:
        addresses = (host or "127.0.0.1",)
    return [node_url(address, port) for address in addresses if not address.startswith("fe80")]


def _announce(record: NodeRecord, urls: list[str], kept_bytes: int) -> None:
    out = console()
    engine = record.engine.label if record.engine else "none that works"
    out.print(
        f"[bold]{_plain(record.name)}[/] is a node: {_plain(', '.join(urls))}", soft_wrap=True
    )
    out.print(f"  engine: {_plain(engine)}", soft_wrap=True)
    if record.engine_problem is not None:
        out.print("  offers nothing until its engine works")
    for device in record.devices if record.engine_problem is None else ():
        out.print(
            f"  offers {format_bytes(device.offered_bytes)} of {format_bytes(device.total_bytes)} "
            f"on {_plain(device.name)} ({_plain(device.description)})"
            f"{_deductions(device, record, kept_bytes)}",
            soft_wrap=True,
        )
    out.print("  Ctrl-C stops it.")


def _deductions(device: NodeDevice, record: NodeRecord, kept_bytes: int) -> str:
    limit = record.memory_limit_bytes
    words = [f"limit {format_bytes(limit)}"] if limit is not None else []
    if device.is_cpu:
        words.append(f"{format_bytes(kept_bytes)} kept for the rpc-server itself")
    return f": {', '.join(words)}" if words else ""


def _tell_about_token() -> None:
    status_console().print(
        f"Made a new cluster token in {token_path()}. Every machine of the cluster needs the same "
        "one:\n  linkcpp token --show | ssh OTHER linkcpp token set",
        soft_wrap=True,
    )


def _log_for_people() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s  %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("linkcpp").setLevel(logging.INFO)
    # Strangers' malformed requests would fill the log; defects of ours still show.
    for noisy in ("uvicorn.error", "websockets", "zeroconf", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _unit_command() -> list[str]:
    """Return this very command, without the option that prints the unit."""
    words = [word for word in sys.argv[1:] if word != "--systemd-unit"]
    return [sys.executable, "-m", "linkcpp.cli.main", *words]


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
