"""Whether the sizes in a plan are those of the layers that it gives out: files can be edited. Pure.

Nodes are asked for the plan's bytes, and what they then hold is compared with it: so a size that
does not belong to its layers would come out only after the whole model was loaded.
"""

from linkcpp.model.records import ModelInventory
from linkcpp.planning.costs import Costs, loads_next_token_blocks
from linkcpp.planning.records import DeviceMemory, Plan, PlanMode, Stage


def missized(plan: Plan, inventory: ModelInventory) -> str | None:
    """Name a device whose weights, cache or state are not those of its layers, in a clause.

    ``None`` where all agree. Mode ``experts`` is not looked at: its sizes are those of slices.
    """
    if plan.mode is PlanMode.EXPERTS:
        return None
    if plan.model.layer_count != len(inventory.layers):
        return f"it has {len(inventory.layers)} layers, not {plan.model.layer_count}"
    costs = Costs(inventory, plan.options, loads_next_token=loads_next_token_blocks(plan.engine))
    own = next((stage for stage in plan.stages if stage.is_coordinator and stage.is_cpu), None)
    host = costs.host_memory(
        own.first_layer + own.slot_count if own else 0,
        is_pipeline=False,
        available=0,
        reserve=0,
        kept=sum(_kept_bytes(costs, stage) for stage in plan.stages),
    )
    checks = [(f"{plan.coordinator_name} CPU", plan.coordinator_memory, host)]
    checks += [
        (f"{stage.node_name} {stage.device}", stage.memory, _device(costs, stage))
        for stage in plan.stages
        if stage is not own
    ]
    for where, planned, real in checks:
        if _held(planned) != _held(real):
            return (
                f"{where} would hold {sum(_held(real)):,} bytes of weights, cache and state with "
                f"its layers, not {sum(_held(planned)):,}"
            )
    return None


def _device(costs: Costs, stage: Stage) -> DeviceMemory:
    first = stage.first_layer
    memory = costs.device_memory(
        first, first + stage.slot_count, is_pipeline=False, available=0, reserve=0
    )
    weights = memory.weight_bytes - _kept_bytes(costs, stage)
    return memory.model_copy(update={"weight_bytes": weights})


def _kept_bytes(costs: Costs, stage: Stage) -> int:
    layers = costs.inventory.layers
    return sum(costs.kept_expert_bytes(layers[layer]) for layer in stage.expert_layers_in_ram)


def _held(memory: DeviceMemory) -> tuple[int, int, int]:
    return memory.weight_bytes, memory.kv_bytes, memory.recurrent_bytes
