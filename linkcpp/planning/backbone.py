"""Mode ``experts``: what stays on the coordinator, and what the rest is as a problem to solve."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from linkcpp.cluster.records import Cluster, NodeId
from linkcpp.common.errors import LinkcppError
from linkcpp.model.records import LayerKind, LayerRecord, ModelInventory, TensorRole
from linkcpp.planning.costs import Costs, loads_next_token_blocks, pipelines_remote_devices
from linkcpp.planning.expert_problem import ExpertProblem, LayerClass
from linkcpp.planning.offers import Offer, coordinator_offers, remote_offers
from linkcpp.planning.problem import Floats
from linkcpp.planning.records import DeviceMemory, PlanOptions

# What a node promises to a worker besides its slabs; as linkcpp.node.records.WORKER_SCRATCH_BYTES.
WORKER_SCRATCH_BYTES = 64 * 2**20
# The worker's program and its frames, in the system's memory whatever the device is: 70 to 90 MiB
# and three frames of 32 MiB at most.
WORKER_PROGRAM_BYTES = 192 * 2**20
# The rpc-server of the coordinator's own experts, which no worker's program stands before, and its
# keeper: 5 to 30 MiB were measured; the rest is for what grows with requests.
OWN_SERVER_BYTES = 64 * 2**20
# What a slice takes on its node's disk besides its experts: its header and its manifest's records.
SLICE_EXTRA_BYTES = 256 * 2**10
# The virtual device's program and its backing rpc-server, on the coordinator.
DISPATCH_BYTES = 256 * 2**20
# What the virtual device itself takes for a layer, on loopback with few workers (see
# docs/performance.md); links and reading come on top.
DISPATCH_MS = 0.5

_F32_BYTES = 4
# Frame headers and, for each pair, a row index and an expert id (docs/wire.md).
FRAME_BYTES = 64
PAIR_BYTES = 8


@dataclass(frozen=True)
class Backbone:
    """All of the model but its experts, on one device of the coordinator.

    ``device_memory`` is what it takes there, ``host_memory`` what it takes of the RAM (the same
    where the device is the CPU). ``costs`` are those of the model without experts.
    """

    costs: Costs
    offer: Offer
    device_memory: DeviceMemory
    host_memory: DeviceMemory

    @property
    def compute_ms(self) -> float:
        """Time of one token in the backbone."""
        return self.offer.read_ms(self.costs.read_window_bytes(0, self.costs.slots))


@dataclass(frozen=True)
class Holder:
    """A device that may hold experts: the room for slabs, and what a worker takes besides."""

    offer: Offer
    room_bytes: int
    worker_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Setting:
    """A backbone, the holders beside it, and who could hold what as a problem.

    ``row_ms`` is what one expert's row takes on each holder's link.
    """

    backbone: Backbone
    holders: tuple[Holder, ...]
    problem: ExpertProblem
    row_ms: Floats


def layer_classes(inventory: ModelInventory) -> tuple[LayerClass, ...]:
    """Sort the layers that run by what their experts are like.

    Raises:
        LinkcppError: the model has no experts.
    """
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for layer in inventory.layers:
        if is_expert_layer(layer):
            found[layer.expert_count, layer.expert_bytes].append(layer.index)
    if not found:
        raise LinkcppError(
            f"{inventory.name} has no experts to spread.",
            hint="Mode experts is for Mixture-of-Experts models; plan with --mode layers.",
        )
    used = inventory.shape.experts_per_token
    return tuple(
        LayerClass(tuple(layers), count, size, min(used or count, count))
        for (count, size), layers in found.items()
    )


def is_expert_layer(layer: LayerRecord) -> bool:
    """Whether llama.cpp runs experts of the layer; it does not run next-token blocks."""
    return layer.kind is not LayerKind.NEXT_TOKEN and layer.expert_bytes > 0


def without_experts(inventory: ModelInventory) -> ModelInventory:
    """The model as the backbone has it: no expert anywhere, next-token blocks included."""
    layers = []
    for layer in inventory.layers:
        roles = dict(layer.role_bytes)
        roles[TensorRole.EXPERT] = (
            roles.get(TensorRole.EXPERT, 0) - layer.expert_count * layer.expert_bytes
        )
        layers.append(layer.model_copy(update={"role_bytes": roles}))
    return inventory.model_copy(update={"layers": tuple(layers)})


def backbone_costs(inventory: ModelInventory, cluster: Cluster, options: PlanOptions) -> Costs:
    """Sizes and reads of the backbone."""
    return Costs(
        without_experts(inventory),
        options,
        loads_next_token=loads_next_token_blocks(cluster.coordinator.engine),
    )


def host_need(costs: Costs, slots: int) -> int:
    """What the coordinator's RAM must have for a backbone with so many slots on the CPU."""
    memory = costs.host_memory(slots, is_pipeline=False, available=0, reserve=0)
    return memory.used_bytes + DISPATCH_BYTES


def settings(
    inventory: ModelInventory, cluster: Cluster, options: PlanOptions
) -> Iterator[Setting]:
    """Every device of the coordinator that can hold the backbone, with the holders beside it.

    Raises:
        LinkcppError: the model has no experts, or the cluster is malformed.
    """
    classes = layer_classes(inventory)
    costs = backbone_costs(inventory, cluster, options)
    local = coordinator_offers(cluster, options)
    remote = remote_offers(cluster, options)
    pipelines = pipelines_remote_devices(cluster.coordinator.engine)
    for offer in local:
        backbone = _backbone(costs, offer, local[0], pipelines=pipelines)
        if backbone is not None:
            holders = tuple(_holders(backbone, local, remote))
            yield _setting(backbone, holders, classes)


def _backbone(costs: Costs, offer: Offer, host: Offer, *, pipelines: bool) -> Backbone | None:
    slots = costs.slots if offer.is_host else 0
    # A card and the virtual device are two devices with all layers on them (see ``buffers``).
    is_pipeline = pipelines and not offer.is_host
    host_memory = costs.host_memory(
        slots, is_pipeline=is_pipeline, available=host.available_bytes, reserve=host.reserve_bytes
    )
    host_memory = host_memory.model_copy(
        update={"program_bytes": host_memory.program_bytes + DISPATCH_BYTES}
    )
    memory = host_memory
    if not offer.is_host:
        memory = costs.device_memory(
            0,
            costs.slots,
            is_pipeline=is_pipeline,
            available=offer.available_bytes,
            reserve=offer.reserve_bytes,
        )
    fits = memory.used_bytes <= offer.budget_bytes and host_memory.used_bytes <= host.budget_bytes
    return Backbone(costs, offer, memory, host_memory) if fits else None


def _holders(
    backbone: Backbone, local: Sequence[Offer], remote: Sequence[Offer]
) -> Iterator[Holder]:
    disk_left: dict[NodeId, int] = {}
    card_count: Counter[NodeId] = Counter()
    for offer in (*local, *remote):  # a node's cards come before its CPU
        taken = 0
        if offer.is_host:
            taken = backbone.host_memory.used_bytes
        elif offer == backbone.offer:
            continue
        elif offer.is_cpu:
            taken = WORKER_PROGRAM_BYTES * card_count[offer.node_id]
        is_here = offer.node_id == backbone.offer.node_id
        program = OWN_SERVER_BYTES if is_here else WORKER_PROGRAM_BYTES
        worker = WORKER_SCRATCH_BYTES + (program if offer.is_cpu else 0)
        room = offer.budget_bytes - taken - worker
        if offer.slice_bytes is not None:
            left = disk_left.get(offer.node_id, offer.slice_bytes)
            room = min(room, left - SLICE_EXTRA_BYTES)
            disk_left[offer.node_id] = left - max(0, room) - SLICE_EXTRA_BYTES
        if room > 0:
            card_count[offer.node_id] += not offer.is_cpu
            yield Holder(offer, room, worker, offer.available_bytes - taken)


def _setting(
    backbone: Backbone, holders: tuple[Holder, ...], classes: tuple[LayerClass, ...]
) -> Setting:
    row_bytes = backbone.costs.inventory.shape.hidden_size * _F32_BYTES
    links = np.array([holder.offer.link_bytes_per_second or np.inf for holder in holders])
    visits = np.array([holder.offer.visit_ms for holder in holders])
    rates = np.array([holder.offer.read_bytes_per_second for holder in holders])
    row_ms = (row_bytes + PAIR_BYTES) / links * 1e3
    sizes = np.array([entry.expert_bytes for entry in classes], dtype=np.float64)
    problem = ExpertProblem(
        classes=classes,
        room_bytes=np.array([holder.room_bytes for holder in holders], dtype=np.int64),
        fixed_ms=visits + (row_bytes + FRAME_BYTES) / links * 1e3,
        expert_ms=sizes[:, None] / rates[None, :] * 1e3 + row_ms[None, :],
    )
    return Setting(backbone, holders, problem, row_ms)
