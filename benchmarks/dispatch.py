"""Decode and prefill: monolithic, stock RPC with the same -ot, the virtual device with workers.

    python benchmarks/dispatch.py [MODEL.gguf] [--workers 1,2,4] [--servers 1,2] [--rounds 5]
        [--quick] [--json]

Everything runs at the same time, one thread each, and is asked in turns: each round measures every
set-up once, so that other work on the machine meets all of them. The best of all rounds counts.
Workers are processes that are asked over frames, as those of other machines are; servers are
rpc-servers that the device itself drives, as a coordinator's own are. ``over_stock_ms`` is the
time a token beyond stock RPC, divided by the layers with experts. ``per layer`` splits a layer's
time at batch 1: waiting for the expert ids, the workers' way and wire, the workers' own computing,
everything else (llama-server, the backing server, wire). ``wakes`` are the times a layer that
processes went to sleep and were woken (Linux only).
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from linkcpp.engine.binaries import find_engines
from linkcpp.engine.records import EngineLocation
from linkcpp.model.slices.segments import Segment
from linkcpp.worker.slabs import GgufSlabs
from tests.support.models import qwen3moe
from tests.support.rpc_servers import rpc_server
from tests.support.swarm import (
    Device,
    Server,
    own_server,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)

WORD = 300
BATCHES = (8, 64, 512)


class Setup:
    """A llama-server, what stands behind it, and the best of what was measured."""

    def __init__(self, server: Server, device: Device | None = None) -> None:
        self.server = server
        self.device = device
        self.decode_ms = float("inf")
        self.prefill = dict.fromkeys(BATCHES, float("inf"))
        self.layer_us: dict[str, float] = {}
        self.wakes = 0.0

    def measure(self, tokens: int, batches: list[int]) -> None:
        """Take one round."""
        before = self.device.status() if self.device else {}
        slept = self._sleeps()
        found = self.server.complete([WORD] * 2, tokens)["timings"]["predicted_per_token_ms"]
        if self.device and found < self.decode_ms:
            self._split(before, self.device.status(), slept)
        self.decode_ms = min(self.decode_ms, found)
        for batch in batches:
            timings = self.server.complete([WORD] * batch, 1)["timings"]
            self.prefill[batch] = min(self.prefill[batch], timings["prompt_per_token_ms"])

    def _sleeps(self) -> int:
        if self.device is None:
            return 0
        main = psutil.Process(self.device.running.process.pid)
        family = [main, *main.children(recursive=True)]
        return sum(
            int(line.split()[1])
            for process in family
            for status in Path(f"/proc/{process.pid}/task").glob("*/status")
            for line in status.read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )

    def _split(self, before: dict[str, Any], after: dict[str, Any], slept: int) -> None:
        calls = after["call_count"] - before["call_count"]
        grown = {key: (after[key] - before[key]) / calls * 1e6
                 for key in ("read_seconds", "swarm_seconds")}  # fmt: skip
        # Workers compute at the same time, so the slowest one's share counts.
        compute = 1000 * max(
            (_computed_ms(new) - _computed_ms(old)) / calls
            for old, new in zip(before["workers"], after["workers"], strict=True)
        )
        self.wakes = (self._sleeps() - slept) / calls
        self.layer_us = {
            "ids": grown["read_seconds"],
            "worker_compute": compute,
            "worker_wire_and_wait": grown["swarm_seconds"] - compute,
        }


def _computed_ms(worker: dict[str, Any]) -> float:
    total: float = worker["mean_compute_ms"] * worker["request_count"]
    return total


@contextlib.contextmanager
def stock_rpc(engine: EngineLocation, model: Path, folder: Path) -> Iterator[Server]:
    """llama-server with the same -ot on a stock rpc-server."""
    with (
        rpc_server(engine) as port,
        running_llama_server(engine, model, folder, device_port=port, label="stock") as server,
    ):
        yield server


@contextlib.contextmanager
def virtual(
    engine: EngineLocation,
    model: Path,
    folder: Path,
    count: int,
    layers: dict[int, int],
    *,
    is_own: bool,
) -> Iterator[Setup]:
    """llama-server on a virtual device with so many workers, or rpc-servers of its own."""
    folder = folder / f"{'own' if is_own else 'swarm'}-{count}"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        workers, servers = [], []
        for k in range(count):
            share = [
                Segment(layer=layer, first=n * k // count, last=n * (k + 1) // count - 1)
                for layer, n in layers.items()
            ]
            if is_own:
                servers.append(stack.enter_context(own_server(engine, model, share, name=f"w{k}")))
            else:
                worker = running_worker(engine, model, share, folder, name=f"w{k}")
                workers.append(worker_entry(f"w{k}", stack.enter_context(worker)))
        device: Device = stack.enter_context(
            running_device(engine, model, workers, folder, servers=tuple(servers))
        )
        server = stack.enter_context(
            running_llama_server(engine, model, folder, device_port=device.port)
        )
        yield Setup(server, device)


def run(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    engine = find_engines()[0]
    model = options.model or qwen3moe()
    slabs = GgufSlabs(model)
    slabs.close()
    layers = {tensor.layer: tensor.expert_count for tensor in slabs.tensors}
    batches = [batch for batch in BATCHES if not options.quick or batch == BATCHES[-1]]
    rounds, tokens = (2, 24) if options.quick else (options.rounds, options.tokens)
    with contextlib.ExitStack() as stack:
        alone = running_llama_server(engine, model, folder, label="alone")
        setups = {
            "monolithic": Setup(stack.enter_context(alone)),
            "stock RPC": Setup(stack.enter_context(stock_rpc(engine, model, folder))),
        }
        for label, counts in (("workers", options.workers), ("servers", options.servers)):
            for count in [int(word) for word in counts.split(",") if word]:
                is_own = label == "servers"
                swarm = virtual(engine, model, folder, count, layers, is_own=is_own)
                setups[f"{count} {label}"] = stack.enter_context(swarm)
        for setup in setups.values():
            setup.server.complete([WORD] * 2, 16)
        for _ in range(rounds):
            for setup in setups.values():
                setup.measure(tokens, batches)
        stock = setups["stock RPC"]
        return {
            label: {
                "decode_ms": setup.decode_ms,
                "decode_ratio_to_stock": setup.decode_ms / stock.decode_ms,
                "over_stock_ms": (setup.decode_ms - stock.decode_ms) / len(layers),
                "prefill_ms_per_token": {batch: setup.prefill[batch] for batch in batches},
                "prefill_ratio_to_stock": {
                    batch: setup.prefill[batch] / stock.prefill[batch] for batch in batches
                },
                "layer_us": setup.layer_us,
                "wakes": setup.wakes,
            }
            for label, setup in setups.items()
        }


def show(results: dict[str, dict[str, Any]]) -> None:
    for label, found in results.items():
        print(
            f"{label:12} decode {found['decode_ms']:.2f} ms a token "
            f"(x{found['decode_ratio_to_stock']:.2f}, {found['over_stock_ms']:+.2f} ms a layer)  "
            + "  ".join(
                f"prefill {batch}: {ms:.2f} (x{found['prefill_ratio_to_stock'][batch]:.2f})"
                for batch, ms in found["prefill_ms_per_token"].items()
            )
        )
        if found["layer_us"]:
            parts = ", ".join(f"{part} {us:.0f} us" for part, us in found["layer_us"].items())
            print(f"{'':12} per layer: {parts}; wakes {found['wakes']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="else a small random one is made")
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--servers", default="1,2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        results = run(options, Path(name))
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
