"""Why the layers are shared out as they are: a split can be lopsided and yet the fastest. Pure."""

from dataclasses import dataclass

from linkcpp.model.records import ModelInventory
from linkcpp.planning.costs import Costs, loads_next_token_blocks
from linkcpp.planning.records import DeviceMemory, Plan, PlanMode, Stage

# Paces closer than this are called equal, since measured speeds differ by chance.
_ALIKE = 1.05


@dataclass(frozen=True)
class _Pace:
    """A stage with the time of an average layer there, and whether another layer would fit."""

    stage: Stage
    layer_ms: float
    has_room: bool

    @property
    def name(self) -> str:
        return f"{self.stage.node_name} {self.stage.device}"

    def is_faster_than(self, other: "_Pace") -> bool:
        return self.layer_ms * _ALIKE < other.layer_ms


def sharing_reasons(plan: Plan, inventory: ModelInventory) -> tuple[str, ...]:
    """Say of each stage in a sentence why it has as many layers as it has; none of a single stage.

    A token passes all stages one after the other, so every layer belongs on the fastest device that
    has room, and nothing is gained by keeping all of them equally busy.
    """
    if plan.mode is PlanMode.EXPERTS or len(plan.stages) < 2:
        return ()
    costs = Costs(inventory, plan.options, loads_next_token=loads_next_token_blocks(plan.engine))
    paces = [_pace(plan, stage, costs) for stage in plan.stages]
    return tuple(_reason(plan, pace, paces) for pace in paces)


def memory_of(plan: Plan, stage: Stage) -> DeviceMemory:
    """What fills a stage's device: on the coordinator's CPU that is more than the stage."""
    return plan.coordinator_memory if stage.is_coordinator and stage.is_cpu else stage.memory


def _pace(plan: Plan, stage: Stage, costs: Costs) -> _Pace:
    end = stage.first_layer + stage.slot_count
    read = costs.read_window_bytes(stage.first_layer, end)
    mean = costs.read_window_bytes(0, costs.layer_count) / max(1, costs.layer_count)
    memory = memory_of(plan, stage)
    largest = max(
        costs.device_memory(layer, layer + 1, is_pipeline=False, available=0, reserve=0).used_bytes
        - costs.buffers.device(layer, layer + 1, holds_output=False, is_pipeline=False)
        for layer in range(costs.layer_count)
    )
    free = memory.available_bytes - memory.reserve_bytes - memory.used_bytes
    return _Pace(stage, stage.compute_ms * mean / read if read else 0.0, free >= largest)


def _reason(plan: Plan, mine: _Pace, paces: list[_Pace]) -> str:
    start = f"{mine.name}: {_count(mine.stage)}; a layer takes {mine.layer_ms:.3g} ms there"
    if not mine.has_room:
        return f"{start}, and it is full"
    faster = [other for other in paces if other.is_faster_than(mine)]
    if with_room := [other for other in faster if other.has_room]:
        best = min(with_room, key=lambda other: other.layer_ms)
        text = f"{start}, so it has no more than it must: {best.name} is faster and has room"
        return text + _why_at_all(plan, mine.stage)
    if faster:
        return f"{start}; it has what the faster ones have no room for"
    alike = [o.name for o in paces if o is not mine and o.has_room and not mine.is_faster_than(o)]
    if alike:
        return f"{start} as on {', '.join(alike)}: any split between them takes as long"
    return f"{start}, less than elsewhere, and it has room"


def _why_at_all(plan: Plan, stage: Stage) -> str:
    if stage.is_coordinator or plan.options.mode is not PlanMode.LAYERS:
        return ""
    least = plan.options.minimum_stages
    return f", but {least} device{'s' if least > 1 else ''} of nodes must take part"


def _count(stage: Stage) -> str:
    if not stage.layer_count:
        return "the output"
    layers = f"{stage.layer_count} layer{'s' if stage.layer_count > 1 else ''}"
    return f"{layers} and the output" if stage.holds_output else layers
