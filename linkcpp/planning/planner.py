"""(model inventory, cluster, options) -> Plan, or why there is none."""

from collections.abc import Iterator, Sequence

from linkcpp.cluster.records import Cluster
from linkcpp.common.errors import LinkcppError
from linkcpp.model.records import ModelInventory
from linkcpp.planning.backbone import is_expert_layer
from linkcpp.planning.costs import Costs, loads_next_token_blocks, pipelines_remote_devices
from linkcpp.planning.engines import planned_engine
from linkcpp.planning.expert_planner import ONLY_MODE, can_plan_experts, plan_experts
from linkcpp.planning.offers import Offer, coordinator_offers, remote_offers, usable_nodes
from linkcpp.planning.placing import Held, Placement, place
from linkcpp.planning.records import (
    MAX_DEVICES,
    DeviceMemory,
    Expectation,
    ModelReference,
    Plan,
    PlanMode,
    PlanOptions,
    Stage,
)
from linkcpp.planning.routing_counts import RoutingCounts

OBJECTIVE = (
    "time of one decoded token, one sequence: memory read / memory speed of each stage, "
    "and one visit (round trip + bytes / link rate) of each remote stage"
)
# A solver's last digits must not send a model over the network.
_TIE = 1e-9


def find_plan(
    inventory: ModelInventory,
    cluster: Cluster,
    options: PlanOptions,
    counts: RoutingCounts | None = None,
) -> Plan | None:
    """Return the fastest plan, or ``None`` if nothing fits; ``single`` wins ties.

    Mode ``auto`` spreads experts only where neither the coordinator nor layers over nodes hold the
    model. ``counts`` tell where experts are spread how often each is chosen.

    Raises:
        LinkcppError: the options do not suit the model.
    """
    if options.mode is PlanMode.EXPERTS:
        return plan_experts(inventory, cluster, options, counts)
    search = _Search(inventory, cluster, options)
    candidates = list(search.candidates(any_placement=False))
    if not candidates and _may_spread_experts(inventory, options):
        reason = "neither the coordinator alone nor layers over the nodes hold the model"
        return plan_experts(inventory, cluster, options, counts, reason=reason)
    if not candidates:
        return None
    mode, best = candidates[0]
    for other_mode, other in candidates[1:]:
        if other.token_ms < best.token_ms * (1 - _TIE):
            mode, best = other_mode, other
    return _plan(
        cluster=cluster,
        costs=search.costs,
        mode=mode,
        placement=best,
        bound_ms=min(placement.bound_ms for _, placement in candidates),
        reason=_reason(
            candidates, mode, options, has_nodes=bool(usable_nodes(cluster, options.mode))
        ),
    )


def can_plan(
    inventory: ModelInventory,
    cluster: Cluster,
    options: PlanOptions,
    *,
    costs: Costs | None = None,
) -> bool:
    """Tell whether ``find_plan`` would find a plan, sooner.

    ``costs`` are those of this model and these options, where they are known already.

    Raises:
        LinkcppError: as ``find_plan``.
    """
    if options.mode is PlanMode.EXPERTS:
        return can_plan_experts(inventory, cluster, options)
    search = _Search(inventory, cluster, options, costs)
    if next(search.candidates(any_placement=True), None) is not None:
        return True
    return _may_spread_experts(inventory, options) and can_plan_experts(inventory, cluster, options)


def _may_spread_experts(inventory: ModelInventory, options: PlanOptions) -> bool:
    return options.mode is PlanMode.AUTO and any(map(is_expert_layer, inventory.layers))


class _Search:
    """What the placements of the modes that are asked for are chosen from."""

    def __init__(
        self,
        inventory: ModelInventory,
        cluster: Cluster,
        options: PlanOptions,
        costs: Costs | None = None,
    ) -> None:
        engine = cluster.coordinator.engine
        if options.mode not in (PlanMode.AUTO, PlanMode.SINGLE, PlanMode.LAYERS):
            raise LinkcppError(
                f"Layers are not placed in mode {options.mode}.",
                hint="Plan with --mode auto, single or layers.",
            )
        self._options = options
        self._pipelines_remote = pipelines_remote_devices(engine)
        self.costs = costs or Costs(
            inventory, options, loads_next_token=loads_next_token_blocks(engine)
        )
        self._local = coordinator_offers(cluster, options)
        self._remote = remote_offers(cluster, options)

    def candidates(self, *, any_placement: bool) -> Iterator[tuple[PlanMode, Placement]]:
        """The best placement of each mode, or any one."""
        mode = self._options.mode
        if mode in (PlanMode.AUTO, PlanMode.SINGLE):
            alone = place(
                self.costs,
                self._local,
                (),
                min_remote=0,
                pipelines=len(self._local) > 2,
                any_placement=any_placement,
            )
            if alone is not None:
                yield PlanMode.SINGLE, alone
        if mode in (PlanMode.AUTO, PlanMode.LAYERS) and self._remote:
            spread = place(
                self.costs,
                self._local,
                self._remote,
                min_remote=min(self._options.minimum_stages, len(self._remote), MAX_DEVICES),
                pipelines=self._pipelines_remote,
                any_placement=any_placement,
            )
            if spread is not None:
                yield PlanMode.LAYERS, spread


def _plan(
    *,
    cluster: Cluster,
    costs: Costs,
    mode: PlanMode,
    placement: Placement,
    bound_ms: float,
    reason: str,
) -> Plan:
    coordinator, inventory = cluster.coordinator, costs.inventory
    engine, engine_notes = planned_engine(coordinator)
    host = coordinator_offers(cluster, costs.options)[0]
    stages = tuple(_stage(costs, held, host, placement) for held in placement.windows)
    own = next((held for held in placement.windows if held.offer.is_host), None)
    kept = sum(
        costs.kept_expert_bytes(inventory.layers[layer])
        for held in placement.windows
        for layer in held.kept
    )
    compute = sum(stage.compute_ms for stage in stages)
    network = sum(stage.network_ms for stage in stages)
    token = compute + network
    assumed = [*engine_notes, *(n for held in placement.windows for n in held.offer.assumed)]
    return Plan(
        mode=mode,
        model=ModelReference(
            name=inventory.name,
            source=inventory.source,
            digest=inventory.digest,
            architecture=inventory.shape.architecture,
            layer_count=len(inventory.layers),
            weight_bytes=inventory.weight_bytes,
        ),
        options=costs.options,
        coordinator_id=coordinator.node_id,
        coordinator_name=coordinator.name,
        engine=engine,
        stages=stages,
        coordinator_memory=costs.host_memory(
            own.last if own else 0,
            is_pipeline=placement.is_pipeline,
            available=host.available_bytes,
            reserve=host.reserve_bytes,
            kept=kept,
        ),
        node_urls={
            node.record.node_id: node.urls for node in usable_nodes(cluster, mode) if node.record
        },
        expectation=Expectation(
            token_ms=token,
            compute_ms=compute,
            network_ms=network,
            optimality_gap=max(0.0, min(1.0, (token - bound_ms) / token)) if token > 0 else 0.0,
            objective=OBJECTIVE,
            assumptions=tuple(dict.fromkeys(assumed)),
        ),
        reason=reason,
    )


def _stage(costs: Costs, held: Held, host: Offer, placement: Placement) -> Stage:
    offer, first, last = held.offer, held.first, held.last
    layers = costs.layers(first, last)
    kept_read = sum(costs.read_expert_bytes(costs.inventory.layers[layer]) for layer in held.kept)
    compute = offer.read_ms(costs.read_window_bytes(first, last) - kept_read)
    network = offer.transfer_ms(costs.link_bytes(last)) if not offer.is_coordinator else 0.0
    return Stage(
        node_id=offer.node_id,
        node_name=offer.node_name,
        is_coordinator=offer.is_coordinator,
        device=offer.device,
        is_cpu=offer.is_cpu,
        first_layer=first,
        layer_count=len(layers),
        holds_output=costs.holds_output(last),
        expert_layers_in_ram=held.kept,
        memory=_stage_memory(costs, held, placement),
        compute_ms=compute + host.read_ms(kept_read),
        network_ms=network,
    )


def _stage_memory(costs: Costs, held: Held, placement: Placement) -> DeviceMemory:
    offer = held.offer
    if offer.is_host:
        return costs.host_memory(
            held.last,
            is_pipeline=placement.is_pipeline,
            available=offer.available_bytes,
            reserve=offer.reserve_bytes,
        )
    memory = costs.device_memory(
        held.first,
        held.last,
        is_pipeline=placement.is_pipeline,
        available=offer.available_bytes,
        reserve=offer.reserve_bytes,
    )
    kept = [costs.kept_expert_bytes(costs.inventory.layers[layer]) for layer in held.kept]
    return memory.model_copy(
        update={
            "weight_bytes": memory.weight_bytes - sum(kept),
            "compute_bytes": memory.compute_bytes + max(kept, default=0),
        }
    )


def _reason(
    candidates: Sequence[tuple[PlanMode, Placement]],
    mode: PlanMode,
    options: PlanOptions,
    *,
    has_nodes: bool,
) -> str:
    times = {kind: placement.token_ms for kind, placement in candidates}
    if options.mode is not PlanMode.AUTO:
        return f"{ONLY_MODE}, and this is its fastest placement"
    if len(times) > 1:
        return (
            f"on the coordinator alone a token takes {times[PlanMode.SINGLE]:.2f} ms, spread over "
            f"nodes {times[PlanMode.LAYERS]:.2f} ms"
        )
    if mode is PlanMode.SINGLE and not has_nodes:
        return "the coordinator holds the whole model, and there were no nodes to use"
    if mode is PlanMode.SINGLE:
        return "the coordinator holds the whole model, and no placement over nodes fits"
    return "the coordinator alone cannot hold the model"
