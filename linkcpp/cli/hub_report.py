"""The table of ``linkcpp hub nodes``."""

from rich.text import Text

from linkcpp.cli.output import console
from linkcpp.cli.tables import WholeTable
from linkcpp.common.text import printable
from linkcpp.common.units import format_bytes
from linkcpp.registry.records import NodeList, Presence, RegisteredNode

_STYLES = {Presence.ONLINE: "green", Presence.STALE: "yellow", Presence.GONE: "red"}


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
