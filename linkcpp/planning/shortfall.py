"""Why nothing fits, and the smallest changes after which something does."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from linkcpp.cluster.records import Cluster
from linkcpp.common.errors import LinkcppError
from linkcpp.common.units import format_bytes
from linkcpp.model.records import ModelInventory
from linkcpp.planning.assumed import assumed_node, with_coordinator_memory, with_nodes
from linkcpp.planning.costs import Costs, loads_next_token_blocks, pipelines_remote_devices
from linkcpp.planning.expert_shortfall import expert_shortfalls
from linkcpp.planning.offers import Offer, coordinator_offers, remote_offers, usable_nodes
from linkcpp.planning.placing import place
from linkcpp.planning.planner import can_plan, find_plan
from linkcpp.planning.records import (
    MAX_DEVICES,
    CacheType,
    Infeasible,
    Plan,
    PlanMode,
    PlanOptions,
    Remedy,
    Shortfall,
)
from linkcpp.planning.routing_counts import RoutingCounts

SMALLEST_CONTEXT = 512
_CONTEXT_STEP = 256
_SMALLEST_SIZE_BYTES = 2**20
_LARGEST_SIZE_BYTES = 2**42
_MAX_REMEDIES = 4


class InfeasibleError(LinkcppError):
    """No placement fits; ``infeasible`` says what is short and what would help."""

    def __init__(self, infeasible: Infeasible) -> None:
        remedies = " Or: ".join(remedy.text for remedy in infeasible.remedies)
        super().__init__(
            infeasible.problem or f"The model does not fit: {_short(infeasible.shortfalls[0])}.",
            hint=remedies or "Add memory or nodes, or take a smaller model.",
        )
        self.infeasible = infeasible


def _short(shortfall: Shortfall) -> str:
    return (
        f"{shortfall.where} needs {format_bytes(shortfall.needed_bytes)} for {shortfall.what} and "
        f"offers {format_bytes(shortfall.available_bytes)}, "
        f"{format_bytes(shortfall.short_bytes)} short"
    )


def make_plan(
    inventory: ModelInventory,
    cluster: Cluster,
    options: PlanOptions,
    counts: RoutingCounts | None = None,
) -> Plan:
    """Return the fastest plan that fits; ``counts`` as in ``find_plan``.

    Raises:
        InfeasibleError: nothing fits.
        LinkcppError: the options do not suit the model.
    """
    plan = find_plan(inventory, cluster, options, counts)
    if plan is None:
        raise InfeasibleError(explain(inventory, cluster, options))
    return plan.model_copy(update={"routing_counts": counts})


def explain(inventory: ModelInventory, cluster: Cluster, options: PlanOptions) -> Infeasible:
    """Say what is short and what would help, where ``find_plan`` found nothing."""
    engine = cluster.coordinator.engine
    costs = Costs(inventory, options, loads_next_token=loads_next_token_blocks(engine))
    local = coordinator_offers(cluster, options)
    remote = remote_offers(cluster, options) if options.mode is not PlanMode.SINGLE else ()
    if options.mode is PlanMode.LAYERS and not remote:
        return _no_nodes(costs, cluster)
    remedies = _remedies(costs, cluster)
    if options.mode is PlanMode.EXPERTS:
        shortfalls = tuple(expert_shortfalls(inventory, cluster, options))
    else:
        pipelines = pipelines_remote_devices(engine)
        shortfalls = tuple(_shortfalls(costs, local, remote, pipelines=pipelines))
    return Infeasible(
        mode=options.mode,
        shortfalls=shortfalls,
        remedies=tuple(remedy for remedy, _ in zip(remedies, range(_MAX_REMEDIES), strict=False)),
    )


def _no_nodes(costs: Costs, cluster: Cluster) -> Infeasible:
    reasons = [f"{node.name}: {node.reason or node.status}" for node in cluster.nodes]
    seen = f"none can be used ({'; '.join(reasons)})" if reasons else "none was found"
    text = "Start `linkcpp node` on another machine (`linkcpp discover` shows it), or name --node."
    remedies = [Remedy(text=text)]
    alone = _with(costs.options, mode=PlanMode.SINGLE, minimum_stages=1)
    if can_plan(costs.inventory, cluster, alone):
        remedies.append(Remedy(text="Plan for this machine alone: --mode single.", options=alone))
    return Infeasible(
        mode=costs.options.mode,
        shortfalls=(),
        remedies=tuple(remedies),
        problem=f"Mode {costs.options.mode} needs at least one node, and {seen}.",
    )


def _shortfalls(
    costs: Costs, local: Sequence[Offer], remote: Sequence[Offer], *, pipelines: bool
) -> Iterator[Shortfall]:
    host = local[0]
    here = f"the coordinator {host.node_name}"
    base = costs.host_memory(0, is_pipeline=False, available=0, reserve=0).used_bytes
    if base > host.budget_bytes:
        yield Shortfall(
            where=here,
            what="input embeddings and buffers, which llama-server always keeps",
            needed_bytes=base,
            available_bytes=host.budget_bytes,
        )
        return
    devices = sorted((*local[1:], *remote), key=lambda offer: -offer.budget_bytes)[:MAX_DEVICES]
    total = sum(offer.budget_bytes for offer in (host, *devices))
    whole = costs.host_memory(costs.slots, is_pipeline=False, available=0, reserve=0).used_bytes
    count = len({offer.node_id for offer in devices if not offer.is_coordinator})
    where = f"{here} with {count} node{'s' if count > 1 else ''}" if count else here
    if whole > total:
        what = "weights, cache and buffers"
        yield Shortfall(where=where, what=what, needed_bytes=whole, available_bytes=total)
        return

    def fits_with(extra_bytes: int) -> bool:
        more = [_with_more(offer, extra_bytes) for offer in (*local, *remote)]
        own, far = more[: len(local)], more[len(local) :]
        least = min(costs.options.minimum_stages, len(far), MAX_DEVICES)
        found = place(costs, own, far, min_remote=least, pipelines=pipelines, any_placement=True)
        return found is not None

    extra = _min_bytes(fits_with)
    yield Shortfall(
        where=where,
        what="whole layers, buffers on every device included",
        needed_bytes=total + extra * (1 + len(devices)),
        available_bytes=total,
    )


def _with_more(offer: Offer, extra_bytes: int) -> Offer:
    return replace(offer, available_bytes=offer.available_bytes + extra_bytes)


def _remedies(costs: Costs, cluster: Cluster) -> Iterator[Remedy]:
    """Changes that help, the cheapest for the user first; each was tried."""
    inventory, options = costs.inventory, costs.options

    def fits(changed: PlanOptions, where: Cluster = cluster) -> bool:
        try:
            known = costs if changed is options else None
            return can_plan(inventory, where, changed, costs=known)
        except LinkcppError:  # this model cannot have that cache type
            return False

    if options.mode is PlanMode.SINGLE and cluster.nodes:
        changed = options.model_copy(update={"mode": PlanMode.AUTO})
        if fits(changed):
            yield Remedy(text="Use the nodes too: --mode auto.", options=changed)
    yield from _more_disk(cluster, options, fits)
    yield from _smaller_caches(options, fits)
    if options.parallel > 1:
        slots = _largest(1, options.parallel - 1, lambda n: fits(_with(options, parallel=n)))
        if slots:
            yield Remedy(
                text=f"Serve fewer sequences: --parallel {slots}.",
                options=_with(options, parallel=slots),
            )
    yield from _more_memory(cluster, options, fits)


def _more_disk(
    cluster: Cluster, options: PlanOptions, fits: Callable[[PlanOptions, Cluster], bool]
) -> Iterator[Remedy]:
    """Nodes whose disk holds fewer experts than their memory would, where that is what is short."""
    limited = {
        node.name: format_bytes(node.record.slice_bytes)
        for node in usable_nodes(cluster, options.mode)
        if node.record
        and node.record.slice_bytes is not None
        and node.record.slice_bytes < sum(d.offered_bytes for d in node.record.devices)
    }
    unlimited = tuple(
        node.model_copy(update={"record": node.record.model_copy(update={"slice_bytes": None})})
        if node.record
        else node
        for node in cluster.nodes
    )
    if limited and fits(options, cluster.model_copy(update={"nodes": unlimited})):
        names = ", ".join(f"{name} ({size} now)" for name, size in sorted(limited.items()))
        yield Remedy(
            text=f"Give slices more of the disk of {names}: `--slices` of `linkcpp node` or "
            "`linkcpp join` there, or a disk with more room.",
        )


def _smaller_caches(options: PlanOptions, fits: Callable[[PlanOptions], bool]) -> Iterator[Remedy]:
    if options.reserve_bytes != 0 and fits(changed := _with(options, reserve_bytes=0)):
        yield Remedy(text="Leave nothing free on the devices: --reserve 0.", options=changed)
    if options.cache_type_k in (CacheType.F16, CacheType.F32):
        kinds = {"cache_type_k": CacheType.Q8_0, "cache_type_v": CacheType.Q8_0}
        if fits(changed := _with(options, **kinds)):
            text = "Halve the KV cache: --cache-type-k q8_0 --cache-type-v q8_0."
            yield Remedy(text=text, options=changed)
    steps = (options.context_tokens - 1) // _CONTEXT_STEP
    context = _CONTEXT_STEP * _largest(
        SMALLEST_CONTEXT // _CONTEXT_STEP,
        steps,
        lambda n: fits(_with(options, context_tokens=n * _CONTEXT_STEP)),
    )
    if context:
        yield Remedy(
            text=f"Take less context: --context {context}.",
            options=_with(options, context_tokens=context),
        )


def _more_memory(
    cluster: Cluster, options: PlanOptions, fits: Callable[[PlanOptions, Cluster], bool]
) -> Iterator[Remedy]:
    if options.mode is not PlanMode.SINGLE:

        def fits_with_node(size_bytes: int) -> bool:
            node = assumed_node(cluster, "one more node", size_bytes, is_gpu=False)
            return fits(options, with_nodes(cluster, [node]))

        if size := _min_bytes(fits_with_node):
            yield Remedy(text=f"Add one node that offers {format_bytes(size)}.")
    now = coordinator_offers(cluster, options)[0].available_bytes

    def fits_with_memory(size_bytes: int) -> bool:
        return fits(options, with_coordinator_memory(cluster, now + size_bytes))

    if size := _min_bytes(fits_with_memory):
        yield Remedy(text=f"Give the coordinator {format_bytes(size)} more memory.")


def _with(options: PlanOptions, **changes: object) -> PlanOptions:
    return options.model_copy(update=changes)


def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number from ``low`` to ``high`` that holds, 0 if none: it is monotone."""
    if high < low or not holds(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _min_bytes(holds: Callable[[int], bool]) -> int:
    """Return a size with which it holds, at most 2 % above the least; 0 if no size helps."""
    high = _SMALLEST_SIZE_BYTES
    while not holds(high):
        if high >= _LARGEST_SIZE_BYTES:
            return 0
        high *= 2
    low = high // 2 if high > _SMALLEST_SIZE_BYTES else 0
    while high - low > high // 64:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    # Rounded up to the three digits that are shown.
    grain = int(10 ** max(0, len(str(high)) - 3))
    return -(-high // grain) * grain
