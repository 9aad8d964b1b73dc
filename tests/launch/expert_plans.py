"""Plans of mode experts made by hand: who holds what is the test's own choice."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linkcpp.model.slices.segments import Segment
from linkcpp.model.slices.slabs import ExpertSlabs
from linkcpp.planning.records import DeviceMemory, ExpertShare, Plan, PlanMode
from tests.launch.swarm import Swarm

HERE = "here"
Experts = Sequence[tuple[int, int]]


def expert_counts(model: Path) -> dict[int, int]:
    """The experts of every layer of a model."""
    with ExpertSlabs(model) as slabs:
        return {tensor.layer: tensor.expert_count for tensor in slabs.tensors}


def _weight_bytes(model: Path, layers: set[int], experts: int) -> int:
    with ExpertSlabs(model) as slabs:
        return sum(t.slab_bytes * experts for t in slabs.tensors if t.layer in layers)


def experts_plan(swarm: Swarm, model: Path, held: Mapping[str, Experts], **options: Any) -> Path:
    """Give each node (``HERE`` is the coordinator) ranges of experts, in every layer."""
    base = Plan.model_validate_json(swarm.plan(model, mode="single").read_text())
    found = swarm.run("discover", "--no-mdns", "--json", *swarm.node_options()).json
    ids = {
        node["record"]["name"]: node["record"]["node_id"]
        for node in found["nodes"]
        if node["record"]
    }
    ids[HERE] = base.coordinator_id
    counts = expert_counts(model)
    shares = tuple(
        ExpertShare(
            node_id=ids[name],
            node_name=base.coordinator_name if name == HERE else name,
            is_coordinator=name == HERE,
            device="CPU",
            segments=tuple(
                Segment(layer=layer, first=first, last=last)
                for layer in counts
                for first, last in ranges
            ),
            memory=memory(
                sum(_weight_bytes(model, set(counts), last - first + 1) for first, last in ranges)
            ),
        )
        for name, ranges in held.items()
    )
    plan = base.model_copy(
        update={
            "mode": PlanMode.EXPERTS,
            "expert_shares": shares,
            "node_urls": {ids[name]: (agent.url,) for name, agent in swarm.agents.items()},
            "options": base.options.model_copy(update={"mode": PlanMode.EXPERTS, **options}),
        }
    )
    path = swarm.folder / f"experts-{len(list(swarm.folder.glob('experts-*')))}.json"
    path.write_text(plan.model_dump_json())
    return path


def memory(weight_bytes: int) -> DeviceMemory:
    return DeviceMemory(
        weight_bytes=weight_bytes,
        kv_bytes=0,
        recurrent_bytes=0,
        compute_bytes=64 * 2**20,
        reserve_bytes=0,
        available_bytes=2**40,
    )
