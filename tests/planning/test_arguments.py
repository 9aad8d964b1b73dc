"""llama-server's arguments follow from the plan alone."""

from collections.abc import Sequence

import pytest

from linkcpp.cluster.records import Cluster
from linkcpp.model.presets import load_model
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.records import CacheType, Plan, PlanMode, PlanOptions
from linkcpp.planning.shortfall import make_plan
from tests.planning.clusters import GIGABYTE, MEGABYTE, cluster, device, machine, node

OPTIONS = PlanOptions(mode=PlanMode.LAYERS, context_tokens=1024, parallel=2, minimum_stages=3)


def value(arguments: Sequence[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def endpoints(plan: Plan) -> dict[int, str]:
    return {
        index: f"127.0.0.1:{5000 + index}"
        for index, stage in enumerate(plan.stages)
        if not stage.is_coordinator
    }


@pytest.fixture
def spread() -> Plan:
    nodes = (node(name, device("CPU", 80 * MEGABYTE, 10e9)) for name in ("ash", "birch", "cedar"))
    return make_plan(load_model("smollm2"), cluster(95 * MEGABYTE, *nodes), OPTIONS)


def test_windows_become_whole_numbers_of_layers_and_the_output(spread: Plan) -> None:
    arguments = server_arguments(spread, endpoints(spread))
    remote = [stage for stage in spread.stages if not stage.is_coordinator]
    counts = [stage.layer_count + stage.holds_output for stage in remote]
    assert value(arguments, "-ts") == ",".join(str(count) for count in counts)
    assert value(arguments, "-ngl") == str(sum(counts))
    assert value(arguments, "--device") == "RPC0,RPC1,RPC2"
    wanted = [f"127.0.0.1:{5000 + index}" for index in sorted(endpoints(spread))]
    assert value(arguments, "--rpc") == ",".join(wanted)


def test_nothing_is_left_for_the_engine_to_decide(spread: Plan) -> None:
    arguments = server_arguments(spread, endpoints(spread))
    assert value(arguments, "--fit") == "off"
    assert "--no-repack" in arguments
    assert value(arguments, "-c") == "2048"
    assert value(arguments, "-np") == "2"
    assert "--no-kv-unified" in arguments
    assert value(arguments, "--cache-ram") == "0"
    assert "-ot" not in arguments
    assert "--flash-attn" not in arguments


def test_a_plan_for_one_cpu_uses_no_device() -> None:
    plan = make_plan(load_model("smollm2"), cluster(4 * GIGABYTE), PlanOptions(repack=True))
    arguments = server_arguments(plan, {})
    assert value(arguments, "--device") == "none"
    assert value(arguments, "-ngl") == "0"
    assert "--rpc" not in arguments
    assert "-ts" not in arguments
    assert "--no-repack" not in arguments


def test_experts_that_stay_in_ram_are_named_by_layer() -> None:
    gpu = device("CUDA0", 8 * GIGABYTE, 400e9)
    here = Cluster(coordinator=machine("here", device("CPU", 96 * GIGABYTE, 60e9), gpu), nodes=())
    plan = make_plan(load_model("122B"), here, PlanOptions(mode=PlanMode.SINGLE))
    arguments = server_arguments(plan, {})
    kept = [layer for stage in plan.stages for layer in stage.expert_layers_in_ram]
    pattern, _, buffer = value(arguments, "-ot").partition("=")
    assert buffer == "CPU"
    assert pattern == rf"blk\.({'|'.join(map(str, kept))})\.ffn_[a-z_]*exps\."
    assert "CUDA0" in value(arguments, "--device")


def test_coordinator_gpus_keep_their_names_between_rpc_devices() -> None:
    gpu = device("CUDA0", 3 * GIGABYTE, 400e9)
    here = machine("here", device("CPU", 1.2 * GIGABYTE, 10e9), gpu)
    fast = node("fast", device("CUDA0", 24 * GIGABYTE, 900e9), rtt_ms=0.1, rate=1e9)
    plan = make_plan(
        load_model("30B-A3B"),
        Cluster(coordinator=here, nodes=(fast,)),
        PlanOptions(mode=PlanMode.LAYERS),
    )
    arguments = server_arguments(plan, endpoints(plan))
    names = [
        "RPC0" if not stage.is_coordinator else stage.device
        for stage in plan.stages
        if not (stage.is_coordinator and stage.is_cpu)
    ]
    assert "RPC0" in names
    assert value(arguments, "--device") == ",".join(names)


def test_a_quantized_v_cache_asks_for_flash_attention() -> None:
    options = PlanOptions(cache_type_k=CacheType.Q8_0, cache_type_v=CacheType.Q8_0)
    plan = make_plan(load_model("smollm2"), cluster(4 * GIGABYTE), options)
    arguments = server_arguments(plan, {})
    assert value(arguments, "-ctv") == "q8_0"
    assert value(arguments, "--flash-attn") == "on"


def test_a_stage_without_an_endpoint_is_a_mistake(spread: Plan) -> None:
    with pytest.raises(KeyError):
        server_arguments(spread, {})
