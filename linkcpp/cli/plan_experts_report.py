"""The part of a plan's report that tells who computes which experts."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from linkcpp.cli.inspect import bar
from linkcpp.cli.plan_table import BarsWhereRoom, plan_table
from linkcpp.cli.tables import WholeTable
from linkcpp.common.units import format_bytes
from linkcpp.model.slices.segments import Segment, describe
from linkcpp.planning.records import ExpertShare, Plan

_BAR_CELLS = 10
_MAX_RANGES = 3


def expert_report(plan: Plan) -> Iterator[RenderableType]:
    """Lay out who holds which experts, and what a token costs on the links."""
    yield Text("\nExperts", style="bold")
    yield BarsWhereRoom(lambda has_bars: _share_table(plan, has_bars=has_bars))
    expected = plan.expectation.experts
    if expected is None:
        return
    if all(share.is_coordinator for share in plan.expert_shares):
        where = f"all its experts are on {plan.coordinator_name}"
        yield Text(f"Each token: {where}; typically {expected.typical_token_ms:.1f} ms")
        return
    yield Text(
        f"Each token: {expected.round_trip_count} round trips, about "
        f"{format_bytes(round(expected.sent_bytes))} to the holders and "
        f"{format_bytes(round(expected.received_bytes))} back; "
        f"typically {expected.typical_token_ms:.1f} ms"
    )


def _share_table(plan: Plan, *, has_bars: bool) -> Table:
    table = plan_table(map(share_name, plan.expert_shares), "LAYERS: EXPERTS")
    for title in ("SLABS", "USED", "OF"):
        table.add_column(title, justify="right", no_wrap=True)
    if has_bars:
        table.add_column("", no_wrap=True)
    table.add_column("WORK", justify="right", no_wrap=True)
    table.add_column("REPLICAS", justify="right")
    for share in plan.expert_shares:
        memory = share.memory
        filled = memory.used_bytes / memory.available_bytes if memory.available_bytes else 1.0
        table.add_row(
            Text(share_name(share)),
            Text(share.device),
            segments_text(share.segments, most=_MAX_RANGES),
            format_bytes(memory.weight_bytes),
            format_bytes(memory.used_bytes),
            format_bytes(memory.available_bytes),
            *([Text(bar(min(1.0, filled), _BAR_CELLS), "cyan")] if has_bars else []),
            f"{share.work_share:.1%}",
            f"{share.replica_count:,} of {share.unit_count:,}",
        )
    return table


def share_name(share: ExpertShare) -> str:
    """Name the machine of a share."""
    return f"{share.node_name} (here)" if share.is_coordinator else share.node_name


def segments_text(segments: tuple[Segment, ...], *, most: int | None = None) -> str:
    """Write segments as ``0-23: 0-31; 24-47: 0-30``, the first ``most`` of them."""
    texts = [text.replace(":", ": ").replace(",", ", ") for text in describe(segments)]
    if most is not None and len(texts) > most:
        texts = [*texts[:most], f"and {len(texts) - most} more"]
    return "; ".join(texts)


def expert_explanation(plan: Plan) -> Iterator[RenderableType]:
    """Show what each holder takes of a token's time, and all that it holds."""
    yield Text("\nExperts of one token, by holder if it is asked in all its layers", style="bold")
    table = WholeTable(box=None, pad_edge=False, header_style="dim")
    for title in ("holder", "layers: experts"):
        table.add_column(title)
    for title in ("memory", "network", ""):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    slowest = max((s.compute_ms + s.network_ms for s in plan.expert_shares), default=0.0)
    for share in plan.expert_shares:
        time_ms = share.compute_ms + share.network_ms
        table.add_row(
            Text(f"{share_name(share)} {share.device}"),
            segments_text(share.segments),
            f"{share.compute_ms:.2f} ms",
            f"{share.network_ms:.2f} ms",
            Text(bar(time_ms / slowest if slowest else 0.0, _BAR_CELLS), "green"),
        )
    yield table
