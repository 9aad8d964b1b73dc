"""What `linkcpp node` and `linkcpp join` share: a look at the machine, and serving until Ctrl-C."""

import asyncio
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from linkcpp.cli.output import console, status_console, working
from linkcpp.cluster.addresses import own_addresses
from linkcpp.cluster.config import node_url
from linkcpp.cluster.measure import CPU, cpu_read_rate
from linkcpp.cluster.records import NodeDevice, NodeRecord
from linkcpp.common.errors import LinkcppError
from linkcpp.common.text import printable
from linkcpp.common.units import format_bytes
from linkcpp.engine.records import Engine
from linkcpp.node.agent import AgentOptions, NodeAgent, engine_or_problem, measure_overhead
from linkcpp.node.joining import Joining
from linkcpp.node.limits import AGENT_BYTES


def check_options(options: AgentOptions, engine: Engine, overhead_bytes: int) -> None:
    """Refuse an offer that would be nothing, or of a device that is not there.

    Raises:
        LinkcppError: it is one of these.
    """
    if engine.problem is not None:
        return
    limit = options.memory_limit_bytes
    if limit is not None and limit <= AGENT_BYTES + overhead_bytes:
        raise LinkcppError(
            f"A limit of {format_bytes(limit)} leaves nothing to offer: the agent takes "
            f"{format_bytes(AGENT_BYTES)} and an rpc-server {format_bytes(overhead_bytes)} for "
            "itself.",
            hint="Give more with --memory (or memory_limit in config.toml), such as --memory 2GB.",
        )
    known = list(dict.fromkeys([*(device.name for device in engine.devices), CPU]))
    for name in options.devices or ():
        if name not in known:
            raise LinkcppError(
                f"This machine has no device {printable(name)!r}.",
                hint=f"Offer one of: {', '.join(known)}.",
            )


def look_at_machine(explicit: Path | None) -> tuple[Engine, int]:
    """Check the engine and measure the machine, with words for people.

    Returns the engine and what an rpc-server takes for itself, in bytes.
    """
    with working("checking the engine by running it"):
        engine = engine_or_problem(explicit)
    if engine.problem is not None:
        screen = status_console()
        screen.print(Text.assemble(("engine problem:", "bold red"), f" {engine.problem.message}"))
        screen.print(Text.assemble(("hint:", "bold"), f" {engine.problem.hint}"))
        screen.print("The node runs all the same and tells this, but takes no work.")
    with working("measuring this machine"):
        cpu_read_rate()
        return engine, asyncio.run(measure_overhead(engine))


async def serve(
    agent: NodeAgent,
    sockets: list[socket.socket],
    host: str | None,
    joining: Joining | None = None,
) -> None:
    """Serve until a signal ends it, as a member of a hub where it joined one."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    urls = joining.places if joining else _urls(host, sockets[0].getsockname()[1])
    kept = agent.servers.overhead_bytes
    await agent.serve(sockets, stop, lambda record: _announce(record, urls, kept), joining)
    status_console().print("stopped; nothing of this node is left running")


def _urls(host: str | None, port: int) -> list[str]:
    try:
        addresses = own_addresses(host or "::")
    except OSError:
        addresses = (host or "127.0.0.1",)
    return [node_url(address, port) for address in addresses]


def _announce(record: NodeRecord, urls: Sequence[str], kept_bytes: int) -> None:
    out = console()
    engine = record.engine.label if record.engine else "none that works"
    title = Text.assemble((record.name, "bold"), f" is a node: {', '.join(urls)}")
    out.print(title, soft_wrap=True)
    out.print(f"  engine: {engine}", soft_wrap=True)
    if record.engine_problem is not None:
        out.print("  offers nothing until its engine works")
    for device in record.devices if record.engine_problem is None else ():
        out.print(
            f"  offers {format_bytes(device.offered_bytes)} of {format_bytes(device.total_bytes)} "
            f"on {device.name} ({device.description})"
            f"{_deductions(device, record, kept_bytes)}",
            soft_wrap=True,
        )
    if record.slice_bytes is not None:
        out.print(f"  has {format_bytes(record.slice_bytes)} of its disk for slices of models")
    if record.memory_limit_bytes is None:
        out.print("  no memory limit: --memory, or memory_limit in config.toml, sets one")
    out.print("  Ctrl-C stops it.")


def _deductions(device: NodeDevice, record: NodeRecord, kept_bytes: int) -> str:
    limit = record.memory_limit_bytes
    words = [f"limit {format_bytes(limit)}"] if limit is not None else []
    if device.is_cpu:
        words.append(f"{format_bytes(kept_bytes)} kept for the rpc-server itself")
        if limit is not None:
            words.append(f"{format_bytes(AGENT_BYTES)} for the agent")
    return f": {', '.join(words)}" if words else ""
