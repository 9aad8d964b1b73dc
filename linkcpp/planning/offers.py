"""What a cluster offers to a plan: devices with a memory budget, a speed and a link."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from linkcpp.cluster.records import (
    Cluster,
    DiscoveredNode,
    LinkSpeed,
    NodeDevice,
    NodeId,
    NodeStatus,
)
from linkcpp.common.errors import LinkcppError
from linkcpp.model.records import ModelInventory
from linkcpp.planning.records import PlanMode, PlanOptions

# Taken where nothing was measured: below what all but the oldest machines reach, so that a device
# which was measured is preferred, and a plan is not made on a hope.
ASSUMED_CPU_BYTES_PER_SECOND = 10e9
ASSUMED_GPU_BYTES_PER_SECOND = 100e9
ASSUMED_RTT_MS = 5.0
ASSUMED_LINK_BYTES_PER_SECOND = 12.5e6  # 100 Mbit/s

RESERVE_SHARE = 20  # one part in twenty
MAX_RESERVE_BYTES = 512 * 2**20
# Above any machine; a node that claims more must not overflow sums of 64-bit integers.
_MAX_OFFERED_BYTES = 2**50


@dataclass(frozen=True)
class Offer:
    """One device that may hold a window.

    ``budget_bytes`` is what is offered less the reserve. ``visit_ms`` is the round trip of one
    visit, 0 on the coordinator. ``slice_bytes`` is what slices for all devices of the node may take
    of its disk, ``None`` where nothing bounds them. ``assumed`` names what was not measured.
    """

    node_id: NodeId
    node_name: str
    device: str
    is_cpu: bool
    is_coordinator: bool
    available_bytes: int
    reserve_bytes: int
    read_bytes_per_second: float
    visit_ms: float = 0.0
    link_bytes_per_second: float | None = None
    slice_bytes: int | None = None
    assumed: tuple[str, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """What a window may take."""
        return max(0, self.available_bytes - self.reserve_bytes)

    @property
    def is_host(self) -> bool:
        """Whether it is the CPU on which llama-server itself runs."""
        return self.is_coordinator and self.is_cpu

    def read_ms(self, size_bytes: float) -> float:
        """Time to stream weights or cache from the device's memory."""
        return size_bytes / self.read_bytes_per_second * 1e3

    def transfer_ms(self, size_bytes: float) -> float:
        """Time of one visit that carries ``size_bytes`` over the link; 0 on the coordinator."""
        if self.link_bytes_per_second is None:
            return 0.0
        return self.visit_ms + size_bytes / self.link_bytes_per_second * 1e3


def usable_nodes(cluster: Cluster, mode: PlanMode) -> tuple[DiscoveredNode, ...]:
    """The nodes that a plan of this mode may use, each once, in a fixed order.

    The coordinator's own agent is not among them: its memory is the coordinator's.
    """
    by_id: dict[NodeId, DiscoveredNode] = {}
    for node in cluster.nodes:
        if is_usable(node.status, mode) and node.record and not node.is_this_machine:
            by_id.setdefault(node.record.node_id, node)
    by_id.pop(cluster.coordinator.node_id, None)
    return tuple(by_id[node_id] for node_id in sorted(by_id))


def is_usable(status: NodeStatus, mode: PlanMode) -> bool:
    """Whether a plan of this mode may use a node.

    Experts are computed by the node's own engine for frames of ours, so its build need not be the
    coordinator's; layers are computed for the coordinator's llama-server, so it must be.
    """
    if status is NodeStatus.OTHER_ENGINE:
        return mode is PlanMode.EXPERTS
    return status is NodeStatus.READY


def coordinator_offers(cluster: Cluster, options: PlanOptions) -> tuple[Offer, ...]:
    """The devices of the coordinator, its CPU first.

    Raises:
        LinkcppError: it names no CPU.
    """
    node = cluster.coordinator
    offers = [_offer(node.node_id, node.name, device, options) for device in node.devices]
    if sum(offer.is_cpu for offer in offers) != 1:
        raise LinkcppError(
            f"The coordinator {node.name} names {sum(offer.is_cpu for offer in offers)} CPUs.",
            hint="Run `linkcpp discover` again: what it found before cannot be used.",
        )
    return tuple(sorted(offers, key=lambda offer: not offer.is_cpu))


def remote_offers(cluster: Cluster, options: PlanOptions) -> tuple[Offer, ...]:
    """The devices of all usable nodes."""
    return tuple(_remote(usable_nodes(cluster, options.mode), options))


def require_minimum(inventory: ModelInventory, cluster: Cluster, options: PlanOptions) -> None:
    """Refuse to spread layers over more devices of nodes than there are, or than have a part each.

    A plan that is made again after a node was lost takes what there is: it does not ask here.

    Raises:
        LinkcppError: there are fewer; says which.
    """
    wanted = options.minimum_stages
    parts = len(inventory.layers) + 1
    if wanted > parts:
        raise LinkcppError(
            f"The model has {parts} parts (layers and output), too few for {wanted} devices.",
            hint=f"Ask for at most --min-nodes {parts}.",
        )
    found = [offer for offer in remote_offers(cluster, options) if offer.budget_bytes > 0]
    if not 0 < len(found) < wanted:
        return  # that there is none at all is for the planner to say
    names = ", ".join(f"{offer.node_name} {offer.device}" for offer in found)
    raise LinkcppError(
        f"--min-nodes {wanted} was asked for, but only {len(found)} "
        f"{'is' if len(found) == 1 else 'are'} usable: {names}.",
        hint=f"Start more nodes, or ask for --min-nodes {len(found)}.",
    )


def _remote(nodes: Iterable[DiscoveredNode], options: PlanOptions) -> Iterator[Offer]:
    for node in nodes:
        record = node.record
        if record is None:
            continue
        for device in record.devices:
            if device.is_cpu:
                # Engine processes of all other devices take their own part of the main memory.
                besides = record.server_bytes * (len(record.devices) - 1)
                left = max(0, device.offered_bytes - besides)
                device = device.model_copy(update={"offered_bytes": left})  # noqa: PLW2901
            # The agent's name may be shared; discovery's is told apart from others.
            offer = _offer(record.node_id, node.name, device, options, link=node.link, far=True)
            yield replace(offer, slice_bytes=record.slice_bytes)


def _offer(
    node_id: NodeId,
    name: str,
    device: NodeDevice,
    options: PlanOptions,
    *,
    link: LinkSpeed | None = None,
    far: bool = False,
) -> Offer:
    assumed = []
    rate = device.read_bytes_per_second
    if rate is None:
        rate = ASSUMED_CPU_BYTES_PER_SECOND if device.is_cpu else ASSUMED_GPU_BYTES_PER_SECOND
        assumed.append(f"{name}: {device.name} was not measured, taken as {rate / 1e9:.0f} GB/s")
    bandwidth = link.bytes_per_second if link else None
    if far and bandwidth is None:
        bandwidth = ASSUMED_LINK_BYTES_PER_SECOND
        assumed.append(f"{name}: the link's rate was not measured, taken as 100 Mbit/s")
    if far and link is None:
        assumed.append(f"{name}: the round trip was not measured, taken as {ASSUMED_RTT_MS:.0f} ms")
    available = min(device.offered_bytes, _MAX_OFFERED_BYTES)
    return Offer(
        node_id=node_id,
        node_name=name,
        device=device.name,
        is_cpu=device.is_cpu,
        is_coordinator=not far,
        available_bytes=available,
        reserve_bytes=reserve_bytes(available, options),
        read_bytes_per_second=rate,
        visit_ms=(link.rtt_ms if link else ASSUMED_RTT_MS) if far else 0.0,
        link_bytes_per_second=bandwidth if far else None,
        assumed=tuple(assumed),
    )


def reserve_bytes(available_bytes: int, options: PlanOptions) -> int:
    """What is left free of a device."""
    if options.reserve_bytes is not None:
        return options.reserve_bytes
    return min(available_bytes // RESERVE_SHARE, MAX_RESERVE_BYTES)
