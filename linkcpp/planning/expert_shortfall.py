"""Mode ``experts``: what is short, where, and by how much."""

from collections.abc import Iterator

from linkcpp.cluster.records import Cluster
from linkcpp.model.records import ModelInventory
from linkcpp.planning.backbone import Setting, backbone_costs, host_need, layer_classes, settings
from linkcpp.planning.offers import coordinator_offers, usable_nodes
from linkcpp.planning.records import PlanMode, PlanOptions, Shortfall


def expert_shortfalls(
    inventory: ModelInventory, cluster: Cluster, options: PlanOptions
) -> Iterator[Shortfall]:
    """Say what is short where no placement of the experts was found."""
    here = f"the coordinator {cluster.coordinator.name}"
    found = list(settings(inventory, cluster, options))
    if not found:
        host = coordinator_offers(cluster, options)[0]
        costs = backbone_costs(inventory, cluster, options)
        yield Shortfall(
            where=here,
            what="the backbone (all but the experts) with cache and buffers",
            needed_bytes=host_need(costs, costs.slots),
            available_bytes=host.budget_bytes,
        )
        return
    best = max(found, key=_held_bytes)
    held = _held_bytes(best)
    classes = layer_classes(inventory)
    needed = sum(entry.count * entry.expert_count * entry.expert_bytes for entry in classes)
    count = len(usable_nodes(cluster, PlanMode.EXPERTS))
    yield Shortfall(
        where=f"{here} with {count} node{'s' if count > 1 else ''}" if count else here,
        what=f"the experts of {sum(entry.count for entry in classes)} layers",
        # Where experts of several sizes do not add up to the room, one more would do.
        needed_bytes=max(needed, held + max(entry.expert_bytes for entry in classes)),
        available_bytes=held,
    )


def _held_bytes(setting: Setting) -> int:
    """What fits into the holders in whole experts."""
    size = min(entry.expert_bytes for entry in setting.problem.classes)
    return int((setting.problem.room_bytes // size * size).sum())
