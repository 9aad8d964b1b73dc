"""What the planner says where there is no plan, and how small the changes are that it names."""

import re

import pytest

from linkcpp.cluster.records import Cluster, NodeStatus
from linkcpp.common.units import parse_bytes
from linkcpp.model.presets import load_model
from linkcpp.planning.assumed import assumed_nodes, with_coordinator_memory, with_nodes
from linkcpp.planning.costs import HOST_PROGRAM_BYTES
from linkcpp.planning.planner import can_plan
from linkcpp.planning.records import PlanMode, PlanOptions
from linkcpp.planning.shortfall import InfeasibleError, make_plan
from tests.planning.clusters import GIGABYTE, MEGABYTE, cluster, device, node

SMALL = load_model("smollm2")
LAYERS = PlanOptions(mode=PlanMode.LAYERS)


def refused(where: Cluster, options: PlanOptions) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as raised:
        make_plan(SMALL, where, options)
    return raised.value


def test_layers_without_nodes_want_a_node_not_memory() -> None:
    error = refused(cluster(23 * GIGABYTE), LAYERS)
    assert error.message == "Mode layers needs at least one node, and none was found."
    assert error.infeasible.shortfalls == ()
    assert "linkcpp node" in (error.hint or "")
    alone = next(r.options for r in error.infeasible.remedies if r.options)
    assert make_plan(SMALL, cluster(23 * GIGABYTE), alone).mode is PlanMode.SINGLE


def test_layers_with_nodes_that_are_not_ready_say_what_is_wrong_with_them() -> None:
    ash = node("ash", device("CPU", 8 * GIGABYTE), status=NodeStatus.OTHER_ENGINE)
    error = refused(cluster(23 * GIGABYTE, ash), LAYERS)
    assert "none can be used (ash: a reason)" in error.message
    tiny = refused(cluster(10 * MEGABYTE), LAYERS)
    assert "single" not in (tiny.hint or "")


@pytest.mark.parametrize("offered", [0, 60, 90])
@pytest.mark.parametrize("major", [4, 7])
def test_the_min_memory_that_helps_is_named(offered: int, major: int) -> None:
    nodes = [node(name, device("CPU", 30 * MEGABYTE), major=major) for name in ("ash", "birch")]
    where = cluster(offered * MEGABYTE, *nodes, major=major)
    text = str(refused(where, PlanOptions()))
    more = re.search(r"Give the coordinator (\d[\d.]* \w+) more", text)
    assert more is not None, text
    size = parse_bytes(more[1])

    def fits(extra_bytes: int) -> bool:
        has = offered * MEGABYTE + HOST_PROGRAM_BYTES
        changed = with_coordinator_memory(where, has + extra_bytes)
        return can_plan(SMALL, changed, PlanOptions())

    assert fits(size)
    assert not fits(int(size * 0.95) - MEGABYTE)


def test_the_smallest_node_that_helps_is_named() -> None:
    where = cluster(60 * MEGABYTE)
    text = str(refused(where, PlanOptions()))
    found = re.search(r"Add one node that offers (\d[\d.]* \w+)", text)
    assert found is not None, text
    assert can_plan(SMALL, with_nodes(where, assumed_nodes(where, found[1])), PlanOptions())
    less = f"{int(parse_bytes(found[1]) * 0.95)}B"
    assert not can_plan(SMALL, with_nodes(where, assumed_nodes(where, less)), PlanOptions())


def test_what_is_missing_is_never_less_than_nothing() -> None:
    for size in (0, 40, 60, 100):
        ash = node("ash", device("CPU", 20 * MEGABYTE))
        for shortfall in refused(cluster(size * MEGABYTE, ash), LAYERS).infeasible.shortfalls:
            assert shortfall.short_bytes > 0
