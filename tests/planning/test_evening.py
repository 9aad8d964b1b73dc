"""Of plans that take the same time, the one that leaves every machine room."""

from linkcpp.model.presets import load_model
from linkcpp.planning.records import PlanMode, PlanOptions
from linkcpp.planning.shortfall import make_plan
from tests.planning.clusters import GIGABYTE, MEGABYTE, cluster, device, node


def test_three_equal_nodes_that_are_all_needed_get_equal_thirds() -> None:
    nodes = (node(name, device("CPU", 60 * MEGABYTE, 20e9)) for name in ("a", "b", "c"))
    options = PlanOptions(
        mode=PlanMode.LAYERS, context_tokens=1024, reserve_bytes=0, minimum_stages=3
    )
    plan = make_plan(load_model("smollm2"), cluster(60 * MEGABYTE, *nodes, rate=1e9), options)
    counts = [stage.slot_count for stage in plan.stages if not stage.is_coordinator]
    assert len(counts) == 3
    fills = [s.memory.used_bytes for s in plan.stages if not s.is_coordinator]
    assert max(fills) < 1.25 * min(fills)
    assert plan.expectation.optimality_gap < 0.005


def test_a_faster_node_still_gets_more() -> None:
    quick = node("quick", device("CPU", 60 * GIGABYTE, 60e9))
    slow = node("slow", device("CPU", 60 * GIGABYTE, 10e9))
    options = PlanOptions(mode=PlanMode.LAYERS, minimum_stages=2)
    plan = make_plan(load_model("122B"), cluster(6 * GIGABYTE, quick, slow, rate=1e9), options)
    layers = {stage.node_name: stage.layer_count for stage in plan.stages}
    assert layers["quick"] > layers["slow"]
