"""What happens to the experts of a deployment, and how its state follows from that. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linkcpp.dispatch.checks import AdmissionStatus
from linkcpp.dispatch.control import DispatchStatus, WorkerStatus
from linkcpp.launch.experts.records import (
    UNCHECKED,
    Counts,
    DispatchCounts,
    ExpertsState,
    WorkerPhase,
    WorkerState,
)
from linkcpp.model.slices.segments import Segment
from linkcpp.node.records import WorkerId
from linkcpp.planning.records import Plan


@dataclass(frozen=True)
class BackboneCopied:
    """So much of the hollow backbone file is there."""

    path: Path
    file_bytes: int
    total_bytes: int
    done_bytes: int


@dataclass(frozen=True)
class FallbackChosen:
    """This machine computes what no worker does, in so much memory; 0: it does not."""

    size_bytes: int
    why_not: str | None


@dataclass(frozen=True)
class SliceSeen:
    """So much of a share's slice is where it is wanted."""

    share: int
    file_bytes: int | None
    done_bytes: int
    transferred_bytes: int


@dataclass(frozen=True)
class WorkerMoved:
    """A share went on to ``phase``; ``detail`` says why, where that matters."""

    share: int
    phase: WorkerPhase
    detail: str | None = None


@dataclass(frozen=True)
class WorkerFound:
    """The node of a share was found; ``way`` says how an edge gets there, and why so.

    ``resident_bytes`` is what its worker has of the node's main memory.
    """

    share: int
    url: str
    rtt_ms: float
    way: str | None = None
    resident_bytes: int = 0


@dataclass(frozen=True)
class WorkerStarted:
    """A worker for a share was started; ``holder`` is its name in the dispatch process."""

    share: int
    holder: str
    worker_id: WorkerId | None
    slab_bytes: int | None


@dataclass(frozen=True)
class DispatchSeen:
    """The dispatch process told how it stands."""

    status: DispatchStatus


ExpertsEvent = (
    BackboneCopied
    | FallbackChosen
    | SliceSeen
    | WorkerMoved
    | WorkerFound
    | WorkerStarted
    | DispatchSeen
)
# A worker that is being checked is asked again as soon as that is over.
LINKED = ("up", "checking")
FREQUENT_EVENTS = (BackboneCopied, SliceSeen, WorkerFound, DispatchSeen)


def first_experts(plan: Plan) -> ExpertsState | None:
    """Return the state of a plan's experts before anything was done; ``None`` without any."""
    if not plan.expert_shares:
        return None
    workers = tuple(
        WorkerState(
            index=index,
            node_id=share.node_id,
            node_name=share.node_name,
            is_coordinator=share.is_coordinator,
            device=share.device,
            segments=share.segments,
            planned_weight_bytes=share.memory.weight_bytes,
            planned_memory_bytes=share.memory.used_bytes,
        )
        for index, share in enumerate(plan.expert_shares)
    )
    return ExpertsState(workers=workers)


def apply_to_experts(state: ExpertsState, event: ExpertsEvent) -> ExpertsState:  # noqa: PLR0911 - one case an event
    """Return the state after ``event``."""
    match event:
        case BackboneCopied(path, file_bytes, total_bytes, done_bytes):
            changes: dict[str, Any] = {
                "backbone_path": path,
                "backbone_bytes": file_bytes,
                "backbone_copied_bytes": total_bytes,
                "backbone_done_bytes": done_bytes,
            }
            return state.model_copy(update=changes)
        case FallbackChosen(size_bytes, why_not):
            changes = {
                "has_fallback": size_bytes > 0,
                "fallback_bytes": size_bytes,
                "fallback_absence": why_not,
            }
            return state.model_copy(update=changes)
        case SliceSeen(share, file_bytes, done_bytes, transferred_bytes):
            changes = {
                "slice_bytes": file_bytes,
                "slice_done_bytes": done_bytes,
                "transferred_bytes": transferred_bytes,
            }
            return _with(state, share, changes)
        case WorkerMoved(share, phase, detail):
            return _with(state, share, {"phase": phase, "detail": detail})
        case WorkerFound(share, url, rtt_ms, way, resident_bytes):
            changes = {"url": url, "rtt_ms": rtt_ms, "way": way, "resident_bytes": resident_bytes}
            return _with(state, share, changes)
        case WorkerStarted(share, holder, worker_id, slab_bytes):
            before = state.workers[share]
            changes = {
                "holder": holder,
                "worker_id": worker_id,
                "slab_bytes": slab_bytes,
                "start_count": before.start_count + 1,
                "earlier": before.total,
            }
            return _with(state, share, changes)
        case DispatchSeen(status):
            return _seen(state, status)


def _with(state: ExpertsState, share: int, changes: Mapping[str, Any]) -> ExpertsState:
    workers = list(state.workers)
    workers[share] = workers[share].model_copy(update=changes)
    return state.model_copy(update={"workers": tuple(workers)})


def _seen(state: ExpertsState, status: DispatchStatus) -> ExpertsState:
    by_name = {worker.name: worker for worker in status.workers}
    up = [worker.segments for worker in status.workers if worker.state in LINKED]
    holders = count_holders(up)
    workers = []
    for worker in state.workers:
        changes: dict[str, Any] = {"replica_count": min_holders(worker.segments, holders)}
        seen = by_name.get(worker.holder or "")
        changes["is_linked"] = seen is not None and seen.state in LINKED
        changes["link"] = seen.state if seen is not None else None
        changes["link_detail"] = (seen.detail or None) if seen is not None else None
        changes["checked"] = word_of_check(seen.admission) if seen is not None else None
        if seen is not None:
            changes["total"] = worker.earlier.plus(counts_of(seen))
            changes["loaded_bytes"] = seen.loaded_bytes
            changes["link_way"] = seen.way
        workers.append(worker.model_copy(update=changes))
    fallback = status.fallback
    names = set(DispatchCounts.model_fields) & set(DispatchStatus.model_fields)
    counts = DispatchCounts(
        **{name: getattr(status, name) for name in names},
        fallback_pair_count=fallback.pair_count if fallback else 0,
        fallback_loaded_count=fallback.loaded_count if fallback else 0,
    )
    changes = {
        "workers": tuple(workers),
        "dispatch": counts,
        "fallback_failure": fallback.failure if fallback else None,
        "differences": status.differences,
    }
    return state.model_copy(update=changes)


def word_of_check(admission: AdmissionStatus | None) -> str | None:
    """Say what the checks of a worker's rows found; ``None`` where there were none yet."""
    if admission is None:
        return None
    return admission.agreement.verdict.value if admission.agreement is not None else UNCHECKED


def counts_of(worker: WorkerStatus) -> Counts:
    """Return what a worker did, with its mean times as sums."""
    return Counts(
        pair_count=worker.pair_count,
        request_count=worker.request_count,
        sent_bytes=worker.sent_bytes,
        received_bytes=worker.received_bytes,
        failure_count=worker.failure_count,
        wait_ms=worker.mean_wait_ms * worker.request_count,
        compute_ms=worker.mean_compute_ms * worker.request_count,
    )


def count_holders(held: Iterable[Sequence[Segment]]) -> dict[tuple[int, int], int]:
    """Count for each (layer, expert) how many of the workers hold it."""
    counts: dict[tuple[int, int], int] = {}
    for segments in held:
        for unit in units_of(segments):
            counts[unit] = counts.get(unit, 0) + 1
    return counts


def units_of(segments: Iterable[Segment]) -> set[tuple[int, int]]:
    """Return the (layer, expert) pairs of segments."""
    return {
        (segment.layer, expert)
        for segment in segments
        for expert in range(segment.first, segment.last + 1)
    }


def min_holders(segments: Iterable[Segment], holders: Mapping[tuple[int, int], int]) -> int:
    """Return how many workers hold the least held expert of some segments."""
    return min((holders.get(unit, 0) for unit in units_of(segments)), default=0)
