"""Remarks on a plan that its tables cannot make: what the sizes count, and what to do next."""

from collections.abc import Iterator
from pathlib import Path

from linkcpp.cluster.records import Cluster
from linkcpp.common.text import shell_command
from linkcpp.common.units import format_bytes
from linkcpp.planning.assumed import ASSUMED
from linkcpp.planning.offers import is_usable
from linkcpp.planning.records import DeviceMemory, Plan, PlanMode
from linkcpp.planning.sharing import memory_of


def snapshot_note(plan: Plan) -> str | None:
    """Explain RAM of the coordinator that no column names, ``None`` where there is none."""
    size = plan.coordinator_memory.checkpoint_bytes
    if not size:
        return None
    count = plan.options.checkpoint_count
    return (
        f"USED of {plan.coordinator_name} CPU includes {format_bytes(size)} of state snapshots, "
        f"which CACHE does not: {count} for each sequence whose state cannot be rewound, so that a "
        "chat's next turn does not read everything again"
    )


def parts_text(memory: DeviceMemory) -> str:
    """Name what a deployment puts on a device, part by part."""
    parts = (
        ("weights", memory.weight_bytes),
        ("KV cache", memory.kv_bytes),
        ("state", memory.recurrent_bytes),
        ("snapshots", memory.checkpoint_bytes),
        ("buffers", memory.compute_bytes),
        ("programs", memory.program_bytes),
    )
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)


def weight_note(plan: Plan) -> str | None:
    """Explain a sum of weights over devices that is not the model's, ``None`` where it is."""
    held = plan.coordinator_memory.weight_bytes + sum(_weights_beside_host(plan))
    difference = held - plan.model.weight_bytes
    if plan.mode is PlanMode.EXPERTS or difference == 0:
        return None
    if difference > 0:
        return (
            f"The devices hold {format_bytes(difference)} more weights than the model has: some "
            "tensors are needed at both ends, such as input embeddings that are the output too."
        )
    return (
        f"The devices hold {format_bytes(-difference)} less weights than the model has: this "
        "engine does not load next-token blocks."
    )


def _weights_beside_host(plan: Plan) -> Iterator[int]:
    for stage in plan.stages:
        if memory_of(plan, stage) is not plan.coordinator_memory:
            yield stage.memory.weight_bytes


def alone_note(plan: Plan, cluster: Cluster) -> str | None:
    """Say why no node is used; ``None`` where one is, or none could be."""
    could = [node for node in cluster.nodes if is_usable(node.status, plan.mode)]
    if not could or plan.mode is not PlanMode.EXPERTS:
        return None
    if any(not share.is_coordinator for share in plan.expert_shares):
        return None
    if plan.options.replicas > 1:
        # Copies belong on other machines, so where there are none, nobody has room for one.
        return (
            "No nodes used: none has room for a worker and an expert. `linkcpp node --memory` "
            "sets how much a node gives."
        )
    return (
        f"No nodes used: {plan.coordinator_name} can hold everything, and any node would be "
        "slower. --memory SIZE limits what it gives, --replicas 2 puts copies on nodes."
    )


def next_step(plan: Plan, cluster: Cluster, output: Path) -> str:
    """Say where the plan is and how it is started, if it can be."""
    written = f"Written to {output}."
    command = shell_command("linkcpp", "launch", output)
    assumed = {
        node.record.node_id for node in cluster.nodes if node.record and node.found_by == ASSUMED
    }
    holders = {stage.node_id for stage in plan.stages}
    holders |= {share.node_id for share in plan.expert_shares}
    if holders & assumed:
        return f"{written} Some of its machines are only assumed: plan again when they are there."
    has_file = plan.model.digest is not None and Path(plan.model.source).is_file()
    if has_file or (plan.model.digest is not None and plan.mode is PlanMode.EXPERTS):
        return f"{written} Start it: {command}"
    return (
        f"{written} It is for {plan.model.source}, which is not a file here: launch it with the "
        f"model's file: {command} --model FILE.gguf"
    )
