"""A real size, once: 122B's experts (hidden 3072, FFN 1024, 256 a layer, top-8), sliced and served.

    python benchmarks/real_size.py [--folder FOLDER] [--layers 2] [--experts 256] [--workers 8]
        [--own]

Makes a model of random but valid Q4_K and Q6_K blocks (3 GB), slices it for the workers and writes
a hollow backbone, serves it through the virtual device, and compares text and top-8
log-probabilities with a monolithic run. Prints what loading took, and each worker's memory beyond
its slice. Needs about 7 GB of memory and as much disk; everything is removed afterwards.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from linkcpp.dispatch.control import NewServer
from linkcpp.engine.binaries import find_engines
from linkcpp.model.slices.segments import parse_segment
from linkcpp.model.slices.writing import (
    choose_segments,
    open_whole_model,
    write_backbone,
    write_slice,
)
from linkcpp.worker.slabs import GgufSlabs
from tests.support.rpc_servers import process_on
from tests.support.swarm import (
    Running,
    as_json,
    own_server,
    running_device,
    running_llama_server,
    running_worker,
    worker_entry,
)
from tests.support.tiny_model import Q4_K, Q6_K, QuantType, TinyModel

HIDDEN, WIDTH, USED = 3072, 1024, 8
PROMPT = "the of and to in a is that it for on was with"
# Bytes of a block of 256 elements, and where its f16 scales are.
BLOCKS = {Q4_K: (144, (0, 2)), Q6_K: (210, (208,))}


def random_blocks(rng: np.random.Generator, quant: QuantType, *shape: int) -> npt.NDArray[np.uint8]:
    """Random weights with scales small enough that nothing overflows."""
    size, scales = BLOCKS[quant]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    for at in scales:
        blocks[..., at : at + 2] = scale
    return blocks.reshape(*shape[:-1], -1)


def make_model(path: Path, layers: int, experts: int) -> Path:
    model = TinyModel(path, "qwen3moe", layers=layers, hidden=HIDDEN)
    model.heads(query=8, key_value=4, size=64)
    model.writer.add_feed_forward_length(WIDTH)
    model.writer.add_rope_freq_base(1e6)
    model.experts(count=experts, used=USED, width=WIDTH)
    model.embeddings()
    for layer in range(layers):
        prefix = f"blk.{layer}."
        model.ones(f"{prefix}attn_norm.weight", HIDDEN)
        model.ones(f"{prefix}ffn_norm.weight", HIDDEN)
        model.ones(f"{prefix}attn_q_norm.weight", 64)
        model.ones(f"{prefix}attn_k_norm.weight", 64)
        model.attention(prefix, query=512, key=256)
        model.tensor(f"{prefix}ffn_gate_inp.weight", experts, HIDDEN)
        for part, rows, width, quant in (
            ("gate", WIDTH, HIDDEN, Q4_K),
            ("up", WIDTH, HIDDEN, Q4_K),
            ("down", HIDDEN, WIDTH, Q6_K),
        ):
            blocks = random_blocks(model.random, quant, experts, rows, width)
            name = f"{prefix}ffn_{part}_exps.weight"
            model.writer.add_tensor(name, blocks, raw_dtype=quant)
    return model.finish()


@contextlib.contextmanager
def timed(results: dict[str, Any], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    results[name] = round(time.perf_counter() - began, 2)


def memory_bytes(pid: int) -> int:
    """What a process and its rpc-server have for themselves: code of libraries does not count."""
    main = psutil.Process(pid)
    return sum(process.memory_full_info().uss for process in (main, *main.children(recursive=True)))


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    engine = find_engines()[0]
    results: dict[str, Any] = {}
    model = make_model(folder / "model.gguf", options.layers, options.experts)
    results["model_bytes"] = model.stat().st_size
    slices = [folder / f"slice-{k}.gguf" for k in range(options.workers)]
    backbone = folder / "backbone.gguf"
    with timed(results, "slicing_seconds"), open_whole_model(model) as files:
        for k, path in enumerate(slices):
            first, last = (options.experts * n // options.workers for n in (k, k + 1))
            wanted = [parse_segment(f"0-{options.layers - 1}:{first}-{last - 1}")]
            write_slice(files, choose_segments(files, wanted), path, lambda _: None)
        write_backbone(files, backbone, lambda _: None)
    results["slice_bytes"] = [path.stat().st_size for path in slices]
    results["backbone_bytes_on_disk"] = backbone.stat().st_blocks * 512
    with timed(results, "monolithic_load_seconds"):
        alone = running_llama_server(engine, model, folder, label="alone")
        alone_server = alone.__enter__()
    answer = alone_server.complete(PROMPT, options.tokens)
    results["monolithic_ms_per_token"] = answer["timings"]["predicted_per_token_ms"]
    wanted_text = as_json(answer)
    alone.__exit__(None, None, None)
    model.unlink()
    with contextlib.ExitStack() as stack:
        workers: list[Running] = []
        servers: list[NewServer] = []
        with timed(results, "workers_load_seconds"):
            for k, path in enumerate(slices):
                if options.own:
                    with contextlib.closing(GgufSlabs(path)) as slabs:
                        own = own_server(engine, path, slabs.segments, name=f"s{k}")
                    servers.append(stack.enter_context(own))
                else:
                    worker = running_worker(engine, path, None, folder, name=f"w{k}")
                    workers.append(stack.enter_context(worker))
            entries = [worker_entry(f"w{k}", worker) for k, worker in enumerate(workers)]
            device = stack.enter_context(
                running_device(engine, backbone, entries, folder, servers=tuple(servers))
            )
        with timed(results, "backbone_load_seconds"):
            server = stack.enter_context(
                running_llama_server(engine, backbone, folder, device_port=device.port)
            )
        answer = server.complete(PROMPT, options.tokens)
        results["swarm_ms_per_token"] = answer["timings"]["predicted_per_token_ms"]
        results["is_equal"] = as_json(answer) == wanted_text
        status = device.status()
        results["pairs_by_worker"] = [worker["pair_count"] for worker in status["workers"]]
        results["expert_bytes_dropped"] = status["dropped_bytes"]
        process_ids = [worker.process.pid for worker in workers]
        process_ids += [process_on(server.port).pid for server in servers]
        results["worker_bytes_beyond_slice"] = [
            memory_bytes(process_id) - path.stat().st_size
            for process_id, path in zip(process_ids, slices, strict=True)
        ]
        results["device_bytes"] = memory_bytes(device.running.process.pid)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--own", action="store_true", help="rpc-servers of the device, no workers")
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        results = run(options, Path(name))
    print(json.dumps(results, indent=2))
    if not results["is_equal"]:
        sys.exit("The answers differ.")


if __name__ == "__main__":
    main()
