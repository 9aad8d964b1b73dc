"""Mode ``experts``: (model inventory, cluster, options) -> who computes which experts."""

from dataclasses import dataclass

import numpy as np

from linkcpp.cluster.records import Cluster
from linkcpp.common.errors import LinkcppError
from linkcpp.model.records import ModelInventory
from linkcpp.model.slices.segments import Segment
from linkcpp.planning.backbone import DISPATCH_MS, Setting, is_expert_layer, settings
from linkcpp.planning.engines import planned_engine
from linkcpp.planning.expert_copies import NOBODY, Copies, place_copies, runs
from linkcpp.planning.expert_forecast import Forecast, forecast
from linkcpp.planning.expert_problem import ExpertProblem
from linkcpp.planning.expert_solver import ExpertCounts, fits, place_experts
from linkcpp.planning.offers import usable_nodes
from linkcpp.planning.problem import Integers
from linkcpp.planning.records import (
    DeviceMemory,
    Expectation,
    ExpertExpectation,
    ExpertShare,
    ModelReference,
    Plan,
    PlanMode,
    PlanOptions,
    Stage,
)
from linkcpp.planning.routing_counts import RoutingCounts

ONLY_MODE = "no other mode was considered"
OBJECTIVE = (
    "time of one decoded token, one sequence: memory read / memory speed of the backbone, and "
    f"layer after layer {DISPATCH_MS} ms of dispatch and the slowest holder of its experts (round "
    "trip + rows / link rate + its share of the chosen experts, at least one, / memory speed)"
)


@dataclass(frozen=True)
class _Candidate:
    """A placement beside one backbone."""

    setting: Setting
    counts: ExpertCounts
    placed: list[Copies]
    forecast: Forecast
    bound_ms: float


def plan_experts(
    inventory: ModelInventory,
    cluster: Cluster,
    options: PlanOptions,
    counts: RoutingCounts | None = None,
    *,
    reason: str = ONLY_MODE,
) -> Plan | None:
    """Return the fastest plan, or ``None`` if nothing fits.

    ``counts`` tell how often each expert is chosen; without them all are alike.

    Raises:
        LinkcppError: the model has no experts, or the counts are another model's.
    """
    if counts is not None:
        check_counts(inventory, counts)
    candidates = []
    for setting in settings(inventory, cluster, options):
        placed = place_experts(setting.problem)
        if placed is not None:
            candidates.append(_candidate(setting, placed, inventory, options, counts))
    if not candidates:
        return None
    best = min(candidates, key=lambda candidate: candidate.forecast.token_ms)
    bound_ms = min(candidate.bound_ms for candidate in candidates)
    return _plan(best, inventory, cluster, options, bound_ms=bound_ms, reason=reason)


def can_plan_experts(inventory: ModelInventory, cluster: Cluster, options: PlanOptions) -> bool:
    """Tell whether ``plan_experts`` would find a plan, sooner."""
    return any(fits(setting.problem) for setting in settings(inventory, cluster, options))


def check_counts(inventory: ModelInventory, counts: RoutingCounts) -> None:
    """Refuse counts that were recorded with another model.

    Raises:
        LinkcppError: they were, or name what the model does not have.
    """
    hint = f"Record them with {inventory.name}, or plan without --hot."
    if None not in (counts.model_digest, inventory.digest) and (
        counts.model_digest != inventory.digest
    ):
        raise LinkcppError("The routing counts are of another model.", hint=hint)
    for layer, experts in counts.layers.items():
        found = inventory.layers[layer] if layer < len(inventory.layers) else None
        if found is None or not is_expert_layer(found):
            raise LinkcppError(
                f"The routing counts name layer {layer}, which has no experts that run.", hint=hint
            )
        if experts and max(experts) >= found.expert_count:
            raise LinkcppError(
                f"The routing counts name expert {max(experts)} of layer {layer}, which has "
                f"{found.expert_count}.",
                hint=hint,
            )


def _candidate(
    setting: Setting,
    counted: ExpertCounts,
    inventory: ModelInventory,
    options: PlanOptions,
    counts: RoutingCounts | None,
) -> _Candidate:
    problem = setting.problem
    weights = None
    bound = counted.bound_ms
    if counts is not None:
        weights = [
            np.array(counts.weights(layer, inventory.layers[layer].expert_count))
            for layer in counted.layers
        ]
        # With the often chosen nearby, a layer may take less than any even placement of it.
        bound = sum(
            entry.count * _min_ms(problem, number) for number, entry in enumerate(problem.classes)
        )
    nodes = _node_numbers(setting)
    placed = place_copies(problem, counted, nodes, options.replicas, weights)
    expected = forecast(setting, placed, weights)
    other = expected.token_ms - expected.layers_ms
    return _Candidate(setting, counted, placed, expected, min(bound + other, expected.token_ms))


def _min_ms(problem: ExpertProblem, number: int) -> float:
    """The least time of a layer whatever is chosen: all holders share the work, memory is ample."""
    entry = problem.classes[number]
    able = problem.room_bytes >= entry.expert_bytes
    fixed, each = problem.fixed_ms[able], problem.expert_ms[number][able]
    low = float((fixed + each).min())
    high = low + float((each * entry.used_count).max())

    def work(level: float) -> float:
        done = (level - fixed) / each
        return float(np.where(done >= 1 - 1e-9, np.minimum(done, entry.used_count), 0.0).sum())

    if work(low) >= entry.used_count:
        return low
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if work(middle) >= entry.used_count else (middle, high)
    return low


def _node_numbers(setting: Setting) -> Integers:
    numbers: dict[str, int] = {}
    return np.array(
        [numbers.setdefault(h.offer.node_id, len(numbers)) for h in setting.holders],
        dtype=np.int64,
    )


def _plan(
    found: _Candidate,
    inventory: ModelInventory,
    cluster: Cluster,
    options: PlanOptions,
    *,
    bound_ms: float,
    reason: str,
) -> Plan:
    coordinator = cluster.coordinator
    engine, engine_notes = planned_engine(coordinator)
    setting, expected = found.setting, found.forecast
    backbone = setting.backbone
    shares = tuple(_shares(found))
    host = next((h.offer.device for h in setting.holders if h.offer.is_host), None)
    memory = backbone.host_memory
    for share in (s for s in shares if s.is_coordinator and s.device == host):
        memory = memory.model_copy(
            update={
                "weight_bytes": memory.weight_bytes + share.memory.weight_bytes,
                "compute_bytes": memory.compute_bytes + share.memory.compute_bytes,
            }
        )
    token = expected.token_ms
    notes = [*engine_notes, *backbone.offer.assumed]
    holder_names = {(share.node_id, share.device) for share in shares}
    for holder in setting.holders:
        if (holder.offer.node_id, holder.offer.device) in holder_names:
            notes += holder.offer.assumed
    traffic = _traffic(found, options)
    return Plan(
        mode=PlanMode.EXPERTS,
        model=ModelReference(
            name=inventory.name,
            source=inventory.source,
            digest=inventory.digest,
            architecture=inventory.shape.architecture,
            layer_count=len(inventory.layers),
            weight_bytes=inventory.weight_bytes,
        ),
        options=options,
        coordinator_id=coordinator.node_id,
        coordinator_name=coordinator.name,
        engine=engine,
        stages=(_stage(setting, coordinator.name),),
        expert_shares=shares,
        coordinator_memory=memory,
        node_urls={
            node.record.node_id: node.urls
            for node in usable_nodes(cluster, PlanMode.EXPERTS)
            if node.record
        },
        expectation=Expectation(
            token_ms=token,
            compute_ms=token - expected.network_ms,
            network_ms=expected.network_ms,
            optimality_gap=max(0.0, min(1.0, (token - bound_ms) / token)) if token > 0 else 0.0,
            objective=OBJECTIVE,
            assumptions=tuple(dict.fromkeys(notes)),
            experts=traffic,
        ),
        reason=f"{reason}; {_replica_text(traffic, options.replicas, _node_count(setting))}",
    )


def _node_count(setting: Setting) -> int:
    return len({holder.offer.node_id for holder in setting.holders})


def _replica_text(traffic: ExpertExpectation, wanted: int, node_count: int) -> str:
    if not traffic.short_unit_count:
        return f"every expert has {wanted} holder{'s' if wanted > 1 else ''}"
    machines = f"{node_count} machine{'s' if node_count != 1 else ''}"
    reason = f"as only {machines} can hold any" if node_count < wanted else "for lack of memory"
    return (
        f"{traffic.short_unit_count:,} of {traffic.unit_count:,} experts have fewer than {wanted} "
        f"holders on different nodes, {reason}"
    )


def _stage(setting: Setting, name: str) -> Stage:
    backbone = setting.backbone
    return Stage(
        node_id=backbone.offer.node_id,
        node_name=name,
        is_coordinator=True,
        device=backbone.offer.device,
        is_cpu=backbone.offer.is_cpu,
        first_layer=0,
        layer_count=backbone.costs.layer_count,
        holds_output=True,
        memory=backbone.device_memory,
        compute_ms=backbone.compute_ms,
    )


def _traffic(found: _Candidate, options: PlanOptions) -> ExpertExpectation:
    short = sum(
        int(((entry.holders != NOBODY).sum(axis=0) < options.replicas).sum())
        for entry in found.placed
    )
    expected = found.forecast
    return ExpertExpectation(
        typical_token_ms=expected.typical_ms,
        round_trip_count=expected.round_trip_count,
        sent_bytes=expected.sent_bytes,
        received_bytes=expected.received_bytes,
        unit_count=sum(len(entry.first) for entry in found.placed),
        short_unit_count=short,
    )


def _shares(found: _Candidate) -> list[ExpertShare]:
    """What each holder has, in the order of the holders; those with nothing are left out."""
    problem, expected = found.setting.problem, found.forecast
    segments: list[list[Segment]] = [[] for _ in found.setting.holders]
    sizes = np.zeros(problem.holder_count, dtype=np.int64)
    firsts = np.zeros_like(sizes)
    units = np.zeros_like(sizes)
    for entry in found.placed:
        held = np.bincount(entry.holders[entry.holders >= 0], minlength=len(sizes))
        sizes += held * problem.classes[entry.number].expert_bytes
        units += held
        firsts += np.bincount(entry.first, minlength=len(sizes))
        for owner, first, last in runs(entry.holders):
            segments[owner].append(Segment(layer=entry.layer, first=first, last=last))
    shares = []
    for number in np.flatnonzero(units).tolist():
        holder = found.setting.holders[number]
        offer = holder.offer
        shares.append(
            ExpertShare(
                node_id=offer.node_id,
                node_name=offer.node_name,
                is_coordinator=offer.is_coordinator,
                device=offer.device,
                segments=tuple(segments[number]),
                memory=DeviceMemory(
                    weight_bytes=int(sizes[number]),
                    kv_bytes=0,
                    recurrent_bytes=0,
                    compute_bytes=holder.worker_bytes,
                    reserve_bytes=offer.reserve_bytes,
                    available_bytes=holder.available_bytes,
                ),
                work_share=float(expected.work_shares[number]),
                unit_count=int(units[number]),
                replica_count=int(units[number] - firsts[number]),
                compute_ms=float(expected.holder_compute_ms[number]),
                network_ms=float(expected.holder_network_ms[number]),
            )
        )
    return shares
