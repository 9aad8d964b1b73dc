"""Plans of known models over clusters made by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linkcpp.cluster.records import Cluster, NodeStatus
from linkcpp.common.errors import LinkcppError
from linkcpp.model.presets import load_model
from linkcpp.model.records import ModelInventory
from linkcpp.planning.assumed import assumed_nodes, with_coordinator_memory, with_nodes
from linkcpp.planning.costs import HOST_PROGRAM_BYTES
from linkcpp.planning.planner import can_plan, find_plan
from linkcpp.planning.records import MAX_DEVICES, CacheType, Plan, PlanMode, PlanOptions
from linkcpp.planning.shortfall import InfeasibleError, make_plan
from tests.planning.clusters import (
    GIGABYTE,
    cluster,
    device,
    machine,
    node,
    random_cluster,
)
from tests.support.lengths import repeated


@pytest.fixture(scope="module")
def large() -> ModelInventory:
    return load_model("122B")


@pytest.fixture(scope="module")
def small() -> ModelInventory:
    return load_model("smollm2")


def check(plan: Plan, inventory: ModelInventory) -> None:
    """What holds of every plan: all layers once and in order, nothing over its limit."""
    end = 0
    for stage in plan.stages:
        assert stage.first_layer == end
        assert stage.slot_count > 0
        end += stage.layer_count
    assert end == len(inventory.layers)
    assert [stage.holds_output for stage in plan.stages] == [False] * (len(plan.stages) - 1) + [
        True
    ]
    assert not any(stage.is_coordinator and stage.is_cpu for stage in plan.stages[1:])
    devices = [stage for stage in plan.stages if not (stage.is_coordinator and stage.is_cpu)]
    assert len(devices) <= MAX_DEVICES
    names = [(stage.node_id, stage.device) for stage in plan.stages]
    assert len(set(names)) == len(names)
    for memory in (plan.coordinator_memory, *(stage.memory for stage in devices)):
        assert memory.used_bytes + memory.reserve_bytes <= memory.available_bytes
    expected = plan.expectation
    assert expected.token_ms == pytest.approx(expected.compute_ms + expected.network_ms)


def test_a_model_that_fits_stays_on_one_machine(small: ModelInventory) -> None:
    far = node("far", device("CPU", 8 * GIGABYTE, 20e9))
    plan = make_plan(small, cluster(8 * GIGABYTE, far), PlanOptions())
    check(plan, small)
    assert plan.mode is PlanMode.SINGLE
    assert plan.expectation.network_ms == 0


def test_the_programs_that_serve_take_their_part_of_what_the_coordinator_gives(
    small: ModelInventory,
) -> None:
    alone = PlanOptions(mode=PlanMode.SINGLE, reserve_bytes=0)
    needed = make_plan(small, cluster(GIGABYTE), alone).coordinator_memory
    assert needed.program_bytes == HOST_PROGRAM_BYTES
    here = cluster(GIGABYTE)
    assert can_plan(small, with_coordinator_memory(here, needed.used_bytes), alone)
    assert not can_plan(small, with_coordinator_memory(here, needed.used_bytes - 1), alone)


def test_a_much_faster_node_is_worth_its_link(small: ModelInventory) -> None:
    fast = node("fast", device("CUDA0", 8 * GIGABYTE, 900e9), rtt_ms=0.3, rate=1e9)
    plan = make_plan(small, cluster(8 * GIGABYTE, fast, rate=5e9), PlanOptions())
    check(plan, small)
    assert plan.mode is PlanMode.LAYERS
    assert plan.expectation.token_ms < 20


def test_asked_for_layers_a_node_takes_part_though_it_is_slower(small: ModelInventory) -> None:
    slow = node("slow", device("CPU", 8 * GIGABYTE, 5e9))
    plan = make_plan(small, cluster(8 * GIGABYTE, slow), PlanOptions(mode=PlanMode.LAYERS))
    check(plan, small)
    assert [stage.node_name for stage in plan.stages if not stage.is_coordinator] == ["slow"]


def test_it_spreads_over_as_many_nodes_as_asked_or_as_there_are(small: ModelInventory) -> None:
    nodes = [node(name, device("CPU", 8 * GIGABYTE, 5e9)) for name in ("ash", "birch", "cedar")]
    for wanted, used in ((2, 2), (3, 3), (9, 3)):
        options = PlanOptions(mode=PlanMode.LAYERS, minimum_stages=wanted)
        plan = make_plan(small, cluster(8 * GIGABYTE, *nodes), options)
        check(plan, small)
        assert sum(not stage.is_coordinator for stage in plan.stages) == used


@pytest.mark.parametrize("ram", [64, 96])
def test_122b_fits_one_coordinator_with_a_small_gpu(large: ModelInventory, ram: int) -> None:
    gpu = device("CUDA0", (24 if ram == 64 else 8) * GIGABYTE, 400e9)
    here = Cluster(coordinator=machine("here", device("CPU", ram * GIGABYTE, 60e9), gpu), nodes=())
    plan = make_plan(large, here, PlanOptions(mode=PlanMode.SINGLE))
    check(plan, large)
    card = next(stage for stage in plan.stages if not stage.is_cpu)
    assert card.expert_layers_in_ram
    assert plan.coordinator_memory.weight_bytes > 50 * GIGABYTE
    slow = Cluster(coordinator=machine("here", device("CPU", 96 * GIGABYTE, 60e9)), nodes=())
    alone = make_plan(large, slow, PlanOptions(mode=PlanMode.SINGLE))
    assert plan.expectation.token_ms < alone.expectation.token_ms


def test_122b_fits_one_coordinator_without_a_gpu(large: ModelInventory) -> None:
    plan = make_plan(large, cluster(96 * GIGABYTE), PlanOptions())
    check(plan, large)
    assert len(plan.stages) == 1
    weights = plan.coordinator_memory.weight_bytes
    assert weights == large.weight_bytes


@pytest.mark.parametrize("major", [4, 7])
@pytest.mark.parametrize("count", [5, 50, 200])
def test_122b_over_unlike_nodes(large: ModelInventory, count: int, major: int) -> None:
    where = random_cluster(count, seed=count, coordinator_bytes=16 * GIGABYTE, major=major)
    plan = make_plan(large, where, PlanOptions(context_tokens=8192))
    check(plan, large)
    assert plan.expectation.optimality_gap <= 0.01
    assert plan == make_plan(large, where, PlanOptions(context_tokens=8192))


def test_a_next_token_block_takes_a_slot_and_memory_only_where_it_is_loaded(
    large: ModelInventory,
) -> None:
    used = {}
    for major in (4, 7):
        plan = make_plan(large, cluster(96 * GIGABYTE, major=major), PlanOptions())
        assert plan.stages[0].layer_count == 49
        used[major] = plan.coordinator_memory.weight_bytes
    assert used[4] - used[7] == large.layers[48].weight_bytes


def test_nodes_that_are_not_ready_or_this_machine_hold_nothing(large: ModelInventory) -> None:
    size = 96 * GIGABYTE
    other = node("other", device("CPU", size), status=NodeStatus.OTHER_ENGINE)
    here = node("here", device("CPU", size))
    itself = node("itself", device("CPU", size)).model_copy(update={"is_this_machine": True})
    where = cluster(16 * GIGABYTE, other, here, itself)
    assert find_plan(large, where, PlanOptions()) is None


def test_speeds_that_were_not_measured_are_named(small: ModelInventory) -> None:
    unknown = node("new", device("CPU", 8 * GIGABYTE), rate=None)
    options = PlanOptions(mode=PlanMode.LAYERS)
    plan = make_plan(small, cluster(8 * GIGABYTE, unknown), options)
    assert len(plan.expectation.assumptions) == 2
    assert all("new" in note for note in plan.expectation.assumptions)


def test_a_node_that_claims_more_than_any_machine_has_does_no_harm(small: ModelInventory) -> None:
    liar = node("liar", device("CPU", 2**63 - 1024, 1e300), rtt_ms=1e-9)
    plan = make_plan(small, cluster(8 * GIGABYTE, liar), PlanOptions(mode=PlanMode.LAYERS))
    check(plan, small)


@pytest.mark.parametrize("mode", [PlanMode.SINGLE, PlanMode.LAYERS, PlanMode.EXPERTS])
def test_without_an_engine_sizes_are_of_the_build_that_takes_max_and_that_is_said(
    large: ModelInventory, mode: PlanMode
) -> None:
    bare = machine("here", device("CPU", 128 * GIGABYTE, 20e9))
    bare = bare.model_copy(update={"engine": None})
    ash = node("ash", device("CPU", 128 * GIGABYTE, 20e9))
    options = PlanOptions(mode=mode)
    plan = make_plan(large, Cluster(coordinator=bare, nodes=(ash,)), options)
    assert plan.engine.rpc_version is None
    assert any("no working llama.cpp engine" in note for note in plan.expectation.assumptions)
    for major in (4, 7):
        known = make_plan(large, cluster(128 * GIGABYTE, ash, major=major), options)
        assert not any("engine" in note for note in known.expectation.assumptions)
        assert plan.coordinator_memory.used_bytes >= known.coordinator_memory.used_bytes


def test_what_is_short_is_said_and_every_remedy_helps(large: ModelInventory) -> None:
    nodes = [node(name, device("CPU", 14 * GIGABYTE, 20e9)) for name in ("ash", "birch", "cedar")]
    where = cluster(16 * GIGABYTE, *nodes)
    with pytest.raises(InfeasibleError, match="short") as raised:
        make_plan(large, where, PlanOptions())
    infeasible = raised.value.infeasible
    assert infeasible.shortfalls[0].short_bytes > 10 * GIGABYTE
    assert any("one node that offers" in remedy.text for remedy in infeasible.remedies)
    size = next(r.text for r in infeasible.remedies if "one node" in r.text).split("offers ")[1]
    helped = with_nodes(where, assumed_nodes(where, size.rstrip(".")))
    assert can_plan(large, helped, PlanOptions())


def test_less_context_fewer_slots_and_smaller_caches_are_offered_where_they_help(
    small: ModelInventory,
) -> None:
    options = PlanOptions(context_tokens=8192, parallel=8)
    where = cluster(1.2 * GIGABYTE)
    with pytest.raises(InfeasibleError) as raised:
        make_plan(small, where, options)
    offered = [remedy.options for remedy in raised.value.infeasible.remedies if remedy.options]
    assert offered
    for changed in offered:
        check(make_plan(small, where, changed), small)
    contexts = [changed.context_tokens for changed in offered]
    largest = min(contexts)
    assert largest < 8192
    more = options.model_copy(update={"context_tokens": largest + 256})
    assert not can_plan(small, where, more)


def test_a_cache_type_that_does_not_suit_the_model_is_refused(small: ModelInventory) -> None:
    odd = small.model_copy(
        update={
            "layers": tuple(layer.model_copy(update={"key_width": 100}) for layer in small.layers)
        }
    )
    with pytest.raises(LinkcppError, match="cannot have these types"):
        make_plan(odd, cluster(8 * GIGABYTE), PlanOptions(cache_type_k=CacheType.Q8_0))


@settings(max_examples=repeated(25), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 12),
    context=st.integers(1, 20_000),
    parallel=st.integers(1, 4),
    major=st.sampled_from([4, 7]),
    share=st.floats(0.02, 1.0),
)
def test_any_plan_keeps_all_limits(
    *, seed: int, count: int, context: int, parallel: int, major: int, share: float
) -> None:
    inventory = load_model("30B-A3B")
    where = random_cluster(count, seed=seed, coordinator_bytes=share * 20e9, major=major)
    options = PlanOptions(context_tokens=context, parallel=parallel)
    plan = find_plan(inventory, where, options)
    assert (plan is not None) == can_plan(inventory, where, options)
    if plan is not None:
        check(plan, inventory)
