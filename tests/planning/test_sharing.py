"""Why a plan shares layers as it does, in words."""

from linkcpp.cluster.records import DiscoveredNode
from linkcpp.model.presets import load_model
from linkcpp.planning.records import Plan, PlanMode, PlanOptions
from linkcpp.planning.sharing import sharing_reasons
from linkcpp.planning.shortfall import make_plan
from tests.planning.clusters import GIGABYTE, MEGABYTE, cluster, device, node

SMALL = load_model("smollm2")


def planned(least: int, *nodes: DiscoveredNode, here: float = 90 * MEGABYTE) -> Plan:
    options = PlanOptions(mode=PlanMode.LAYERS, context_tokens=1024, minimum_stages=least)
    return make_plan(SMALL, cluster(here, *nodes), options)


def test_a_node_with_one_layer_is_told_to_be_the_slower_one_that_must_take_part() -> None:
    fast = node("fast", device("CPU", 8 * GIGABYTE, 40e9))
    slow = node("slow", device("CPU", 8 * GIGABYTE, 2e9))
    plan = planned(2, fast, slow)
    assert {s.node_name: s.slot_count for s in plan.stages if not s.is_coordinator}["slow"] == 1
    reasons = {text.split(" ", 1)[0]: text for text in sharing_reasons(plan, SMALL)}
    assert "fast CPU is faster and has room" in reasons["slow"]
    assert "2 devices of nodes must take part" in reasons["slow"]
    assert "less than elsewhere" in reasons["fast"]


def test_full_devices_and_those_that_take_the_rest_are_told_apart() -> None:
    full = node("full", device("CPU", 60 * MEGABYTE, 80e9))
    rest = node("rest", device("CPU", 8 * GIGABYTE, 2e9))
    reasons = {
        text.split(" ", 1)[0]: text for text in sharing_reasons(planned(2, full, rest), SMALL)
    }
    assert "full; " not in reasons["rest"]
    assert "it is full" in reasons["full"]
    assert "the faster ones have no room for" in reasons["rest"]


def test_equally_fast_devices_are_said_to_be_so() -> None:
    nodes = [node(name, device("CPU", 8 * GIGABYTE, 80e9)) for name in ("ash", "birch")]
    for text in sharing_reasons(planned(2, *nodes), SMALL):
        assert text.startswith("here") or "any split between them takes as long" in text


def test_a_single_stage_needs_no_reason() -> None:
    plan = make_plan(SMALL, cluster(8 * GIGABYTE), PlanOptions())
    assert sharing_reasons(plan, SMALL) == ()
