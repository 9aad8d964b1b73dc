"""Decode and prefill: monolithic, stock RPC with the same -ot, the virtual device with workers.

    python benchmarks/dispatch.py MODEL.gguf [--workers 1,2,4] [--tokens 64] [--json]

All in one run on one machine, one thread each. ``ms a layer`` is the time per token beyond stock
RPC, divided by the layers with experts.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from linkcpp.engine.binaries import find_engines
from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.slabs import GgufSlabs
from tests.support.rpc_servers import running_rpc_server
from tests.support.swarm import (
    Device,
    Server,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)

WORDS = "but not what all were when we there can been has more if no out do so my one "


def measure(server: Server, tokens: int, repeats: int) -> dict[str, float]:
    server.complete(WORDS, 8)
    decode = [server.complete(WORDS, tokens)["timings"] for _ in range(repeats)]
    prefill = [server.complete(WORDS * 24, 1)["timings"] for _ in range(repeats)]
    return {
        "decode_ms_per_token": statistics.median(run["predicted_per_token_ms"] for run in decode),
        "prefill_tokens_per_second": statistics.median(run["prompt_per_second"] for run in prefill),
    }


@contextlib.contextmanager
def stock_rpc(engine: EngineLocation, model: Path, folder: Path) -> Iterator[Server]:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    running = running_rpc_server(engine)
    port = asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result()
    try:
        with running_llama_server(engine, model, folder, device_port=port, label="stock") as server:
            yield server
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)


def with_workers(
    engine: EngineLocation, model: Path, folder: Path, count: int, options: argparse.Namespace
) -> dict[str, Any]:
    slabs = GgufSlabs(model)
    slabs.close()
    counts = {tensor.layer: tensor.expert_count for tensor in slabs.tensors}
    with contextlib.ExitStack() as stack:
        entries = []
        for k in range(count):
            share = [
                Segment(layer=a, first=n * k // count, last=n * (k + 1) // count - 1)
                for a, n in counts.items()
            ]
            name = f"w{count}-{k}"
            worker = running_worker(engine, model, share, folder, name=name)
            entries.append(worker_entry(name, stack.enter_context(worker)))
        device: Device = stack.enter_context(running_device(engine, model, entries, folder))
        server = stack.enter_context(
            running_llama_server(engine, model, folder, device_port=device.port)
        )
        server.complete(WORDS, 8)
        before = device.status()
        began = time.perf_counter()
        server.complete(WORDS[:4], options.tokens)
        wall = time.perf_counter() - began
        after = device.status()
        calls = after["call_count"] - before["call_count"]
        parts = {
            "read_us": (after["read_seconds"] - before["read_seconds"]) / calls * 1e6,
            "swarm_us": (after["swarm_seconds"] - before["swarm_seconds"]) / calls * 1e6,
            "worker_compute_us": 1e3
            * statistics.mean(worker["mean_compute_ms"] for worker in after["workers"]),
            "layer_us": wall / calls * 1e6,
        }
        return {**measure(server, options.tokens, options.repeats), **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    engine = find_engines()[0]
    slabs = GgufSlabs(options.model)
    slabs.close()
    layers = len({tensor.layer for tensor in slabs.tensors})
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_llama_server(engine, options.model, folder, label="alone") as server:
            results["monolithic"] = measure(server, options.tokens, options.repeats)
        with stock_rpc(engine, options.model, folder) as server:
            results["stock RPC"] = measure(server, options.tokens, options.repeats)
        for count in map(int, options.workers.split(",")):
            results[f"{count} workers"] = with_workers(
                engine, options.model, folder, count, options
            )
    stock = results["stock RPC"]["decode_ms_per_token"]
    for result in results.values():
        result["ms_a_layer_over_stock"] = (result["decode_ms_per_token"] - stock) / layers
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for label, result in results.items():
        print(label.ljust(12), "  ".join(f"{key} {value:.3f}" for key, value in result.items()))


if __name__ == "__main__":
    main()
