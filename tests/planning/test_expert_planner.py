"""Plans of mode experts: coverage, memory, replicas, prediction, and what is short."""

from collections import defaultdict

import pytest

from linkcpp.cluster.records import Cluster, DiscoveredNode, NodeId, NodeStatus
from linkcpp.common.errors import LinkcppError
from linkcpp.launch.surroundings import plan_again
from linkcpp.model.presets import load_model
from linkcpp.model.records import LayerKind, ModelInventory, TensorRole
from linkcpp.node.records import MAX_SEGMENTS as NODE_MOST_SEGMENTS
from linkcpp.node.records import WORKER_SCRATCH_BYTES as NODE_SCRATCH_BYTES
from linkcpp.planning.backbone import DISPATCH_MS, WORKER_SCRATCH_BYTES, without_experts
from linkcpp.planning.documents import parse_plan, plan_text
from linkcpp.planning.expert_copies import MAX_SEGMENTS
from linkcpp.planning.expert_planner import plan_experts
from linkcpp.planning.offers import remote_offers, usable_nodes
from linkcpp.planning.records import Plan, PlanMode, PlanOptions
from linkcpp.planning.routing_counts import RoutingCounts, parse_counts
from linkcpp.planning.shortfall import InfeasibleError, make_plan
from linkcpp.planning.soundness import unsound
from tests.planning.clusters import GIGABYTE, cluster, device, machine, node, random_cluster

LARGE = "122B"
ROW_BYTES = 3072 * 4
# Just enough for the backbone: no expert finds room on the coordinator.
BARE_BYTES = 12.85 * GIGABYTE


def options(**changes: object) -> PlanOptions:
    return PlanOptions(mode=PlanMode.EXPERTS).model_copy(update=changes)


def twenty_nodes() -> Cluster:
    nodes = (node(f"n{i:02}", device("CPU", 8 * GIGABYTE, 30e9)) for i in range(20))
    return cluster(24 * GIGABYTE, *nodes)


def holders_of(plan: Plan) -> dict[tuple[int, int], list[NodeId]]:
    """The nodes of each (layer, expert)."""
    holders: dict[tuple[int, int], list[NodeId]] = defaultdict(list)
    for share in plan.expert_shares:
        for segment in share.segments:
            for expert in range(segment.first, segment.last + 1):
                holders[segment.layer, expert].append(share.node_id)
    return holders


def units_of(inventory: ModelInventory) -> set[tuple[int, int]]:
    return {
        (layer.index, expert)
        for layer in inventory.layers
        if layer.kind is not LayerKind.NEXT_TOKEN
        for expert in range(layer.expert_count)
    }


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_expert_that_runs_has_holders_and_no_other_has(replicas: int) -> None:
    model = load_model(LARGE)
    plan = make_plan(model, twenty_nodes(), options(replicas=replicas))
    holders = holders_of(plan)
    assert set(holders) == units_of(model)
    assert all(len(nodes) == len(set(nodes)) <= replicas for nodes in holders.values())
    short = sum(len(nodes) < replicas for nodes in holders.values())
    assert plan.expectation.experts is not None
    assert plan.expectation.experts.short_unit_count == short
    assert plan.expectation.experts.unit_count == len(holders)
    assert (short > 0) == (replicas == 3)
    assert ("fewer than 3" in plan.reason) == (replicas == 3)
    assert ("for lack of memory" in plan.reason) == (replicas == 3)
    assert unsound(plan) is None


def test_replicas_that_too_few_machines_can_hold_are_told_as_that() -> None:
    large = node("n", device("CPU", 200 * GIGABYTE, 30e9))
    plan = make_plan(load_model(LARGE), cluster(BARE_BYTES, large), options(replicas=2))
    assert "as only 1 machine can hold any" in plan.reason
    assert "lack of memory" not in plan.reason


def test_shares_hold_what_their_segments_say_and_fit() -> None:
    model = load_model(LARGE)
    for where in (twenty_nodes(), random_cluster(30, seed=3, coordinator_bytes=20 * GIGABYTE)):
        plan = make_plan(model, where, options(replicas=2))
        for share in plan.expert_shares:
            units = sum(s.last - s.first + 1 for s in share.segments)
            assert units == share.unit_count
            size = model.layers[0].expert_bytes
            assert share.memory.weight_bytes == units * size
            room = share.memory.available_bytes - share.memory.reserve_bytes
            assert share.memory.used_bytes <= room
            assert len(share.segments) <= MAX_SEGMENTS
        assert sum(share.work_share for share in plan.expert_shares) == pytest.approx(1)
        firsts = sum(share.unit_count - share.replica_count for share in plan.expert_shares)
        assert firsts == len(units_of(model))
        memory = plan.coordinator_memory
        assert memory.used_bytes <= memory.available_bytes - memory.reserve_bytes


def test_the_backbone_has_everything_but_experts() -> None:
    model = load_model(LARGE)
    plan = make_plan(model, twenty_nodes(), options())
    (stage,) = plan.stages
    assert stage.is_coordinator
    assert stage.layer_count == 49
    assert stage.holds_output
    experts = sum(layer.role_bytes[TensorRole.EXPERT] for layer in model.layers)
    rest = model.weight_bytes - experts
    assert rest <= stage.memory.weight_bytes <= rest * 1.001
    bare = without_experts(model)
    assert all(layer.role_bytes[TensorRole.EXPERT] == 0 for layer in bare.layers)


def test_the_time_of_a_token_is_what_the_objective_says() -> None:
    # One node holds all: each layer is one round trip and eight experts read there.
    model = load_model(LARGE)
    far = node("far", device("CPU", 80 * GIGABYTE, 20e9), rtt_ms=10.0, rate=10e6)
    plan = make_plan(model, cluster(BARE_BYTES, far), options())
    (share,) = plan.expert_shares
    layer = model.layers[0]
    network = 10.0 + (ROW_BYTES + 64) / 10e6 * 1e3 + 8 * (ROW_BYTES + 8) / 10e6 * 1e3
    compute = 8 * layer.expert_bytes / 20e9 * 1e3
    expected = plan.expectation
    assert expected.network_ms == pytest.approx(48 * network)
    own = plan.stages[0].compute_ms + 48 * (compute + DISPATCH_MS)
    assert expected.compute_ms == pytest.approx(own)
    assert expected.token_ms == pytest.approx(48 * network + own)
    assert expected.optimality_gap < 1e-4
    assert expected.experts is not None
    assert expected.experts.typical_token_ms == pytest.approx(expected.token_ms)
    assert expected.experts.round_trip_count == 48
    assert expected.experts.sent_bytes == pytest.approx(48 * (ROW_BYTES + 64 + 8 * 8))
    assert expected.experts.received_bytes == pytest.approx(48 * (8 * ROW_BYTES + 64))
    assert share.compute_ms == pytest.approx(48 * compute)
    assert share.network_ms == pytest.approx(48 * network)


def test_equal_nodes_get_equal_shares() -> None:
    plan = make_plan(load_model(LARGE), twenty_nodes(), options())
    counts = [share.unit_count for share in plan.expert_shares if not share.is_coordinator]
    assert len(counts) == 20
    assert max(counts) - min(counts) <= 1


def test_far_nodes_are_left_alone_where_near_ones_suffice() -> None:
    near = [node(f"near{i}", device("CPU", 40 * GIGABYTE, 30e9), rtt_ms=0.5) for i in range(3)]
    far = [node(f"far{i}", device("CPU", 90 * GIGABYTE, 60e9), rtt_ms=80) for i in range(3)]
    plan = make_plan(load_model(LARGE), cluster(BARE_BYTES, *near, *far), options())
    assert {share.node_name for share in plan.expert_shares} == {"near0", "near1", "near2"}


def test_replicas_of_a_node_with_two_devices_are_elsewhere() -> None:
    twins = [
        node(
            f"n{i}",
            device("CPU", 40 * GIGABYTE, 30e9),
            device("CUDA0", 40 * GIGABYTE, 300e9),
        )
        for i in range(2)
    ]
    plan = make_plan(load_model(LARGE), cluster(BARE_BYTES, *twins), options(replicas=2))
    assert all(len(set(nodes)) == len(nodes) == 2 for nodes in holders_of(plan).values())


def test_a_card_of_the_coordinator_takes_the_backbone_where_it_fits() -> None:
    nodes = (node(f"n{i}", device("CPU", 40 * GIGABYTE, 30e9)) for i in range(3))
    card = device("CUDA0", 16 * GIGABYTE, 500e9)
    here = machine("here", device("CPU", 20 * GIGABYTE, 20e9), card)
    plan = make_plan(load_model(LARGE), Cluster(coordinator=here, nodes=tuple(nodes)), options())
    assert plan.stages[0].device == "CUDA0"
    assert not plan.stages[0].is_cpu
    assert plan.stages[0].compute_ms < 50
    assert any(share.is_coordinator and share.device == "CPU" for share in plan.expert_shares)


def test_a_card_too_small_for_the_backbone_holds_experts() -> None:
    nodes = (node(f"n{i}", device("CPU", 40 * GIGABYTE, 30e9)) for i in range(3))
    card = device("CUDA0", 8 * GIGABYTE, 500e9)
    here = machine("here", device("CPU", 20 * GIGABYTE, 20e9), card)
    plan = make_plan(load_model(LARGE), Cluster(coordinator=here, nodes=tuple(nodes)), options())
    assert plan.stages[0].device == "CPU"
    assert any(share.is_coordinator and share.device == "CUDA0" for share in plan.expert_shares)


def test_the_same_cluster_gives_the_same_plan_in_any_order_and_it_survives_json() -> None:
    model = load_model(LARGE)
    where = random_cluster(12, seed=1, coordinator_bytes=20 * GIGABYTE)
    back = Cluster(coordinator=where.coordinator, nodes=where.nodes[::-1])
    plan = make_plan(model, where, options(replicas=2))
    assert make_plan(model, back, options(replicas=2)) == plan
    assert parse_plan(plan_text(plan), source="p") == plan


def test_auto_spreads_experts_only_where_nothing_else_fits() -> None:
    model = load_model(LARGE)
    roomy = cluster(100 * GIGABYTE, *twenty_nodes().nodes)
    assert make_plan(model, roomy, PlanOptions()).mode is not PlanMode.EXPERTS
    # No node can hold a single layer with its experts (1.5 GB), but every one holds experts.
    small = (node(f"n{i:02}", device("CPU", 1.5 * GIGABYTE, 30e9)) for i in range(60))
    plan = make_plan(model, cluster(14 * GIGABYTE, *small), PlanOptions())
    assert plan.mode is PlanMode.EXPERTS
    assert plan.options.mode is PlanMode.AUTO
    assert "neither the coordinator alone nor layers" in plan.reason


def test_a_dense_model_is_refused_by_name() -> None:
    with pytest.raises(LinkcppError, match="has no experts to spread") as caught:
        make_plan(load_model("smollm2"), twenty_nodes(), options())
    assert "--mode layers" in (caught.value.hint or "")


def test_it_says_how_much_is_short_for_the_experts_and_what_helps() -> None:
    two = [node(f"n{i}", device("CPU", 8 * GIGABYTE, 30e9)) for i in range(2)]
    where = cluster(26 * GIGABYTE, *two)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(load_model(LARGE), where, options())
    (shortfall,) = caught.value.infeasible.shortfalls
    assert "experts of 48 layers" in shortfall.what
    assert 30 * GIGABYTE < shortfall.short_bytes < 45 * GIGABYTE
    assert any("Add one node" in remedy.text for remedy in caught.value.infeasible.remedies)
    added = node("more", device("CPU", shortfall.short_bytes * 1.1, 30e9))
    assert make_plan(load_model(LARGE), cluster(26 * GIGABYTE, *two, added), options())


def test_it_says_when_the_coordinator_cannot_hold_the_backbone() -> None:
    where = cluster(6 * GIGABYTE, *twenty_nodes().nodes)
    with pytest.raises(InfeasibleError) as caught:
        make_plan(load_model(LARGE), where, options())
    (shortfall,) = caught.value.infeasible.shortfalls
    assert "backbone" in shortfall.what
    assert shortfall.where == "the coordinator here"
    (remedy,) = caught.value.infeasible.remedies
    assert "coordinator" in remedy.text


def test_the_limits_are_those_of_the_nodes() -> None:
    assert WORKER_SCRATCH_BYTES == NODE_SCRATCH_BYTES
    assert MAX_SEGMENTS == NODE_MOST_SEGMENTS


def hot_counts(model: ModelInventory) -> RoutingCounts:
    """Two experts of each layer get nine tenths of the work."""
    return RoutingCounts(
        layers={
            layer.index: {e: 90_000 if e in (7, 200) else 80 for e in range(layer.expert_count)}
            for layer in model.layers
            if layer.kind is not LayerKind.NEXT_TOKEN
        }
    )


def layers_ms(plan: Plan, model: ModelInventory, where: Cluster, counts: RoutingCounts) -> float:
    """The slowest holder of every layer, the work shared out as it was recorded."""
    links = {n.record.node_id: (n, n.record.devices[0]) for n in where.nodes if n.record}
    times: dict[int, list[float]] = defaultdict(list)
    for share in plan.expert_shares:
        found, offered = links[share.node_id]
        assert found.link is not None
        rate = found.link.bytes_per_second or 1.0
        assert offered.read_bytes_per_second is not None
        work: dict[int, float] = defaultdict(float)
        for segment in share.segments:
            weights = counts.weights(segment.layer, 256)
            work[segment.layer] += sum(weights[segment.first : segment.last + 1])
        for layer, part in work.items():
            experts = max(1.0, 8 * part)
            row_ms = (ROW_BYTES + 8) / rate * 1e3
            read_ms = model.layers[layer].expert_bytes / offered.read_bytes_per_second * 1e3
            fixed_ms = found.link.rtt_ms + (ROW_BYTES + 64) / rate * 1e3
            times[layer].append(fixed_ms + experts * (row_ms + read_ms))
    return sum(max(of_layer) for of_layer in times.values())


def test_often_chosen_experts_are_near_and_make_a_token_faster() -> None:
    model = load_model(LARGE)
    near = node("near", device("CPU", 30 * GIGABYTE, 60e9), rtt_ms=2.0, rate=200e6)
    far = [node(f"far{i}", device("CPU", 18 * GIGABYTE, 6e9), rtt_ms=2.5) for i in range(3)]
    where = cluster(BARE_BYTES, near, *far)
    counts = hot_counts(model)
    plan = make_plan(model, where, options(), counts)
    blind = make_plan(model, where, options())
    holders = holders_of(plan)
    assert set(holders) == units_of(model)
    for layer in {layer for (layer, _), nodes in holders.items() if nodes == ["id-of-near"]}:
        assert holders[layer, 7] == ["id-of-near"]
    assert layers_ms(plan, model, where, counts) < 0.95 * layers_ms(blind, model, where, counts)
    expected = plan.expectation
    told = expected.token_ms - plan.stages[0].compute_ms - 48 * DISPATCH_MS
    assert told == pytest.approx(layers_ms(plan, model, where, counts))
    assert 0 <= expected.optimality_gap < 1
    assert all(len(share.segments) <= MAX_SEGMENTS for share in plan.expert_shares)


def test_the_often_chosen_get_the_replicas_that_there_is_room_for() -> None:
    model = load_model(LARGE)
    nodes = [node(f"n{i}", device("CPU", 20 * GIGABYTE, 30e9)) for i in range(4)]
    plan = make_plan(model, cluster(BARE_BYTES, *nodes), options(replicas=2), hot_counts(model))
    holders = holders_of(plan)
    assert any(len(nodes) < 2 for nodes in holders.values())
    assert all(len(n) == 2 for (_, expert), n in holders.items() if expert in (7, 200))


def test_a_plan_that_is_made_again_without_a_node_still_heeds_the_counts() -> None:
    model = load_model(LARGE)
    near = node("near", device("CPU", 30 * GIGABYTE, 60e9), rtt_ms=2.0, rate=200e6)
    far = [node(f"far{i}", device("CPU", 18 * GIGABYTE, 6e9), rtt_ms=2.5) for i in range(5)]
    counts = hot_counts(model)
    made = make_plan(model, cluster(BARE_BYTES, near, *far), options(), counts)
    first = parse_plan(plan_text(made), source="the supervisor's copy")
    rest = cluster(BARE_BYTES, near, *far[:4])
    again = plan_again(model, rest, first)
    assert again.expert_shares == make_plan(model, rest, options(), counts).expert_shares
    assert again.expert_shares != make_plan(model, rest, options()).expert_shares


def test_counts_of_another_model_are_refused() -> None:
    model = load_model(LARGE)
    for layers in ({77: {0: 1}}, {48: {0: 1}}, {0: {256: 1}}):
        with pytest.raises(LinkcppError, match="routing counts name"):
            plan_experts(model, twenty_nodes(), options(), RoutingCounts(layers=layers))


def test_counts_are_read_with_care() -> None:
    good = parse_counts('{"layers": {"0": {"5": 812, "7": 3}}, "more": 1}', source="c.json")
    assert good.layers == {0: {5: 812, 7: 3}}
    weights = good.weights(0, 8)
    assert sum(weights) == pytest.approx(1)
    assert weights[5] == pytest.approx(813 / 823)
    for bad in ("", "[]", '{"layers": {"0": {"5": -1}}}', '{"layers": {"x": {}}}', "[" * 100_000):
        with pytest.raises(LinkcppError, match="no routing counts"):
            parse_counts(bad, source="c.json")


def test_a_node_with_another_build_computes_experts_but_no_layers() -> None:
    other = [
        node.model_copy(update={"status": NodeStatus.OTHER_ENGINE}) for node in twenty_nodes().nodes
    ]
    cluster = twenty_nodes().model_copy(update={"nodes": tuple(other)})
    assert len(usable_nodes(cluster, PlanMode.EXPERTS)) == len(other)
    assert usable_nodes(cluster, PlanMode.LAYERS) == ()
    assert usable_nodes(cluster, PlanMode.AUTO) == ()


def with_disk(found: DiscoveredNode, slice_bytes: float) -> DiscoveredNode:
    assert found.record is not None
    changes = {"slice_bytes": int(slice_bytes)}
    return found.model_copy(update={"record": found.record.model_copy(update=changes)})


def held_by(plan: Plan, name: str) -> int:
    return sum(s.memory.weight_bytes for s in plan.expert_shares if s.node_name == name)


def test_a_node_gets_no_more_experts_than_its_owner_lets_onto_its_disk() -> None:
    model = load_model(LARGE)
    large = device("CPU", 100 * GIGABYTE, 30e9)
    free = cluster(BARE_BYTES, node("attic", large), node("cellar", large))
    assert held_by(make_plan(model, free, options()), "attic") > 10 * GIGABYTE
    attic, cellar = free.nodes
    narrow = cluster(BARE_BYTES, with_disk(attic, 10 * GIGABYTE), cellar)
    plan = make_plan(model, narrow, options())
    assert 0 < held_by(plan, "attic") < 10 * GIGABYTE
    assert set(holders_of(plan)) == units_of(model)
    none = cluster(BARE_BYTES, with_disk(attic, 0), cellar)
    assert held_by(make_plan(model, none, options()), "attic") == 0


def test_all_devices_of_a_node_share_its_disk() -> None:
    cards = [device(f"CUDA{number}", 40 * GIGABYTE, 500e9) for number in range(2)]
    attic = with_disk(node("attic", *cards, device("CPU", 40 * GIGABYTE, 30e9)), 20 * GIGABYTE)
    cellar = node("cellar", device("CPU", 100 * GIGABYTE, 30e9))
    plan = make_plan(load_model(LARGE), cluster(BARE_BYTES, attic, cellar), options())
    assert 10 * GIGABYTE < held_by(plan, "attic") < 20 * GIGABYTE


def test_where_the_disk_is_what_is_short_the_hint_names_that_limit() -> None:
    large = device("CPU", 100 * GIGABYTE, 30e9)
    narrow = cluster(BARE_BYTES, with_disk(node("attic", large), 10_000_000))
    with pytest.raises(InfeasibleError) as refused:
        make_plan(load_model(LARGE), narrow, options())
    hint = refused.value.hint or ""
    assert hint.startswith("Give slices more of the disk of attic (10.0 MB now): `--slices`")


def test_every_engine_process_of_a_node_takes_its_part_of_the_main_memory() -> None:
    card, cpu = device("CUDA0", GIGABYTE, 500e9), device("CPU", 60 * GIGABYTE, 30e9)
    found = node("attic", card, cpu)
    assert found.record is not None
    record = found.record.model_copy(update={"server_bytes": 90_000_000})
    found = found.model_copy(update={"record": record})
    offers = remote_offers(cluster(GIGABYTE, found), options())
    assert {offer.device: offer.available_bytes for offer in offers} == {
        "CUDA0": GIGABYTE,
        "CPU": 60 * GIGABYTE - 90_000_000,
    }
