"""How `linkcpp status` shows the experts of a deployment."""

from rich.console import RenderableType
from rich.text import Text

from linkcpp.cli.output import without_ids
from linkcpp.cli.tables import WholeTable
from linkcpp.common.units import format_bytes
from linkcpp.launch.experts.records import (
    UNCHECKED,
    DispatchCounts,
    ExpertsState,
    WorkerPhase,
    WorkerState,
)
from linkcpp.link.choosing import THROUGH_COORDINATOR


def experts_view(experts: ExpertsState) -> list[RenderableType]:
    """Return what every worker holds and did, and what nobody did."""
    table = WholeTable("worker", box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("state", no_wrap=True)
    numbers = ("experts", "held", "planned", "in use", "replicas", "pairs", "bytes")
    for title in (*numbers, "wait ms", "work ms", "failed"):
        table.add_column(title, justify="right", no_wrap=True)
    for worker in experts.workers:
        table.add_row(*_cells(worker))
    details = [
        f"  {worker.node_name}: {why}" for worker in experts.workers if (why := _why_not(worker))
    ]
    ways = [
        f"  {worker.node_name}: {without_ids(way)}"
        for worker in experts.workers
        if (way := _way(worker))
    ]
    differences = [Text(f"  {sentence}", "red") for sentence in experts.differences]
    return [table, *ways, *details, *differences, f"  {_summary(experts)}"]


def _cells(worker: WorkerState) -> list[str | Text]:
    total = worker.total
    count = sum(segment.last - segment.first + 1 for segment in worker.segments)
    return [
        f"{worker.node_name}{' (here)' if worker.is_coordinator else ''}",
        _state(worker),
        f"{count:,}",
        "-" if worker.slab_bytes is None else format_bytes(worker.slab_bytes),
        format_bytes(worker.planned_memory_bytes),
        format_bytes(worker.resident_bytes) if worker.resident_bytes else "-",
        str(worker.replica_count),
        f"{total.pair_count:,}",
        format_bytes(total.sent_bytes + total.received_bytes),
        f"{worker.mean_wait_ms:.2f}" if total.request_count else "-",
        f"{worker.mean_compute_ms:.2f}" if total.request_count else "-",
        str(total.failure_count),
    ]


def _way(worker: WorkerState) -> str | None:
    """The way of the worker's own link; over the link to its node that one's is the way."""
    has_own = worker.link_way is not None and not worker.link_way.startswith(THROUGH_COORDINATOR)
    return worker.link_way if has_own else worker.way


def _state(worker: WorkerState) -> Text:
    if worker.phase is WorkerPhase.UP and not worker.is_linked:
        return Text("silent", "yellow")
    colour = {WorkerPhase.UP: "green", WorkerPhase.AWAY: "red"}.get(worker.phase, "yellow")
    is_noteworthy = worker.phase is WorkerPhase.UP and worker.checked in (UNCHECKED, "equivalent")
    checked = f", {worker.checked}" if is_noteworthy else ""
    return Text.assemble((worker.phase.value, colour), checked)


def _why_not(worker: WorkerState) -> str | None:
    if worker.phase is WorkerPhase.UP:
        return None if worker.is_linked else worker.link_detail
    return worker.detail


def _summary(experts: ExpertsState) -> str:
    seen = experts.dispatch
    if experts.fallback_failure:
        fallback = f"the local fallback failed: {experts.fallback_failure}"
    elif experts.has_fallback:
        fallback = f"{seen.fallback_pair_count:,} pairs computed here instead of by a worker"
    else:
        why = f" ({experts.fallback_absence})" if experts.fallback_absence else ""
        fallback = f"no local fallback{why}"
    facts = [
        f"{seen.pair_count:,} pairs in {seen.call_count:,} calls",
        fallback,
        f"{seen.rerouted_pair_count:,} pairs asked for again elsewhere",
        f"{seen.failed_call_count:,} calls failed",
    ]
    facts.append(_spot_checks(seen))
    if seen.missing_expert_count:
        facts.append(f"{seen.missing_expert_count:,} experts without a worker")
    return ", ".join(facts)


def _spot_checks(seen: DispatchCounts) -> str:
    """Say how much of the rows was compared while it was used, and what came of it."""
    if not seen.spot_check_count:
        skipped = seen.spot_skipped_count
        return (
            f"no pairs compared ({skipped:,} had nobody else)" if skipped else "no pairs compared"
        )
    found = f"{seen.difference_count:,} times" if seen.difference_count else "never"
    return f"{seen.spot_pair_count:,} pairs compared, which {found} differed"
