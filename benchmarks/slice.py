"""What slicing costs against ``cp`` and ``dd`` of as many bytes on the same disk.

    python benchmarks/slice.py [--folder FOLDER] [--gigabytes 2] [--rounds 5]

Makes a mixture model of random bytes in 122B's shape (experts of 3072 x 1024, Q4_K and Q6_K), warms
the page cache, and then in every round copies the same number of bytes in each way. ``cp`` and
``dd`` are followed by a sync of the file, because a slice is synced before it takes its name; the
times without that are printed as well. Ratios are between medians and between the best times, which
tell more where other programs run. The folder needs three times the size.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from linkcpp.model.slices.segments import parse_segment
from linkcpp.model.slices.verifying import verify_file
from linkcpp.model.slices.writing import (
    choose_segments,
    open_whole_model,
    write_backbone,
    write_slice,
)

HIDDEN, WIDTH = 3072, 1024
PARTS = (
    ("gate", WIDTH, HIDDEN, gguf.GGMLQuantizationType.Q4_K),
    ("up", WIDTH, HIDDEN, gguf.GGMLQuantizationType.Q4_K),
    ("down", HIDDEN, WIDTH, gguf.GGMLQuantizationType.Q6_K),
)


def row_bytes(width: int, kind: gguf.GGMLQuantizationType) -> int:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return width // elements * size


def make_model(path: Path, wanted_bytes: int) -> int:
    """Write a model with two layers of experts; gives the number of experts a layer."""
    expert_bytes = sum(rows * row_bytes(width, kind) for _, rows, width, kind in PARTS)
    experts = max(wanted_bytes // 2 // expert_bytes, 1)
    writer = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=True)
    writer.add_block_count(2)
    writer.add_embedding_length(HIDDEN)
    writer.add_expert_count(experts)
    generator = np.random.default_rng(0)
    for layer in range(2):
        for name, rows, width, kind in PARTS:
            shape = (experts, rows, row_bytes(width, kind))
            data = generator.integers(0, 256, shape, dtype=np.uint8)
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return experts


def program(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def slice_all(model: Path, target: Path) -> None:
    with open_whole_model(model) as files:
        chosen = choose_segments(files, [parse_segment("all:all")])
        write_slice(files, chosen, target, lambda _: None)


def backbone(model: Path, target: Path) -> None:
    with open_whole_model(model) as files:
        write_backbone(files, target, lambda _: None)


def ways(model: Path, target: Path) -> dict[str, Callable[[], None]]:
    def copied_and_hashed() -> None:
        synced(*copy)()
        program("sha256sum", target)

    def synced(*words: str | Path) -> Callable[[], None]:
        def run() -> None:
            program(*words)
            sync(target)

        return run

    copy = ("cp", "--reflink=never", "--sparse=never", model, target)
    return {
        "cp": lambda: program(*copy),
        "cp, synced": synced(*copy),
        "dd bs=4M": lambda: program("dd", f"if={model}", f"of={target}", "bs=4M"),
        "dd bs=4M, synced": lambda: program(
            "dd", f"if={model}", f"of={target}", "bs=4M", "conv=fsync"
        ),
        "cp, synced, and sha256sum": copied_and_hashed,
        "linkcpp slice": lambda: slice_all(model, target),
        "linkcpp slice --backbone": lambda: backbone(model, target),
    }


def measure(folder: Path, wanted_bytes: int, rounds: int) -> dict[str, object]:
    model, target = folder / "model.gguf", folder / "target.gguf"
    experts = make_model(model, wanted_bytes)
    program("cat", model)
    times: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, run in ways(model, target).items():
            target.unlink(missing_ok=True)
            # What others left to be written must not be charged to this one.
            os.sync()
            used = processor_seconds()
            begin = time.perf_counter()
            run()
            times.setdefault(name, []).append(time.perf_counter() - begin)
            processor.setdefault(name, []).append(processor_seconds() - used)
            if name == "linkcpp slice":
                begin = time.perf_counter()
                assert verify_file(target, lambda _: None).is_sound
                times.setdefault("linkcpp slice --verify", []).append(time.perf_counter() - begin)
    size = model.stat().st_size
    seconds = {name: statistics.median(values) for name, values in times.items()}
    best = {name: min(values) for name, values in times.items()}
    return {
        "file_bytes": size,
        "experts_per_layer": experts,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "seconds": seconds,
        "spread": {name: max(values) / min(values) for name, values in times.items()},
        "processor_seconds": {name: statistics.median(v) for name, v in processor.items()},
        "best_seconds": best,
        **{
            f"slice_to_{short}": {
                "of_medians": seconds["linkcpp slice"] / seconds[name],
                "of_best": best["linkcpp slice"] / best[name],
            }
            for short, name in (
                ("cp", "cp, synced"),
                ("dd", "dd bs=4M, synced"),
                ("cp_and_sha256sum", "cp, synced, and sha256sum"),
            )
        },
    }


def processor_seconds() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="linkcpp-slice-", dir=arguments.folder))
    try:
        found = measure(folder, int(arguments.gigabytes * 1e9), arguments.rounds)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
