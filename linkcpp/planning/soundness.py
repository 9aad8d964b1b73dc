"""Whether a plan makes sense in itself: plan files can be edited by hand. Pure."""

from collections.abc import Iterator

from linkcpp.common.text import printable
from linkcpp.planning.records import (
    MAX_DEVICES,
    DeviceMemory,
    ExpertShare,
    Plan,
    PlanMode,
    Stage,
)


def unsound(plan: Plan) -> str | None:
    """Return a clause that says what is wrong with a plan, ``None`` where nothing is.

    llama.cpp takes layers in the order of its devices, the coordinator's CPU before all of them, so
    only windows that follow on one another can be asked of it.
    """
    return next(_problems(plan), None)


def _problems(plan: Plan) -> Iterator[str]:
    yield from _of_names(plan)
    yield from _of_windows(plan.stages, plan.model.layer_count)
    yield from _of_devices(plan)
    yield from _of_shares(plan)
    yield from _of_memory(f"{plan.coordinator_name} CPU", plan.coordinator_memory)
    parts: tuple[Stage | ExpertShare, ...] = (*plan.stages, *plan.expert_shares)
    for part in parts:
        if not (part.is_coordinator and part.device == "CPU"):
            yield from _of_memory(f"{part.node_name} {part.device}", part.memory)


def _of_names(plan: Plan) -> Iterator[str]:
    parts: tuple[Stage | ExpertShare, ...] = (*plan.stages, *plan.expert_shares)
    names = [plan.model.name, plan.coordinator_name]
    names += [name for part in parts for name in (part.node_name, part.device)]
    for name in names:
        if not name.isprintable():
            yield f"the name {printable(name)!r} in it has characters that no name has"


def _of_windows(stages: tuple[Stage, ...], layer_count: int) -> Iterator[str]:
    end = 0
    for stage in stages:
        if stage.first_layer != end or stage.layer_count < 0:
            yield f"its stages do not cover layers 0-{layer_count - 1} exactly once and in order"
        if stage.slot_count < 1:
            yield f"{stage.node_name} {stage.device} is given no layer"
        end = stage.first_layer + stage.layer_count
        window = range(stage.first_layer, end)
        if any(layer not in window for layer in stage.expert_layers_in_ram):
            yield f"{stage.node_name} {stage.device} keeps experts of layers that it does not have"
    if end != layer_count:
        yield f"its stages do not cover layers 0-{layer_count - 1} exactly once and in order"
    if [stage.holds_output for stage in stages] != [False] * (len(stages) - 1) + [True]:
        yield "the output belongs to its last stage, and to no other one"


def _of_devices(plan: Plan) -> Iterator[str]:
    devices = [stage for stage in plan.stages if not (stage.is_coordinator and stage.is_cpu)]
    if len(devices) > MAX_DEVICES:
        yield f"it uses {len(devices)} devices, and llama.cpp takes at most {MAX_DEVICES}"
    seen = set()
    for index, stage in enumerate(plan.stages):
        if (stage.node_id, stage.device) in seen:
            yield f"{stage.node_name} {stage.device} stands in it twice"
        seen.add((stage.node_id, stage.device))
        if stage.is_coordinator != (stage.node_id == plan.coordinator_id):
            yield "its stages do not agree on which machine is the coordinator"
        if index and stage.is_coordinator and stage.is_cpu:
            yield "the coordinator's CPU can only have the first layers"
        if stage.expert_layers_in_ram and (stage.is_cpu or not stage.is_coordinator):
            yield "only the coordinator's own cards can leave experts in its RAM"


def _of_shares(plan: Plan) -> Iterator[str]:
    if plan.expert_shares and plan.mode is not PlanMode.EXPERTS:
        yield f"it shares experts out, which mode {plan.mode} does not"
    for share in plan.expert_shares:
        for segment in share.segments:
            if segment.last < segment.first or segment.layer >= plan.model.layer_count:
                yield f"{share.node_name} {share.device} is given experts that there are not"


def _of_memory(where: str, memory: DeviceMemory) -> Iterator[str]:
    if any(size < 0 for size in memory.model_dump().values()):
        yield f"{where} has a size below zero"
    if memory.used_bytes > memory.available_bytes:
        yield f"{where} would hold more than it offers"
