"""``linkcpp discover``: who is there, with what."""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from linkcpp.cli.output import console, print_json, working
from linkcpp.cli.tables import WholeTable
from linkcpp.cli.verb import verb
from linkcpp.cluster.config import DEFAULT_AGENT_PORT, load_config
from linkcpp.cluster.records import DiscoveredNode, NodeStatus
from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.engine.check import choose_engine
from linkcpp.engine.records import Engine
from linkcpp.node.discovery import DISCOVER_SECONDS, Discovery, OnChange
from linkcpp.node.hub_discovery import find_everywhere
from linkcpp.registry.hub_location import parse_hub_node_url

_PAUSE_SECONDS = 1.0
_TABLE_COLUMNS = 80
_HOW_TO_SHARE = (
    "To give a machine of yours this one's token, then start its node again:\n"
    "  linkcpp token --show | ssh OTHER linkcpp token set --replace"
)

app = verb()


@app.command()
def discover(
    *,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", help="Ask this address too, such as 10.0.0.5; may be repeated."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds to listen to mDNS.")
    ] = DISCOVER_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep searching until Ctrl-C.")] = False,
    no_mdns: Annotated[
        bool, typer.Option("--no-mdns", help="Ask only the addresses that are named.")
    ] = False,
    hub: Annotated[
        list[str] | None,
        typer.Option("--hub", help="Ask this hub too, which this machine joined; may be repeated."),
    ] = None,
) -> None:
    """Find nodes by mDNS, --node, --hub, and `nodes` in config.toml.

    Exit code 1 if a hub that you named does not answer. Finding no nodes is not an error.
    """
    engine, remarks = _engine()
    search = _Search(engine, node or [], hub or [], timeout, use_mdns=not no_mdns)
    if watch:
        asyncio.run(_watch(search, remarks, as_json=as_json))
        return
    with working("Looking for nodes…") as say:
        found = asyncio.run(
            search.again(lambda nodes: say(f"Looking for nodes… {len(nodes)} found"))
        )
    if as_json:
        print_json(found)
    else:
        for part in render(found, remarks, where=search.where):
            # Commands and reasons are not broken: the terminal wraps them, and they can be copied.
            console(_TABLE_COLUMNS).print(part, soft_wrap=isinstance(part, Text))
    if found.unanswered_hub_urls:
        raise typer.Exit(1)


class Where(StrEnum):
    """Where a search looks: on the network, at a hub, at named addresses only, or at none."""

    AROUND = "around"
    HUB = "hub"
    NAMED = "named"
    NOWHERE = "nowhere"


class _Search:
    """The options of a search that is made again and again, and whom it has found."""

    def __init__(
        self,
        engine: Engine | None,
        urls: list[str],
        hub_urls: list[str],
        timeout_seconds: float,
        *,
        use_mdns: bool,
    ) -> None:
        self.engine = engine
        self.urls = urls
        self.hub_urls = hub_urls
        self.timeout_seconds = timeout_seconds
        self.use_mdns = use_mdns
        self._known: dict[str, DiscoveredNode] = {}

    @property
    def where(self) -> "Where":
        """Tell where it looks."""
        config = load_config()
        if self.hub_urls:
            return Where.HUB
        if self.use_mdns and config.mdns:
            return Where.AROUND
        return Where.NAMED if self.urls or config.nodes else Where.NOWHERE

    async def again(self, on_change: OnChange | None = None) -> Discovery:
        """Search (once more); a node that was there before is asked again."""
        found = await find_everywhere(
            self.engine,
            hub_urls=self.hub_urls,
            urls=self.urls,
            use_mdns=self.use_mdns,
            timeout_seconds=self.timeout_seconds,
            known=self._known.values(),
            on_change=on_change,
        )
        self._known |= {node.record.node_id: node for node in found.nodes if node.record}
        return found


async def _watch(search: _Search, remarks: list[str], *, as_json: bool) -> None:
    if as_json:
        while True:
            found = await search.again()
            print(json.dumps(found.model_dump(mode="json")), flush=True)
            await asyncio.sleep(_PAUSE_SECONDS)
    out = console(_TABLE_COLUMNS)
    if not out.is_terminal:
        await _follow(search, remarks, out)
    shown: RenderableType = Text("Looking for nodes…")
    try:
        with Live(shown, console=out, auto_refresh=False, screen=True) as live:
            while True:
                parts = render(await search.again(), remarks, where=search.where)
                looked = Text(f"Last looked at {time.strftime('%H:%M:%S')}; Ctrl-C ends this.")
                shown = Group(*parts, looked)
                live.update(shown, refresh=True)
                await asyncio.sleep(_PAUSE_SECONDS)
    finally:
        # The screen that was there before is back: what was seen last stays on it.
        out.print(shown)


async def _follow(search: _Search, remarks: list[str], out: Console) -> NoReturn:
    """Write a line for each change, for a file or a pipe, where no screen can be renewed."""
    seen: dict[str, str] | None = None
    while True:
        found = await search.again()
        now = {_key(node): state_line(node) for node in found.nodes}
        now |= {note: note for note in (*remarks, *found.notes)}
        lines = changed_lines(seen or {}, now)
        if seen is None and not found.nodes:
            lines = ["No nodes found yet.", *lines]
        for line in lines:
            out.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True)
        out.file.flush()
        seen = now
        await asyncio.sleep(_PAUSE_SECONDS)


def _key(node: DiscoveredNode) -> str:
    return node.record.node_id if node.record else " ".join((node.name, *node.urls))


def changed_lines(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Tell what is new, different or gone, from what was said of each node. Pure."""
    told = [line for key, line in now.items() if before.get(key) != line]
    gone = [line for key, line in before.items() if key not in now]
    return [*told, *(f"no longer: {line}" for line in gone)]


def state_line(node: DiscoveredNode) -> str:
    """Say of a node who and where it is, and how: what a change of is worth a line."""
    reason = f": {node.reason}" if node.reason else ""
    return f"{node.name} at {_address(node)} {_status(node).plain}{reason}"


def _engine() -> tuple[Engine | None, list[str]]:
    """Choose this machine's engine; nodes can be shown without one, though not compared."""
    try:
        return choose_engine(load_config().engine), []
    except LinkcppError as error:
        return None, [f"Engines are not compared: {error}"]


def render(
    found: Discovery, remarks: Iterable[str] = (), *, where: Where = Where.AROUND
) -> list[RenderableType]:
    """Lay a search's result out for people: a table, why nodes are not ready, what to check."""
    parts: list[RenderableType] = []
    if found.nodes:
        parts.append(_table(found.nodes))
    parts += [
        Text(f"{node.name} at {_address(node)}: {node.reason}", style="yellow")
        for node in found.nodes
        if node.reason
    ]
    if any(node.status is NodeStatus.WRONG_TOKEN for node in found.nodes):
        parts.append(Text(_HOW_TO_SHARE))
    is_explained = where is Where.HUB and found.notes
    if not found.cluster.nodes and not is_explained:
        parts.append(Text(_what_to_check(where, has_own_agent=bool(found.nodes))))
    parts += [Text(note, style="yellow") for note in (*remarks, *found.notes)]
    return parts


def _table(nodes: Iterable[DiscoveredNode]) -> Table:
    table = WholeTable(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("NODE")
    # An address that is broken cannot be copied.
    table.add_column("ADDRESS", no_wrap=True)
    table.add_column("RTT, RATE", justify="right")
    table.add_column("FREE MEMORY", no_wrap=True)
    table.add_column("CORES", justify="right")
    table.add_column("ENGINE")
    table.add_column("STATUS", no_wrap=True)
    for node in nodes:
        rate = node.link.bytes_per_second if node.link else None
        record = node.record
        table.add_row(
            Text(node.name),
            Text(_address(node)),
            f"{node.link.rtt_ms:.1f} ms" + (f"\n{format_bytes(round(rate))}/s" if rate else "")
            if node.link
            else "-",
            Text(_memory(node)),
            str(record.core_count) if record else "-",
            Text(record.engine.label if record and record.engine else "-"),
            _status(node),
        )
    return table


def _address(node: DiscoveredNode) -> str:
    if not node.urls:
        return "-"
    through = parse_hub_node_url(node.urls[0])
    return f"via {urlsplit(through[0]).netloc}" if through else node.urls[0].removeprefix("http://")


def _memory(node: DiscoveredNode) -> str:
    if node.record is None:
        return "-"
    return "\n".join(
        f"{device.name} {format_bytes(device.offered_bytes)}" for device in node.record.devices
    )


def _status(node: DiscoveredNode) -> Text:
    if node.is_this_machine:
        return Text("this machine", style="cyan")
    is_ready = node.status is NodeStatus.READY
    return Text(node.status.value.replace("_", " "), style="green" if is_ready else "yellow")


def _what_to_check(where: Where, *, has_own_agent: bool) -> str:
    first = "No other node was found" if has_own_agent else "No node was found"
    if where is Where.HUB:
        return (
            f"{first}. On a machine that is to help: `linkcpp join HUB --token -`, with a token of "
            "`linkcpp hub token create --role node` on the hub."
        )
    if where is Where.NOWHERE:
        return (
            f"{first}: you gave no --node, mDNS is off, and config.toml names no nodes.\n"
            "Name one: `linkcpp discover --no-mdns --node ADDRESS`"
        )
    ports = f"TCP port {DEFAULT_AGENT_PORT}"
    if where is Where.AROUND:
        ports = f"UDP port 5353 (mDNS) and {ports}"
    steps = (
        f"{first}. To check:\n"
        "  1. Does `linkcpp node` run on the other machines?\n"
        "  2. Do they have this machine's token?\n"
        "     `linkcpp token --show | ssh OTHER linkcpp token set`\n"
        f"  3. Do firewalls let {ports} through?"
    )
    if where is Where.NAMED:
        return steps
    elsewhere = "On another network, or where mDNS is blocked: `linkcpp discover --node ADDRESS`"
    return f"{steps}\n  4. {elsewhere}"
